"""Runs train.py in one process, on two, and from the two's checkpoint on three; compares losses, and opens the files.

scripts/ecosystem.sh python examples/etp_trainer/run.py [--json FILE]
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

TRAIN = pathlib.Path(__file__).parent / "train.py"
LIMIT = 900  # seconds, for each training
BOUND = 1e-6


def trained(folder: pathlib.Path, ranks: int, checkpoint: pathlib.Path | None = None) -> dict:
    """Return the summary of a training in a folder."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(TRAIN), str(folder), *([] if checkpoint is None else [str(checkpoint)])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}")
    return json.loads((folder / "summary.json").read_text())


def apart(found: dict, expected: dict) -> float:
    """Return the greatest difference of losses, of the steps that both have made."""
    return max(
        abs(value - expected[what][step]) for what in ("losses", "evaluated") for step, value in found[what].items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write a summary")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-") as name:
        folder = pathlib.Path(name)
        one = trained(folder / "one", 1)
        two = trained(folder / "two", 2)
        three = trained(folder / "three", 3, folder / "two/checkpoint-12")
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        print("step      one process    2 processes  3, from step 12 of the 2")
        for step in ("1", "6", "12", "18", "24"):
            values = [each["losses"].get(step) for each in (one, two, three)]
            print(f"{step:>4}" + "".join(f"{'' if value is None else f'{value:.7f}':>15}" for value in values))
        differences = [apart(each, one) for each in (two, three)]
        print(f"losses of training and evaluation differ by {differences[0]:.1e} and {differences[1]:.1e} at most")
        model = AutoModelForCausalLM.from_pretrained(folder / "two")  # plain transformers
        sizes = [
            sum(each.nbytes for each in load_file(folder / name / "model.safetensors").values())
            for name in ("one", "two")
        ]
        print(f"best step {two['best']}, read by transformers: {type(model).__name__}, {sizes[1]:,} bytes of weights")
    problems = [f"losses differ by {each}" for each in differences if each > BOUND]
    if sizes[0] != sizes[1]:
        problems.append(f"files have {sizes} bytes of weights")
    if not one["best"] == two["best"] == three["best"]:
        problems.append("other steps are the best")
    if options.json is not None:
        options.json.write_text(json.dumps({"differences": differences, "sizes": sizes, "problems": problems}))
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
