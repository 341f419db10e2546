"""What the drivers of the examples share: jobs whose lines are shown as they arrive. None outlives its driver."""

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
from collections.abc import Callable, Iterable
from typing import Any

END = 60  # seconds for a job to end after SIGTERM
SHOWN = 20  # lines of a job that has failed
ELASTIC = "torch/distributed/elastic"  # in lines of torchrun's own report of a rank that has failed


def torchrun(program: pathlib.Path, ranks: int, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(program), *arguments]


def environment(name: str, folder: pathlib.Path) -> dict[str, str]:
    """Of the jobs of one run: they find each other and nobody else."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TESSERA_NAMESPACE": f"{name}-{os.getpid()}"}
    if "TESSERA_STORE" not in os.environ:
        settings["TESSERA_RUNTIME_DIR"] = str(folder)
    return os.environ | settings


class Job:
    """A process, and what it says. Thread-safe."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], quiet: bool = False) -> None:
        self.name = name
        self._quiet = quiet
        self._lines: list[str] = []
        self._ended = False
        self._news = threading.Condition()  # of a line, or of its end
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if not self._quiet:
                print(f"{self.name:9} | {line}", end="", flush=True)
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def await_line(self, pattern: str, seconds: float) -> re.Match[str]:
        """The first line that matches, all of it. Raises RuntimeError if none comes."""

        def find() -> re.Match[str] | None:
            return next((found for line in self._lines if (found := re.fullmatch(pattern, line.rstrip("\n")))), None)

        with self._news:
            self._news.wait_for(lambda: self._ended or find(), seconds)
            found = find()
        if found is None:
            raise RuntimeError(f"{self.name} has not said {pattern!r}: {self.last_words()}")
        return found

    def require_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} has ended with status {self.process.returncode}: {self.last_words()}")

    def wait(self, seconds: float) -> None:
        """Until it has ended by itself, with status 0."""
        status = self.process.wait(seconds)
        self._reader.join(END)
        if status != 0:
            raise RuntimeError(f"{self.name} ended with status {status}: {self.last_words()}")

    def end(self) -> None:
        """As Ctrl-C does; with SIGKILL if that fails."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END)
            self.process.kill()

    def last_words(self) -> str:
        """Its last lines; of torchrun's report, which is long, the first ones."""
        with self._news:
            lines = list(self._lines)
        report = next((number for number, line in enumerate(lines) if ELASTIC in line), len(lines))
        lines = lines[: report + SHOWN // 4]
        return "".join(lines[-SHOWN:]).strip() or "it said nothing"


def wait_for(jobs: Iterable[Job], seconds: float) -> None:
    """Until all have ended, with status 0. The first one that fails is named."""
    deadline = time.monotonic() + seconds
    under_way = list(jobs)
    while under_way:
        for job in list(under_way):
            if job.process.poll() is not None:
                job.wait(END)
                under_way.remove(job)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{', '.join(job.name for job in under_way)} not done after {seconds:.0f} s")
        time.sleep(0.05)


Run = Callable[[argparse.Namespace, pathlib.Path, contextlib.ExitStack], dict[str, Any]]


def drive(parser: argparse.ArgumentParser, run: Run, show: Callable[[dict[str, Any]], None]) -> None:
    """The program of a driver: parses its arguments, runs it, shows its summary, and exits: 0; 1 if the summary has
    "problems" or a job failed; 130 interrupted.

    `run` gets the arguments, a folder that lasts as long as it does, and a stack for whatever ends its jobs.
    """
    parser.add_argument("--json", type=pathlib.Path, help="file for the summary")
    parser.add_argument("--quiet", action="store_true", help="leave out what the jobs say")
    options = parser.parse_args()
    # SIGTERM as Ctrl-C; SIGINT, too: a shell script that starts a job in the background lets it ignore that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="tessera-") as folder, contextlib.ExitStack() as stack:
            summary = run(options, pathlib.Path(folder), stack)
    except (RuntimeError, OSError, ValueError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
        sys.exit(f"run.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    summary["seconds"] = time.monotonic() - begin
    show(summary)
    for problem in summary["problems"]:
        print(f"PROBLEM      {problem}")
    print(f"whole run    {summary['seconds']:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2))
    sys.exit(1 if summary["problems"] else 0)
