"""Runs the trainer and the receiver, and checks that the text gets better with every version.

    python examples/generate/run.py

Exit status: 0; 1 it does not, or a job failed; 130 interrupted.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
PATIENCE = 600  # seconds, for both jobs
END = 30  # seconds for a job to end after SIGTERM


def end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is None:
        job.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(END)
        job.kill()


def run_jobs(folder: pathlib.Path, steps: int, versions: int) -> list[dict[str, Any]]:
    """What the receiver has printed. Raises RuntimeError or TimeoutExpired if a job fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TESSERA_NAMESPACE": f"generate-{os.getpid()}"}
    if "TESSERA_STORE" not in environment:
        environment["TESSERA_RUNTIME_DIR"] = str(folder)
    output = folder / "written.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = {
        "inference": [sys.executable, str(HERE / "infer.py"), "--json", str(output)],
        "trainer": [*torchrun, str(HERE / "train.py"), "--steps", str(steps), "--versions", str(versions)],
    }
    deadline = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as stack:
        jobs = {}
        for name, command in commands.items():
            jobs[name] = subprocess.Popen(command, env=environment)
            stack.callback(end, jobs[name])
        # The trainer first: if it fails, the receiver would wait for another trainer.
        for name in reversed(commands):
            if status := jobs[name].wait(deadline - time.monotonic()):
                raise RuntimeError(f"the {name} ended with status {status}")
    return json.loads(output.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of the optimiser, between two versions")
    parser.add_argument("--versions", type=int, default=4, help="to send")
    parser.add_argument("--json", type=pathlib.Path, help="file for the summary")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tessera-generate-") as folder:
        try:
            written = run_jobs(pathlib.Path(folder), options.steps, options.versions)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            sys.exit(f"run.py: {error}")
    problems = []
    expected = [options.steps * number for number in range(options.versions + 1)]
    if (received := [entry["version"] for entry in written]) != expected:
        problems.append(f"received versions {received}, not {expected}")
    problems += [
        f"version {after['version']} is no better than {before['version']}"
        for before, after in itertools.pairwise(written)
        if after["bits_per_byte"] >= before["bits_per_byte"]
    ]
    seconds = time.monotonic() - begin
    print(f"--- whole run {seconds:.0f} s", *problems, sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"versions": written, "seconds": seconds, "problems": problems}, indent=2))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
