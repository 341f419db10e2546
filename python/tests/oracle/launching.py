"""Starts the processes of a launch, and collects their records."""

from __future__ import annotations

import multiprocessing.process
import pickle
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import fork_server
import torch.distributed as dist

from . import worker
from .cases import Case, Launch
from .worker import Record, Sabotage

DEADLINE = 700  # seconds, of a launch


@dataclass(frozen=True)
class Outcome:
    """The records of every process for every case."""

    launch: Launch
    cases: list[Case]
    records: dict[int, dict[int, Record]]  # by case, by process
    seconds: float


def launch_cases(launch: Launch, cases: list[Case], sabotage: Sabotage | None = None) -> Outcome:
    """Raises RuntimeError with a process's error."""
    began = time.monotonic()
    context = fork_server.context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="oracle-") as name:
        folder = Path(name)
        processes = [
            context.Process(target=worker.run, args=(launch, cases, process, folder, store.port, sabotage), daemon=True)
            for process in range(launch.world)
        ]
        try:
            for process in processes:
                process.start()
            _wait_for(processes, began + DEADLINE)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        _check(launch, folder)
        seen = [pickle.loads((folder / f"{process}.records").read_bytes()) for process in range(launch.world)]
    records = {case.index: {process: each[case.index] for process, each in enumerate(seen)} for case in cases}
    return Outcome(launch, cases, records, time.monotonic() - began)


def _wait_for(processes: list[multiprocessing.process.BaseProcess], deadline: float) -> None:
    """Waits until all have ended or one has failed."""
    running = list(processes)
    while running and all(process.exitcode in (None, 0) for process in processes):
        left = deadline - time.monotonic()
        if left <= 0 or not wait([process.sentinel for process in running], left):
            return
        running = [process for process in running if process.exitcode is None]


def _check(launch: Launch, folder: Path) -> None:
    errors = []
    for process in range(launch.world):
        if (folder / f"{process}.records").exists():
            continue
        error = folder / f"{process}.error"
        said = error.read_text() if error.exists() else f"no end within {DEADLINE} s, or stopped with the others"
        log = folder / f"{process}.log"
        errors.append(f"--- process {process}: {said}{log.read_text() if log.exists() else ''}")
    if errors:
        raise RuntimeError(f"launch {launch.name} failed\n" + "\n".join(errors))
