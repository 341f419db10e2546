"""Runs the trainer, the server and a load generator, and checks every version on the way.

    python examples/weight_sync/run.py

Exit status: 0; 1 a check failed or a job died; 130 interrupted.
"""

import argparse
import contextlib
import http.client
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

import load

HERE = pathlib.Path(__file__).resolve().parent
TRAINERS = 4
START, STEP, END = 600, 300, 60  # seconds: until the first answer, for a version, for a process to end
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


class Job:
    """A process whose lines are shown as they arrive."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], quiet: bool) -> None:
        self.name = name
        self._lines: list[str] = []
        self._address: str | None = None
        self._news = threading.Event()  # that it has an address, or has ended
        self._quiet = quiet
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.append(line)
            if not self._quiet:
                print(f"{self.name:9} | {line}", end="", flush=True)
            if found := re.fullmatch(r"serving on (http://\S+)\n", line):
                self._address = found[1]
                self._news.set()
        self._news.set()

    def address(self) -> str:
        """The address at which it serves."""
        self._news.wait(START)
        if self._address is None:
            raise RuntimeError(f"{self.name} does not serve: {self._last()}")
        return self._address

    def require_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} has ended with status {self.process.returncode}: {self._last()}")

    def wait(self, seconds: float) -> None:
        """Waits until it has ended by itself, with status 0."""
        status = self.process.wait(seconds)
        self._reader.join(END)
        if status != 0:
            raise RuntimeError(f"{self.name} ended with status {status}: {self._last()}")

    def end(self) -> None:
        """Ends it as Ctrl-C does; with SIGKILL if that fails."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END)
            self.process.kill()

    def _last(self) -> str:
        return "".join(self._lines[-20:]).strip() or "it said nothing"


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
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["TESSERA_NAMESPACE"] = f"weight-sync-{os.getpid()}"
    if "TESSERA_STORE" not in environment:
        environment["TESSERA_RUNTIME_DIR"] = str(folder)

    def start(name: str, *arguments: str) -> Job:
        job = Job(name, [sys.executable, *arguments], environment, options.quiet)
        stack.callback(job.end)
        return job

    versions = [options.steps * number for number in range(options.versions + 1)]
    checks = folder / "checks"
    checks.mkdir()
    gate = [checks / f"version-{version}.safetensors" for version in versions]
    gate[0].touch()
    checked = ["--check", str(checks)]
    server = start("inference", str(HERE / "serve.py"), "--port", "0", "--dtype", options.dtype, *checked)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(TRAINERS)]
    length = ["--steps", str(options.steps), "--versions", str(options.versions)]
    wire = ["--wire", options.wire] if options.wire else []
    trainer = start("trainer", *torchrun, str(HERE / "train.py"), *length, *wire, *checked)

    import check  # these take seconds to import: the jobs have started
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    sentences = [sentence for pair in PAIRS for sentence in pair]
    url = server.address()
    loaded = folder / "load.json"
    generator = start("load", str(HERE / "load.py"), "--url", url, "--seconds", "600", "--json", str(loaded))
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
    for problem in summary["problems"]:
        print(f"PROBLEM      {problem}")


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
    parser.add_argument("--json", type=pathlib.Path, help="file for the summary")
    parser.add_argument("--quiet", action="store_true", help="leave out what the jobs say")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tessera-sync-") as folder, contextlib.ExitStack() as stack:
        try:
            summary = run(options, pathlib.Path(folder), stack)
        except (RuntimeError, OSError, ValueError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
            sys.exit(f"run.py: {error}")
    summary["seconds"] = time.monotonic() - begin
    show(summary)
    print(f"whole run    {summary['seconds']:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2))
    sys.exit(1 if summary["problems"] else 0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
