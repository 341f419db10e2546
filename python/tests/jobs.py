"""Two jobs in one process: each rank is a thread with a bus of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tessera

TIMEOUT = 20
_runs = itertools.count()


def transfer(
    senders: Sequence[tuple[Any, Any]], receivers: Sequence[tuple[Any, Any]], versions: int = 1, **options: Any
) -> list[list[tessera.BatchStats]]:
    """Moves what the senders' ranks register, each a (tensors, map), into what the receivers' do.

    Returns the figures of both sides, a list of their ranks each. Raises what a rank failed with. Options are those of
    the receivers' register().
    """
    namespace = f"jobs-{os.getpid()}-{next(_runs)}"

    def rank(role: str, peer: str, number: int, world: int, registered: tuple[Any, Any]) -> tessera.BatchStats:
        with tessera.connect(
            "weights",
            role=role,
            peer=peer,
            rank=number,
            world=world,
            namespace=namespace,
            store="auto",
            timeout=TIMEOUT,
            threads=1,
        ) as bus:
            tensors, names = registered
            batch = bus.register(tensors, map=names, **(options if role == "receiver" else {}))
            for version in range(1, versions + 1):
                if role == "sender":
                    batch.send(version, timeout=TIMEOUT)
                else:
                    batch.recv(version, timeout=TIMEOUT)
            return batch.stats

    return _together(
        [lambda i=i, one=one: rank("sender", "receiver", i, len(senders), one) for i, one in enumerate(senders)],
        [lambda i=i, one=one: rank("receiver", "sender", i, len(receivers), one) for i, one in enumerate(receivers)],
    )


def _together(*sides: Sequence[Callable[[], Any]]) -> list[list[Any]]:
    with ThreadPoolExecutor(sum(len(side) for side in sides)) as pool:
        futures = [[pool.submit(call) for call in side] for side in sides]
        errors = [error for side in futures for future in side if (error := future.exception()) is not None]
        # A rank that failed makes others wait in vain: those errors say less.
        for error in sorted(errors, key=lambda each: isinstance(each, tessera.DeadlineExceededError)):
            raise error
        return [[future.result() for future in side] for side in futures]
