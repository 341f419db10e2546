"""Transfers: how they begin, and what they hold until they end."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from .. import _core
from .._errors import CancelledError, Error
from .registration import Held

What: TypeAlias = Literal["send", "recv", "stage"]


class Transfer:
    """A transfer of the core in progress, and what it holds until it has ended: memory, its place, and the tensors that
    it writes."""

    def __init__(self, core: _core.Handle, held: Sequence[Held], writes: bool, torn: Callable[[], bool]) -> None:
        """torn: whether a transfer that has failed may have written."""
        self.core = core
        self._held = held
        self._writes = writes
        self._torn: Callable[[], bool] | None = torn

    def begun(self) -> None:
        """The caller goes on while it is in progress."""
        if self._writes:
            for held in self._held:
                held.written()

    def settle(self, well: bool = False) -> None:
        """Bumps the counters of what it has written, and releases it. Idempotent. REQUIRES: it has ended; `well`, if
        the caller knows whether it succeeded."""
        held, self._held = self._held, ()
        torn, self._torn = self._torn, None  # it holds the core's batch, and with it this rank's place on the bus
        if held and self._writes and (well or self._has_written(torn)):
            for each in held:
                each.written()

    def _has_written(self, torn: Callable[[], bool] | None) -> bool:
        try:
            self.core.wait(None)
        except Error:
            return torn is None or torn()
        return True


_LOOK_SECONDS = 1.0  # as often as the core looks while it waits


def _wait(event: threading.Event, end: float = math.inf) -> bool:
    """Waits until the event is set, or until `end`; returns whether it is set. Ctrl-C ends the wait, also if another
    thread got the signal or called `_thread.interrupt_main()`: neither wakes a lock, so it polls."""
    while not event.wait(max(min(end - time.monotonic(), _LOOK_SECONDS), 0.0)):
        if time.monotonic() >= end:
            return False
    return True


class Beginning:
    """A transfer that begins now or in the background, once its batch is registered; or that never does. Thread-safe.

    It is over when it has begun, has failed or was cancelled."""

    def __init__(self, what: What, blocking: bool = True, before: Beginning | None = None) -> None:
        """before: The transfer before it."""
        self.what: What = what
        #: The caller that starts it waits for its end.
        self.blocking = blocking
        #: Its handle was dropped: the next transfer of the batch waits for its end.
        self.abandoned = False
        self._before = before
        self._transfer: Transfer | None = None
        self._error: Exception | None = None
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._told: list[Callable[[], None]] = []

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def transfer(self) -> Transfer | None:
        """The transfer, if it has begun."""
        return self._transfer

    def begin(self, start: Callable[[], Transfer]) -> Transfer:
        """Starts it. Raises CancelledError if it was cancelled."""
        with self._lock:
            if self._error is not None:
                raise copy.copy(self._error)
            self._transfer = start()
            self._before = None  # it has ended: otherwise the core would not have started this one
            self._end()
            return self._transfer

    def fail(self, error: Exception) -> None:
        with self._lock:
            if not self.over:
                self._error = error.with_traceback(None)
                self._end()

    def cancel(self, name: str) -> bool:
        """See Handle.cancel()."""
        with self._lock:
            if not self.over:
                self.fail(CancelledError(f"{name} was cancelled before it began"))
                return True
            transfer = self._transfer
        return transfer is not None and transfer.core.cancel()

    def waits_for(self) -> Beginning | None:
        """An earlier transfer that is still in progress although its handle was dropped."""
        before = self._before
        while before is not None and before._transfer is None:
            before = before._before
        return before if before is not None and before.abandoned and not before.ended() else None

    def ended(self) -> bool:
        """Whether the transfer has ended, successfully or not."""
        return self.over and (self._transfer is None or self._transfer.core.done())

    def wait_for(self, timeout: float) -> bool:
        """Waits for its end, at most `timeout` seconds."""
        end = time.monotonic() + timeout
        if not _wait(self._over, end):
            return False
        return self._transfer is None or self._transfer.core.wait_for(max(end - time.monotonic(), 0.0))

    def over_within(self, timeout: float) -> bool:
        """Waits until it is over, at most `timeout` seconds. Its transfer may have just begun."""
        return _wait(self._over, time.monotonic() + timeout)

    def wait(self) -> Transfer:
        """Returns the transfer once it has begun. Raises its error if it has failed."""
        _wait(self._over)  # it has its own deadline
        if self._error is not None:
            raise copy.copy(self._error)  # a copy each time, with its own traceback
        assert self._transfer is not None
        return self._transfer

    def when_over(self, told: Callable[[], None]) -> None:
        """Calls it once the transfer is over, on any thread; now, if it is over already."""
        with self._lock:
            if not self.over:
                self._told.append(told)
                return
        told()

    def _end(self) -> None:
        self._over.set()
        told, self._told = self._told, []
        for each in told:
            each()
