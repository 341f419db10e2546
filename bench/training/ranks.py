"""What a rank of a measurement does, and the processes that do it."""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tessera import etp

from .contenders import KINDS, PACED, Contender, Kind

CHECKED = 5  # steps whose losses are compared; they warm the contenders up, too


class Entry(NamedTuple):
    """A contender of one measurement."""

    name: str
    pace: float | None = None  # bytes a second of its streams

    @property
    def kind(self) -> Kind:
        return KINDS[self.name] if self.pace is None else PACED[self.name]


class Times(NamedTuple):
    """Of a step, on one rank."""

    wall: float
    cpu: float
    exposed: float
    gathered: float


@contextmanager
def joined(rank: int, size: int, folder: str) -> Iterator[etp.Group]:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with etp.init_group() as group:
        yield group
        dist.barrier()
    dist.destroy_process_group()


def compete(group: etp.Group, entries: list[Entry], options: argparse.Namespace) -> dict[str, Any]:
    """By contender: its first losses, and Times by round."""
    contenders = {each.name: each.kind.make(options, group, each.pace) for each in entries}
    for contender in contenders.values():
        for _ in range(CHECKED):
            contender.step()
    names = list(contenders)
    times: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timed(contenders[name], options.steps))
    return {name: (contender.losses[:CHECKED], times[name]) for name, contender in contenders.items()}


def timed(contender: Contender, steps: int) -> Times:
    gc.collect()
    dist.barrier()
    exposed, gathered = contender.exposed(), contender.gathered()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contender.step()
    used = time.process_time() - cpu
    dist.barrier()
    wall = time.perf_counter() - begin
    total = (wall, used, contender.exposed() - exposed, contender.gathered() - gathered)
    return Times(*(each / steps for each in total))


# --- memory


def remember(group: etp.Group, entries: list[Entry], options: argparse.Namespace) -> tuple[int, int]:
    """The most that the only contender takes beyond what the process had, and what of it is state; in bytes."""
    warm_up()
    before = taken()
    contender = entries[0].kind.make(options, group, entries[0].pace)
    contender.step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.005):
            most = max(most, taken())

    watcher = threading.Thread(target=watch, name="memory")
    watcher.start()
    for _ in range(CHECKED):
        contender.step()
    over.set()
    watcher.join()
    return most - before, sum(each.nbytes for each in contender.state())


def warm_up() -> None:
    """Imports what torch imports late, and starts its allocators."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    gc.collect()


def taken() -> int:
    """Private memory, and this process' share of what is shared."""
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = dict(line.split()[:2] for line in lines[1:])
    return (int(found["Pss_Anon:"]) + int(found["Pss_Shmem:"])) << 10


# --- clipping

CLIPPED = 100  # parameters


def clip(group: etp.Group, entries: list[Entry], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each call, for all parameters."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(CLIPPED)))
    etp.shard_module_(model, group, min_elements=0)
    model(torch.ones(1, 64)).square().sum().backward()
    found: dict[str, list[float]] = {"torch": [], "etp": []}
    calls = {"torch": torch.nn.utils.clip_grad_norm_, "etp": etp.clip_grad_norm_}
    for _ in range(10 * options.rounds):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call(model.parameters(), 1e9)
            found[name].append(time.perf_counter() - begin)
    return found


# --- the processes


def run(work: Callable[..., Any], size: int, entries: list[Entry], options: argparse.Namespace) -> list[Any]:
    """What work(group, entries, options) returns on each rank."""
    context = multiprocessing.get_context("forkserver")
    answer = context.Queue()
    with tempfile.TemporaryDirectory(prefix="tessera-", dir="/dev/shm") as folder:
        arguments = [(work, rank, size, folder, entries, options, answer) for rank in range(size)]
        ranks = [context.Process(target=_rank, args=each) for each in arguments]
        end = time.monotonic() + options.limit
        try:
            for process in ranks:
                process.start()
            found: dict[int, Any] = {}
            while len(found) < size:
                if any(process.exitcode for process in ranks) or time.monotonic() > end:
                    names = ", ".join(each.name for each in entries)
                    raise SystemExit(f"{names} on {size} ranks: not done, see above, or raise --limit")
                while not answer.empty():
                    rank, value = answer.get()
                    found[rank] = value
                time.sleep(0.05)
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in ranks:
                process.kill()
    return [found[rank] for rank in range(size)]


def _rank(
    work: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    entries: list[Entry],
    options: argparse.Namespace,
    answer: Any,
) -> None:
    os.environ["TESSERA_RUNTIME_DIR"] = folder
    with joined(rank, size, folder) as group:
        answer.put((rank, work(group, entries, options)))
