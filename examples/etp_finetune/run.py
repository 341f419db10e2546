"""Runs train.py on two processes and, without its three lines, on one; compares weights, and shows what each holds.

    python examples/etp_finetune/run.py

Exit status: 0; 1 weights differ or a training failed; 130 interrupted.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
RANKS = {"unsharded": 1, "sharded": 2}
PATIENCE = 900  # seconds, for both trainings
END = 30  # seconds for a training to end after SIGTERM


def sources(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The programs, of which the unsharded one is made here by leaving three lines out."""
    sharded = HERE / "train.py"
    lines = sharded.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not re.search(r"\betp\.\w|\bimport etp\b", line)]
    if len(lines) - len(kept) != 3:
        raise RuntimeError(f"{len(lines) - len(kept)} lines of {sharded} name etp, and three should")
    unsharded = folder / "unsharded.py"
    unsharded.write_text("".join(kept))
    return {"unsharded": unsharded, "sharded": sharded}


class Training:
    """A job of torchrun, whose lines are shown as they arrive."""

    def __init__(self, name: str, program: pathlib.Path, steps: int, out: pathlib.Path, quiet: bool) -> None:
        self.name, self.out = name, out
        out.mkdir()
        self._lines: list[str] = []
        self._quiet = quiet
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        # Freed memory goes back to the system at once, so that a peak is of what is held.
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[name])]
        self.process = subprocess.Popen(
            [sys.executable, *torchrun, str(program), "--steps", str(steps), "--out", str(out)],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.append(line)
            if not self._quiet:
                print(f"{self.name:9} | {line}", end="", flush=True)

    def wait(self, seconds: float) -> None:
        """Until it has ended, with status 0."""
        status = self.process.wait(seconds)
        self._reader.join(END)
        if status != 0:
            last = "".join(self._lines[-20:]).strip() or "it said nothing"
            raise RuntimeError(f"the {self.name} training ended with status {status}: {last}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END)
            self.process.kill()

    def memory(self) -> list[dict[str, int]]:
        """Of each rank."""
        return [json.loads((self.out / f"memory-{rank}.json").read_text()) for rank in range(RANKS[self.name])]


def compare(one: pathlib.Path, other: pathlib.Path) -> dict[str, Any]:
    """Of all parameters: how many bytes there are and how many differ, and in which."""
    import torch  # takes seconds to import: the trainings have started
    from safetensors.torch import load_file

    whole, sharded = load_file(one), load_file(other)
    if {name: each.shape for name, each in whole.items()} != {name: each.shape for name, each in sharded.items()}:
        raise RuntimeError(f"{one} and {other} hold other parameters")
    differing = {
        name: int((each.view(torch.uint8) != sharded[name].view(torch.uint8)).sum()) for name, each in whole.items()
    }
    return {
        "parameters": len(whole),
        "bytes": sum(each.nbytes for each in whole.values()),
        "differing": sum(differing.values()),
        "differ": [name for name, count in differing.items() if count],
    }


def run(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """The summary; its "problems" are empty if all is well."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as stack:
        trainings = {}
        for name, program in sources(folder).items():
            trainings[name] = Training(name, program, options.steps, folder / name, options.quiet)
            stack.callback(trainings[name].end)
        for training in trainings.values():
            training.wait(deadline - time.monotonic())
    weights = compare(*(training.out / "weights.safetensors" for training in trainings.values()))
    memory = {name: training.memory() for name, training in trainings.items()}
    problems = []
    if weights["differing"] or not weights["bytes"]:
        problems.append(f"weights differ from one process': {weights}")
    (whole,) = memory["unsharded"]
    for kind in ("parameters", "gradients", "optimiser"):
        most = max(rank[kind] for rank in memory["sharded"])
        if not whole[kind] / 2 <= most < 0.51 * whole[kind]:
            problems.append(f"{kind} of a rank take {most} bytes, not half of {whole[kind]}")
    return {"steps": options.steps, "weights": weights, "memory": memory, "problems": problems}


def show(summary: dict[str, Any]) -> None:
    weights, memory = summary["weights"], summary["memory"]
    columns = [("unsharded", memory["unsharded"][0])]
    columns += [(f"rank {rank} of 2", held) for rank, held in enumerate(memory["sharded"])]
    print("\nmemory in MB   " + "".join(f"{name:>13}" for name, _ in columns))
    for kind in ("parameters", "gradients", "optimiser", "peak"):
        print(f"{kind:15}" + "".join(f"{held[kind] / 1e6:>13.1f}" for _, held in columns))
    print(
        f"weights        after {summary['steps']} steps {weights['differing']} of {weights['bytes']:,} bytes of "
        f"{weights['parameters']} parameters differ from one process'"
    )
    for problem in summary["problems"]:
        print(f"PROBLEM        {problem}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of the optimiser")
    parser.add_argument("--json", type=pathlib.Path, help="file for the summary")
    parser.add_argument("--quiet", action="store_true", help="leave out what the trainings say")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tessera-finetune-") as folder:
        try:
            summary = run(options, pathlib.Path(folder))
        except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            sys.exit(f"run.py: {error}")
    summary["seconds"] = time.monotonic() - begin
    show(summary)
    print(f"whole run      {summary['seconds']:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2))
    sys.exit(1 if summary["problems"] else 0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
