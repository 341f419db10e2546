"""Two jobs of one rank each in the process of the test, for many small batches: for tests that do not need two
processes."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tessera
from ranks import LIMIT, connect


class Loopback:
    """A job "trainer" and a job "inference", joined."""

    def __init__(self) -> None:
        with ThreadPoolExecutor(2) as threads:
            joined = [
                threads.submit(connect, role, peer, "loopback")
                for role, peer in (("trainer", "inference"), ("inference", "trainer"))
            ]
            self.trainer, self.inference = (each.result(LIMIT) for each in joined)
        self._names = (f"batch{number}" for number in itertools.count())

    def register(self, tensors: Any, **options: Any) -> tessera.Batch:
        """Registers them with the trainer's bus, under a new name."""
        return self.trainer.register(tensors, next(self._names), **options)

    def batches(
        self, tensors: Any, into: Any, hold: Any = "strong", **options: Any
    ) -> tuple[tessera.Batch, tessera.Batch]:
        """(sender, receiver) of a new batch; the options are the receiver's."""
        name = next(self._names)
        return self.trainer.register(tensors, name, hold=hold), self.inference.register(
            into, name, hold=hold, **options
        )

    def transfer(self, tensors: Any, into: Any, **options: Any) -> tessera.BatchStats:
        """Transfers tensors once; returns the receiver's statistics."""
        sender, receiver = self.batches(tensors, into, **options)
        with sender, receiver:
            move(sender, receiver)
            return receiver.stats

    def close(self) -> None:
        self.trainer.close()
        self.inference.close()


def move(sender: tessera.Batch, receiver: tessera.Batch) -> int:
    """Transfers one version from one batch into the other; raises errors of either side, the receiver's first."""
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(sender.send, timeout=LIMIT)
        try:
            version = receiver.recv(timeout=LIMIT)
        except BaseException:
            receiver.close()
            sender.close()  # so that nobody waits for the other
            raise
        sent.result(LIMIT)
    return version
