"""Runs the trainer and the receiver, and checks that the text gets better with every version.

    python examples/generate/run.py

Exit status: 0; 1 it does not, or a job failed; 130 interrupted.
"""

import argparse
import contextlib
import itertools
import json
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from jobs import Job, drive, environment, torchrun, wait_for

HERE = pathlib.Path(__file__).resolve().parent
TRAINERS = 2
PATIENCE = 600  # seconds, for both jobs


def run(options: argparse.Namespace, folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The summary; its "problems" are empty if all is well."""
    output = folder / "written.json"
    length = ["--steps", str(options.steps), "--versions", str(options.versions)]
    commands = {
        "inference": [sys.executable, str(HERE / "infer.py"), "--json", str(output)],
        "trainer": torchrun(HERE / "train.py", TRAINERS, *length),
    }
    jobs = []
    for name, command in commands.items():
        jobs.append(Job(name, command, environment("generate", folder), options.quiet))
        stack.callback(jobs[-1].end)
    wait_for(jobs, PATIENCE)
    written = json.loads(output.read_text())
    problems = []
    expected = [options.steps * number for number in range(options.versions + 1)]
    if (received := [entry["version"] for entry in written]) != expected:
        problems.append(f"received versions {received}, not {expected}")
    problems += [
        f"version {after['version']} is no better than {before['version']}"
        for before, after in itertools.pairwise(written)
        if after["bits_per_byte"] >= before["bits_per_byte"]
    ]
    return {"versions": written, "problems": problems}


def show(summary: dict[str, Any]) -> None:
    bits = ", ".join(f"{entry['bits_per_byte']:.2f}" for entry in summary["versions"])
    print(f"bits per byte, version by version: {bits}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of the optimiser, between two versions")
    parser.add_argument("--versions", type=int, default=4, help="to send")
    drive(parser, run, show)


if __name__ == "__main__":
    main()
