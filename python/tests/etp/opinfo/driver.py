"""Forks ranks for some operations at a time, so that a crash or a hang costs one case."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from .options import Options
from .verdicts import Finding, Report, Verdict

_STANDSTILL = 400.0  # seconds after which ranks that have not moved are killed: they have alarms of their own
_GRACE = 2.0  # seconds in which the other ranks may still say why
_TESTS = Path(__file__).parent.parent
_NO_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # lost by a fork


class HarnessError(Exception):
    """Ranks ended before the first case."""


def run(options: Options, progress: Callable[[Report], None] | None = None) -> Report:
    """Ask all cases of the operations that the options draw.

    REQUIRES: the process has no other threads, as run_apart() and the command line see to.
    """
    from . import adapters, cases  # which import torch

    adapters.preload(options.adapter)
    report = Report(options, cases.draw(options))
    entered: set[str] = set()
    began = time.monotonic()
    while unfinished := [name for name in report.names if name not in report.finished]:
        with tempfile.TemporaryDirectory(prefix="opinfo-") as folder:
            _ask(options, unfinished[: options.chunk], Path(folder), entered, report)
        report.seconds = time.monotonic() - began
        if progress is not None:
            progress(report)
    return report


def _ask(options: Options, names: Sequence[str], folder: Path, entered: set[str], report: Report) -> None:
    """Fork ranks, wait for them, and add what they found to the report."""
    from . import rank

    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = [
        context.Process(target=rank.main, args=(options, number, folder, names, entered), daemon=True)
        for number in range(options.ranks)
    ]
    for process in processes:
        process.start()
    failed = _wait(processes, folder / "records", _STANDSTILL + 4 * options.alarm)
    operation, case, row = _read(folder / "records", entered, report)
    if failed and row == "start":
        raise HarnessError("\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("log*"))))
    if failed:
        verdict, detail = _explain(processes, failed, folder)
        if row == "plain torch" and verdict is Verdict.CRASH:  # torch's own, which says nothing of what is sharded
            report.skipped.append(f"{case or operation}: plain torch ends the process ({detail})")
        else:
            report.findings.append(Finding(operation, case or operation, row, verdict, detail, ranks_agree=False))
        if not case:
            report.finished.add(operation)  # its samples could not be made


def _wait(processes: Sequence[BaseProcess], records: Path, limit: float) -> list[BaseProcess]:
    """Return the processes that ended badly, or stood still for `limit` seconds; then none of them is left."""
    running = list(processes)
    size = -1
    while running:
        ended = wait([process.sentinel for process in running], limit)
        failed = [process for process in running if process.exitcode]
        if not ended and (now := records.stat().st_size) != size:
            size = now
            continue
        if failed or not ended:
            wait([process.sentinel for process in running if process not in failed], _GRACE)
            for process in running:
                if process.exitcode is None:
                    process.kill()
            for process in running:
                process.join()
            return failed or list(processes)
        running = [process for process in running if process.exitcode is None]
    return []


def _read(records: Path, entered: set[str], report: Report) -> tuple[str, str, str]:
    """Add rank 0's records to the report; return where the ranks were last."""
    place = ("", "", "start")
    for line in records.read_text().splitlines() if records.exists() else ():
        record = json.loads(line)
        if "at" in record:
            place = tuple(record["at"])
            entered.add(place[1])
        elif "finding" in record:
            report.findings.append(Finding.from_json(record["finding"]))
        elif "skipped" in record:
            report.skipped.append(record["skipped"])
        else:
            report.finished.add(record["finished"])
    return place


def _explain(processes: Sequence[BaseProcess], failed: Sequence[BaseProcess], folder: Path) -> tuple[Verdict, str]:
    codes = [process.exitcode or 0 for process in failed]
    signals = [signal.Signals(-code).name for code in codes if code < 0]
    traces = [trace.read_text() for trace in sorted(folder.glob("trace*"))]
    if hung := [f"rank {rank}: " + _frames(trace) for rank, trace in enumerate(traces) if trace]:
        return Verdict.HANG, " || ".join(hung)
    ranks = [number for number, process in enumerate(processes) if process in failed]
    if signals and signals[0] == "SIGKILL" and len(failed) == len(processes):
        return Verdict.HANG, "no rank moved"
    tail = (folder / f"log{ranks[0]}").read_text()[-300:].replace("\n", " ")
    return Verdict.CRASH, f"rank {ranks[0]}: {signals[0] if signals else tail}"


def _frames(trace: str) -> str:
    return " < ".join(re.findall(r"in (\w+)", trace)[:6])


def run_apart(runs: Sequence[Options], timeout: float) -> list[Report]:
    """Make runs one after the other in a fresh interpreter, for a process that has threads.

    Raises:
        subprocess.TimeoutExpired: They took longer than `timeout` seconds.
        HarnessError: The interpreter failed.
    """
    with tempfile.TemporaryDirectory(prefix="opinfo-") as folder:
        asked = Path(folder) / "options.json"
        asked.write_text(json.dumps([options.to_json() for options in runs]))
        environment = {**os.environ, **_NO_THREADS}
        environment["PYTHONPATH"] = os.pathsep.join([str(_TESTS), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", f"{__package__}", "--runs", str(asked), "--json", folder]
        ended = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True, check=False)
        reports = [Path(folder) / f"report{number}.json" for number in range(len(runs))]
        if not all(report.exists() for report in reports):
            raise HarnessError((ended.stdout + ended.stderr)[-4000:])
        return [Report.load(report) for report in reports]
