"""Runs the trainer, the server and a load generator, and checks every version on the way.

    python examples/weight_sync/run.py

Exit status: 0; 1 a check failed or a job died; 130 interrupted.
"""

import argparse
import contextlib
import json
import pathlib
import signal
import sys
import time
from typing import Any

import load

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from jobs import END, Job, drive, environment, torchrun

HERE = pathlib.Path(__file__).resolve().parent
TRAINERS = 4
START, STEP = 600, 300  # seconds: until the first answer, for a version
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # of a similarity
WIRES = ["nvfp4", "mxfp8", "mxfp8_e5m2", "fp8_e4m3", "fp8_e5m2", "fp8_block_1x128", "fp8_block_128x128"]
MOVES = 0.01  # training changes some similarity by at least this, from the first version to the last
PAIRS = [
    ("The with statement runs a block under a context manager.", "The file is closed once the block is left."),
    ("A generator yields its values one after another.", "Each call of next() runs its body up to the next yield."),
    ("A tuple cannot be changed once it is made.", "Decorators are applied to a function when it is defined."),
    ("A cat sleeps on the sofa.", "A kitten naps on the couch."),
    ("A cat sleeps on the sofa.", "Profits fell by six per cent in the third quarter."),
]


def get(url: str, path: str) -> Any:
    connection = load.connect(url)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())


def await_version(
    url: str, version: int, written: pathlib.Path, sentences: list[str], jobs: list[Job]
) -> list[list[float]]:
    """The vectors of `sentences` once the server answers with `version`.

    Once the trainer has written it and is about to send it, it asks without pause, so that a request overlaps the swap.
    """
    deadline = time.monotonic() + STEP
    with contextlib.closing(load.connect(url)) as connection:
        while True:
            (_, held), vectors = load.ask(connection, sentences)
            if held == version:
                return vectors
            for job in jobs:
                job.require_alive()
            if held > version or time.monotonic() > deadline:
                raise RuntimeError(f"the server answers with version {held} after {STEP} s, not with {version}")
            if not written.exists():
                time.sleep(0.1)


def largest_change(before: list[float], after: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(before, after, strict=True))


