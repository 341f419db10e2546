"""How a server tells its trainer what came of an update: SGLang answers "Success" whatever a loader has done."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import torch

from ..._bus.bus import Bus, connect
from ..._closing import Closing
from ..._errors import DeadlineExceededError, PeerLostError, UnavailableError
from .._names import with_end
from .._updates import Ranks, RankStatus, fields_of, read

_BYTES = 1 << 16
_MOST_TEXT = 500  # characters
_OTHER_BYTES = 600  # of a rank's status, beside two texts
_TEXT_BYTES = 2 * 6  # of a character of both, in JSON
_BATCH = "verdicts"
_RETRY_SECONDS = 0.1
_POLL_SECONDS = 0.01
_GRACE_SECONDS = 2.0  # verdicts are told before SGLang answers


def _names(trainer: str, engine: str) -> tuple[str, str]:
    """The jobs of both ends."""
    return with_end(f"{trainer}.{engine}", ""), with_end(engine, ".verdicts")


class Teller(Closing):
    """The end of the server's first rank."""

    def __init__(self, pair: str, trainer: str, engine: str, store: str | None, timeout: float) -> None:
        """Blocks until the trainer's end is there."""
        reader, teller = _names(trainer, engine)
        self._bus = connect(pair, role=teller, peer=reader, store=store, rank=0, world=1, timeout=timeout)
        self._memory = torch.zeros(_BYTES, dtype=torch.uint8)
        self._batch = self._bus.register({"verdicts": self._memory}, _BATCH, "staged")
        self._timeout = timeout

    def tell(self, ranks: Ranks) -> None:
        most = min(_MOST_TEXT, max(0, _BYTES // len(ranks) - _OTHER_BYTES) // _TEXT_BYTES)
        text = json.dumps([fields_of(each.shortened(most)) for each in ranks]).encode()
        self._memory.zero_()
        self._memory[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        # The host's clock: a server that is started again goes on with higher numbers.
        self._batch.send(time.monotonic_ns(), timeout=self._timeout).wait()

    def close(self) -> None:
        self._bus.close(linger=_GRACE_SECONDS)

    def abandon(self) -> None:
        self._bus.abandon()


class Reader(Closing):
    """The trainer's end for one server, which may come later, and be started again."""

    def __init__(self, pair: str, trainer: str, engine: str, store: str | None, timeout: float) -> None:
        self._options = pair, trainer, engine, store
        self._engine = engine
        self._timeout = timeout
        self._bus: Bus | None = None
        self._batch: Any = None
        self._memory = torch.zeros(_BYTES, dtype=torch.uint8)

    def newest(self) -> int:
        """The number of the last verdict that there is."""
        if self._batch is None:
            return 0
        try:
            return int(max(self._batch.version, self._batch.newest))
        except (PeerLostError, UnavailableError):  # it has ended; if it is started again, its numbers are higher
            return int(self._batch.version)

    def read(self, after: int, hurry: threading.Event, seconds: float | None = None) -> list[RankStatus]:
        """That of each rank, of the first verdict with a number above `after`, for which it waits only a moment once
        `hurry` is set and the server has joined. Raises UnavailableError for an answer that is none, and
        DeadlineExceededError, UnavailableError or PeerLostError where none comes in time.

        Args:
            seconds: To wait, if that is less than the time-out.
        """
        timeout = self._timeout if seconds is None else min(self._timeout, seconds)
        end = time.monotonic() + timeout
        if self._bus is None:
            pair, trainer, engine, store = self._options
            reader, teller = _names(trainer, engine)
            bus = connect(pair, role=reader, peer=teller, store=store, rank=0, world=1, timeout=timeout)
            try:
                self._batch = bus.register({"verdicts": self._memory}, _BATCH)
            except BaseException:
                bus.close()
                raise
            self._bus = bus
        self._receive(after + 1, end, hurry)
        text = self._memory.numpy().tobytes().rstrip(b"\0")
        try:
            told = json.loads(text)
            if isinstance(told, list) and told:
                return [read(RankStatus, each) for each in told]
        except ValueError:
            pass
        raise UnavailableError(f"{self._engine} told {text[:_MOST_TEXT]!r}, not a verdict")

    def _receive(self, version: int, end: float, hurry: threading.Event) -> None:
        hurried = False
        while True:
            if hurry.is_set() and not hurried:
                end, hurried = min(end, time.monotonic() + _GRACE_SECONDS), True
            try:
                if self._is_registered():
                    self._batch.wait_version(version, _RETRY_SECONDS)
                    self._batch.recv(version, timeout=max(end - time.monotonic(), _RETRY_SECONDS))
                    return
                if time.monotonic() > end:
                    raise DeadlineExceededError(f"{self._engine} has not joined to tell what its ranks hold")
                time.sleep(_POLL_SECONDS)
            except DeadlineExceededError:
                if time.monotonic() > end:
                    raise
            except (PeerLostError, UnavailableError):  # of a server that is started again
                if time.monotonic() > end:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _is_registered(self) -> bool:
        """Registers with the server in the background. A registration with the little time of one look, given up and
        begun again, would end the server's own each time, and with it what the server tells."""
        if self._batch.direction is None:
            _ = self._batch.newest
        return self._batch.direction is not None

    def close(self) -> None:
        if self._bus is not None:
            self._bus.close()
