"""Ranks of jobs as threads of one process: tests of transfers without launching anything."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tessera

LIMIT = 60.0  # seconds after which a test hangs
_runs = itertools.count()


def until(condition: Callable[[], bool]) -> None:
    """Polls, since nothing signals the condition."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "the condition has not become true"
        time.sleep(0.001)


def connect(
    role: str, peer: str | list[str], namespace: str, rank: int = 0, world: int = 1, **options: Any
) -> tessera.Bus:
    return tessera.connect(
        "weights",
        role=role,
        peer=peer,
        rank=rank,
        world=world,
        namespace=namespace,
        timeout=LIMIT / 2,
        threads=1,
        **options,
    )


def run(jobs: Mapping[str, list[Callable[[tessera.Bus], Any]]], **options: Any) -> dict[str, list[Any]]:
    """Runs what each rank of two jobs does with its bus; returns what they return, by job and rank. The first failure
    of a rank is raised once all have ended."""
    namespace = f"run{next(_runs)}"
    (first, second) = jobs
    connected = threading.Barrier(sum(map(len, jobs.values())), timeout=LIMIT)

    def work(job: str, rank: int) -> Any:
        peer = second if job == first else first
        with contextlib.ExitStack() as stack:
            try:
                bus = stack.enter_context(connect(job, peer, namespace, rank, len(jobs[job]), **options))
                # A rank that left at once would be lost to another that is still connecting.
                connected.wait()
            except BaseException:
                connected.abort()
                raise
            return jobs[job][rank](bus)

    with concurrent.futures.ThreadPoolExecutor(sum(map(len, jobs.values()))) as pool:
        futures = {job: [pool.submit(work, job, rank) for rank in range(len(ranks))] for job, ranks in jobs.items()}
        ended, _ = concurrent.futures.wait([each for of_job in futures.values() for each in of_job], LIMIT)
        # A rank that failed lets others wait for nothing, or lose it: their errors say less.
        consequences = (tessera.DeadlineExceededError, tessera.PeerLostError, threading.BrokenBarrierError)
        errors = [error for each in ended if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda each: isinstance(each, consequences)):
            raise error
        return {job: [future.result(timeout=0) for future in of_job] for job, of_job in futures.items()}


def transfer(
    senders: Sequence[tuple[Any, Any]], receivers: Sequence[tuple[Any, Any]], versions: int = 1, **options: Any
) -> list[list[tessera.BatchStats]]:
    """Moves what the senders' ranks register, each a (tensors, map), into what the receivers' do.

    Returns the figures of both sides, a list of their ranks each. Raises what a rank failed with. Options are those of
    the receivers' register().
    """

    def rank(bus: tessera.Bus, sends: bool, tensors: Any, names: Any) -> tessera.BatchStats:
        batch = bus.register(tensors, map=names, **({} if sends else options))
        for version in range(1, versions + 1):
            if sends:
                batch.send(version, timeout=LIMIT / 3)
            else:
                batch.recv(version, timeout=LIMIT / 3)
        return batch.stats

    found = run(
        {
            "sender": [functools.partial(rank, sends=True, tensors=each, names=names) for each, names in senders],
            "receiver": [functools.partial(rank, sends=False, tensors=each, names=names) for each, names in receivers],
        }
    )
    return [found["sender"], found["receiver"]]