def run(options: argparse.Namespace, folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The summary; its "problems" are empty if all is well."""
    surroundings = environment("weight-sync", folder)

    def start(name: str, command: list[str]) -> Job:
        job = Job(name, command, surroundings, options.quiet)
        stack.callback(job.end)
        return job

    versions = [options.steps * number for number in range(options.versions + 1)]
    checks = folder / "checks"
    checks.mkdir()
    gate = [checks / f"version-{version}.safetensors" for version in versions]
    gate[0].touch()
    checked = ["--check", str(checks)]
    serve = [sys.executable, str(HERE / "serve.py"), "--port", "0", "--dtype", options.dtype, *checked]
    server = start("inference", serve)
    length = ["--steps", str(options.steps), "--versions", str(options.versions)]
    wire = ["--wire", options.wire] if options.wire else []
    trainer = start("trainer", torchrun(HERE / "train.py", TRAINERS, *length, *wire, *checked))

    import check  # these take seconds to import: the jobs have started
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    sentences = [sentence for pair in PAIRS for sentence in pair]
    url = server.await_line(r"serving on (http://\S+)", START)[1]
    loaded = folder / "load.json"
    asking = [sys.executable, str(HERE / "load.py"), "--url", url, "--seconds", "600", "--json", str(loaded)]
    generator = start("load", asking)
    problems, seen = [], []
    for version, file in zip(versions, gate, strict=True):
        vectors = await_version(url, version, file, sentences, [trainer, server, generator])
        found = check.similarities(torch.tensor(vectors))
        exact = check.expected(checks, version, dtype, sentences)
        wanted = check.expected(checks, version, dtype, sentences, options.wire) if options.wire else exact
        difference = largest_change(found, wanted)
        weights = get(url, "/status")["checks"].get(str(version)) if version else None
        if difference > TOLERANCE[options.dtype]:
            problems.append(f"version {version}: similarities differ from one process' by {difference:.1e}")
        if version and (weights is None or weights["differing"] or not weights["elements"]):
            problems.append(f"version {version}: weights differ from the trainer's: {weights}")
        seen.append(
            {
                "version": version,
                "similarities": found,
                "max_difference": difference,
                "quantising_changes": largest_change(found, exact) if version and options.wire else None,
                "weights": weights,
            }
        )
        file.unlink()
    trainer.wait(STEP)
    generator.process.send_signal(signal.SIGTERM)
    generator.process.wait(END)
    traffic = json.loads(loaded.read_text())
    if traffic["failed"] or set(versions) - {answers["version"] for answers in traffic["answers"]}:
        problems.append(f"the load generator saw {traffic['failed']} failures, answers {traffic['answers']}")
    sent = [entry["similarities"] for entry in seen[1:]]
    moved = largest_change(sent[0], sent[-1]) if len(sent) > 1 else None
    if moved is not None and moved < MOVES:
        problems.append(f"training has changed no similarity by {MOVES}, but by {moved:.1e} at most")
    status = get(url, "/status")
    server.process.send_signal(signal.SIGTERM)
    server.wait(END)
    return {
        "dtype": options.dtype,
        "wire": options.wire,
        "versions": seen,
        "moved": moved,
        "load": traffic,
        "server": status,
        "problems": problems,
    }


def show(summary: dict[str, Any]) -> None:
    versions = summary["versions"]
    print("\nsimilarity of           " + "".join(f"{'version ' + str(seen['version']):>12}" for seen in versions))
    for index, pair in enumerate(PAIRS):
        print(f"  {pair[0]}\n  {pair[1]}")
        print(" " * 24 + "".join(f"{seen['similarities'][index]:>12.4f}" for seen in versions))
    print("from one process' by    " + "".join(f"{seen['max_difference']:>12.1e}" for seen in versions))
    if summary["moved"] is not None:
        first, last = versions[1]["version"], versions[-1]["version"]
        print(f"largest change {summary['moved']:.4f} from version {first} to {last}; {MOVES} at least is wanted")
    for seen in versions[1:]:
        weights = seen["weights"]
        print(f"version {seen['version']}: {weights['differing']} of {weights['elements']:,} elements differ in a bit")
    traffic, server = summary["load"], summary["server"]
    answered = ", ".join(f"{answers['count']} by version {answers['version']}" for answers in traffic["answers"])
    print(f"requests     {traffic['requests']}, failed {traffic['failed']}; answered: {answered}")
    for name, figures in (("swap", server["swap_ms"]), ("blocked", server["blocked_ms"])):
        print(f"{name:12} {figures['count']}: median {figures['median']:.1f} ms, max {figures['max']:.1f} ms")
    if summary["wire"]:
        show_quantised(summary["wire"], server["bytes"], [seen["quantising_changes"] for seen in versions[1:]])


def show_quantised(wire: str, traffic: dict[str, float], changes: list[float]) -> None:
    megabytes = {name: f"{traffic[name] / 1e6:.1f} MB" for name in ("quantised", "quantised_in_bf16", "moved")}
    print(
        f"{wire:12} {megabytes['quantised']} of matrices, {megabytes['quantised_in_bf16']} in bf16: "
        f"{traffic['quantised_ratio']:.3f}; whole model {megabytes['moved']}: {traffic['moved_ratio']:.3f}"
    )
    print(
        f"{'':12} similarities change by {max(changes):.4f} at most from those of the weights as the trainer has them"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="of the optimiser, between two versions")
    parser.add_argument("--versions", type=int, default=3, help="to send")
    parser.add_argument("--dtype", choices=TOLERANCE, default="fp32", help="of the server's weights")
    parser.add_argument("--wire", choices=WIRES, help="that the encoder's matrices are quantised to on their way")
    drive(parser, run, show)


if __name__ == "__main__":
    main()
