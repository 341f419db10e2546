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
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from jobs import Job, drive, environment, torchrun, wait_for

HERE = pathlib.Path(__file__).resolve().parent
RANKS = {"unsharded": 1, "sharded": 2}
PATIENCE = 900  # seconds, for both trainings


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


def measured(folder: pathlib.Path, ranks: int) -> list[dict[str, int]]:
    """What each rank has measured."""
    return [json.loads((folder / f"memory-{rank}.json").read_text()) for rank in range(ranks)]


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


def run(options: argparse.Namespace, folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The summary; its "problems" are empty if all is well."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    # Freed memory goes back to the system at once, so that a peak is of what is held.
    settings = {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    trainings = []
    for name, program in sources(folder).items():
        (folder / name).mkdir()
        command = torchrun(program, RANKS[name], "--steps", str(options.steps), "--out", str(folder / name))
        trainings.append(Job(name, command, environment("finetune", folder) | settings, options.quiet))
        stack.callback(trainings[-1].end)
    wait_for(trainings, PATIENCE)
    weights = compare(*(folder / name / "weights.safetensors" for name in RANKS))
    memory = {name: measured(folder / name, ranks) for name, ranks in RANKS.items()}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of the optimiser")
    drive(parser, run, show)


if __name__ == "__main__":
    main()
