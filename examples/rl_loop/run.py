"""Runs the trainer and the inference job, and compares digests of the weights of both.

    python examples/rl_loop/run.py

Exit status: 0; 1 weights differ, training does not help, or a job failed; 130 interrupted.
"""

import argparse
import contextlib
import json
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from jobs import Job, drive, environment, torchrun, wait_for

HERE = pathlib.Path(__file__).resolve().parent
TRAINERS, WRITERS = 4, 2
PATIENCE = 1200  # seconds, for both jobs
SHOWN = 72  # characters of a sample


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Names of tensors whose digests are not equal, or that one side lacks."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def run(options: argparse.Namespace, folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The summary; its "problems" are empty if all is well."""
    course = ["--steps", str(options.steps), "--versions", str(options.versions), "--reward", str(options.reward)]
    wire = ["--wire", options.wire] if options.wire else []
    outputs = {name: folder / f"{name}.json" for name in ("trainer", "inference")}
    commands = {
        "trainer": torchrun(HERE / "train.py", TRAINERS, *course, *wire, "--json", str(outputs["trainer"])),
        "inference": torchrun(HERE / "infer.py", WRITERS, "--json", str(outputs["inference"])),
    }
    surroundings = environment("rl-loop", folder)
    jobs = []
    for name, command in commands.items():
        jobs.append(Job(name, command, surroundings, options.quiet))
        stack.callback(jobs[-1].end)
    wait_for(jobs, PATIENCE)
    trained, written = (json.loads(outputs[name].read_text()) for name in ("trainer", "inference"))
    return compared(trained, written, [options.steps * number for number in range(1, options.versions + 1)])


def compared(trained: dict[str, Any], written: dict[str, Any], expected: list[int]) -> dict[str, Any]:
    """What both jobs have seen, side by side."""
    problems = []
    random, *received = written["versions"]
    for job, entries in (("trainer", trained["versions"]), ("inference", received)):
        if (versions := [entry["version"] for entry in entries]) != expected:
            problems.append(f"{job} has versions {versions}, not {expected}")
    versions = [{"version": 0, "loss": None, "score": random["score"], "samples": random["samples"]}]
    for sent, taken in zip(trained["versions"], received, strict=False):
        differ = differing(sent["digests"], taken["digests"])
        if differ or not sent["digests"]:
            problems.append(f"version {sent['version']}: {len(differ)} tensors have other digests: {differ[:5]}")
        versions.append({**taken, "loss": sent["loss"], "differ": differ})
    differ = differing(trained["model"], written["model"])
    if differ or not trained["model"]:
        problems.append(f"at the end the models hold other bytes in {len(differ)} tensors: {differ[:5]}")
    losses = [entry["loss"] for entry in versions[1:]]
    if len(losses) > 1 and not losses[-1] < losses[0]:
        problems.append(f"the loss has not fallen: {losses}")
    tensors = {"trainer": trained["model"], "inference": written["model"]}
    return {"versions": versions, "tensors": tensors, "differ": differ, "problems": problems}


def show(summary: dict[str, Any]) -> None:
    print(f"\n{'version':>7} {'loss':>7} {'score':>6} {'equal':>9}  a sample")
    for entry in summary["versions"]:
        loss, equal = "-", "-"
        if entry["loss"] is not None:
            count = len(entry["digests"])
            loss, equal = f"{entry['loss']:.3f}", f"{count - len(entry['differ'])} of {count}"
        sample = "".join(each if each.isprintable() else "·" for each in entry["samples"][0][:SHOWN])
        print(f"{entry['version']:>7} {loss:>7} {entry['score']:>6.3f} {equal:>9}  {sample}")
    tensors = summary["tensors"]
    print("\nSHA-256 of whole tensors in both jobs' memory at the end:")
    for name in list(tensors["trainer"])[:3]:
        one, other = tensors["trainer"][name], tensors["inference"].get(name, "")
        print(f"  {name:<32} {one[:16]}... {'==' if one == other else '!='} {other[:16]}...")
    count = len(tensors["trainer"])
    print(f"  {count - len(summary['differ'])} of {count} tensors equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of the optimiser, between two versions")
    parser.add_argument("--versions", type=int, default=5, help="to send")
    parser.add_argument("--reward", type=float, default=0.2, help="how much samples count; the text counts 1")
    parser.add_argument("--wire", metavar="FORMAT", help="that matrices are quantised to on their way: nvfp4, ...")
    drive(parser, run, show)


if __name__ == "__main__":
    main()
