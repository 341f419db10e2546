"""Ranks of jobs as threads of one process: what a transfer does, without launching anything."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import tessera

LIMIT = 60.0  # seconds after which a test hangs
_runs = itertools.count()


def connect(role: str, peer: str, namespace: str, rank: int = 0, world: int = 1, **options: Any) -> tessera.Bus:
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

    def work(job: str, rank: int) -> Any:
        peer = second if job == first else first
        with connect(job, peer, namespace, rank, len(jobs[job]), **options) as bus:
            return jobs[job][rank](bus)

    with concurrent.futures.ThreadPoolExecutor(sum(map(len, jobs.values()))) as pool:
        futures = {job: [pool.submit(work, job, rank) for rank in range(len(ranks))] for job, ranks in jobs.items()}
        concurrent.futures.wait([each for of_job in futures.values() for each in of_job], LIMIT)
        return {job: [future.result(timeout=0) for future in of_job] for job, of_job in futures.items()}
