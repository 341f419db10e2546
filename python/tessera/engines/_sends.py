"""The calls of a trainer of engines, on all of its ranks."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from .._bus.bus import Bus
from .._errors import InvalidArgumentError
from ._numbers import Numbers
from ._ranks import Ranks, State
from ._under_way import Deadline, Sent, Updates
from ._updates import EngineUpdate

_MARGIN_SECONDS = 0.9  # beyond the time-out, which rank 0 may have used up


class Sends:
    """The calls of one rank of a Trainer, whatever its engines are. Rank 0 has the servers updated, and tells the
    other ranks when a call of its own has ended, and what it has raised. They wait for that before they send the next
    version, or leave: one that was ahead would have rank 0 count from it as a server joins, and one that has left takes
    with it what a server still reads."""

    def __init__(
        self,
        bus: Bus,
        batch: Any,
        ranks: Ranks,
        urls: dict[str, str],
        update: Callable[[str, Sent], EngineUpdate],
        timeout: float,
        grace: float | None = None,
    ) -> None:
        """
        Args:
            bus: The trainer's.
            batch: What it sends; `ranks`: its ranks.
            urls, update, grace: See Updates.
            timeout: Seconds for a send.
        """
        self._bus = bus
        self._batch = batch
        self._ranks = ranks
        self._timeout = timeout
        # Counted here, not by the batch: ranks that come to an engine one after the other must not count from each
        # other.
        self._numbers = Numbers(bus.world, lambda: int(batch.version))
        self._sending = threading.Lock()
        self._updates = Updates(urls, update, grace, self._tell_busy) if ranks.leads else None

    def begin(self, work: Callable[[str], None], seconds: float) -> None:
        """Do `work` for each server on rank 0. The other ranks wait for that, and raise what it raises there.

        Args:
            seconds: That it takes at most.
        """
        if self._updates is None:
            self._ranks.wait_for_begin(seconds)
            return
        error: BaseException | None = None
        try:
            self._updates.for_each(work)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._tell_end(0, error)

    def send(self, version: int | None) -> dict[str, EngineUpdate]:
        """See Trainer.send()."""
        with self._sending:
            if self._bus.closed:
                raise InvalidArgumentError("this trainer is closed: make another one")
            deadline = Deadline(self._timeout)
            if self._updates is None:
                return self._send_along(version, deadline)
            number, error = self._numbers.next(version), None
            try:
                with self._numbers.sending(number):
                    self._batch.send(number.on_bus, timeout=deadline.left).wait()
                return self._updates.run(Sent(number, deadline))
            except Exception as caught:  # after an interrupt the other ranks need not know: servers go on
                error = caught
                raise
            finally:
                self._tell_end(number.on_bus, error)

    def _send_along(self, version: int | None, deadline: Deadline) -> dict[str, EngineUpdate]:
        """Send as another rank than 0. An error of rank 0 is raised once this rank's part of the version is there, as
        rank 0 may have gone on."""
        last, number = self._last, self._numbers.next(version)
        try:
            # Counted from here on: rank 0 sends this number, whatever becomes of it on this rank.
            with self._numbers.sending(number):
                state = self._ranks.wait_for_end(last, deadline.left + _MARGIN_SECONDS)
                self._batch.send(number.on_bus, timeout=max(deadline.left, _MARGIN_SECONDS)).wait()
        except Exception:
            self._ranks.has_failed(number.on_bus)
            raise
        self._ranks.has_sent(number.on_bus)
        self._ranks.raise_failure(state)
        return {}

    def wait_for_ranks(self, sent: Sent) -> None:
        """Wait until all ranks have sent a version, on rank 0, before a server joins: a rank that sends less than the
        others as they first meet a server takes their count for its own, and cannot send that version any more. Raises
        UnavailableError."""
        self._ranks.wait_for_all(sent.number.on_bus, sent.deadline.left)

    @property
    def _last(self) -> int:
        """The last version's number on the bus; 0 before the first."""
        return 0 if self._numbers.last is None else self._numbers.last.on_bus

    def _tell_end(self, call: int, error: BaseException | None) -> None:
        self._ranks.tell(lambda state: self._with_busy(state.after(call, error)))

    def _tell_busy(self) -> None:
        self._ranks.tell(self._with_busy)

    def _with_busy(self, state: State) -> State:
        assert self._updates is not None
        return dataclasses.replace(state, busy=state.ended >= 0 and self._updates.busy)

    def close(self) -> None:
        """Leaves the bus, once no server is busy any more. The last of rank 0's errors that was not raised here yet is
        raised then."""
        if self._bus.closed:
            return
        state = State()
        try:
            if self._updates is not None:
                self._updates.close()
            else:
                state = self._ranks.wait_until_idle(self._last, 2 * self._timeout)
        finally:
            self.abandon()
        self._ranks.raise_failure(state)

    def abandon(self) -> None:
        """Leaves at once."""
        if self._updates is not None:
            self._updates.abandon()
        try:
            self._ranks.close()
        finally:
            self._bus.close(linger=0)  # servers take a version only when they are asked to
