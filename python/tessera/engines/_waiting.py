"""Servers that wait on the bus under a name that their trainer does not know.

A server that loads its weights from the trainer has no HTTP yet, and a trainer offers its tensors only to jobs that it
names. So both register a batch of one byte besides, which is never sent: there a trainer sees whoever has come, and a
server sees that the trainer is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .._bus.bus import Bus
from .._errors import DeadlineExceededError, Error
from ._names import user_name, with_end

_MOST_NAMED = 5


class Callers:
    """The trainer's end."""

    def __init__(self, bus: Bus, batch: str, timeout: float) -> None:
        """Collective over the trainer's ranks."""
        self._batch = bus.register(_nothing(), _name(batch), direction="send", timeout=timeout)
        self._known = frozenset(bus.peers)
        self._pair = bus.pair

    def unknown(self) -> list[str]:
        """Names of jobs that wait for this trainer, and that it does not name."""
        jobs = [job for job, peer in self._batch.peers.items() if peer.attached and job not in self._known]
        return [user_name(job, self._pair) for job in jobs]

    def hint(self, name: str, how: str) -> str:
        """Return what to add to an error about a server that is not there; empty: nothing.

        Args:
            name: That the trainer gives it.
            how: Says where such a server is given its name.
        """
        waiting = self.unknown()[:_MOST_NAMED]
        if not waiting:
            return ""
        verb = "waits" if len(waiting) == 1 else "wait"
        return (
            f"; {', '.join(waiting)} {verb} for this trainer, which has no server of that name: call it so in "
            f"engines={{NAME: URL}}, or give it the name {name!r} in {how}"
        )


@contextlib.contextmanager
def seen_by_trainer(bus: Bus, batch: str, how: str) -> Iterator[None]:
    """Let the trainer see, within, that this job waits for what it offers.

    Args:
        how: Says where this server is given its name.

    Raises:
        DeadlineExceededError: In place of one that is raised within, if the trainer is there, and does not name this
            job.
    """
    with bus.register(_nothing(), _name(batch)) as waiting:
        with contextlib.suppress(Error):  # in the background: a trainer of another release does not answer
            _ = waiting.newest
        try:
            yield
        except DeadlineExceededError as error:
            if waiting.direction is None:
                raise
            trainer, own = user_name(bus.peer, bus.pair), user_name(bus.role, bus.pair)
            raise DeadlineExceededError(
                f"{trainer} is there, and offers nothing to {own!r}: name this server so in its engines={{NAME: URL}}, "
                f"or give it the name that stands there in {how} ({error})"
            ) from None


def _nothing() -> dict[str, torch.Tensor]:
    return {"nothing": torch.zeros(1, dtype=torch.uint8)}


def _name(batch: str) -> str:
    return with_end(batch, ".waiting")
