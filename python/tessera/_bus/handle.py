"""A transfer under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Literal, Protocol, cast, overload

from .. import _core
from .._errors import DeadlineExceededError, InvalidArgumentError
from .transfer import Transfer

_BAR_SECONDS = 0.1


class Handle:
    """A send or recv under way: wait for it, poll it, cancel it, or await it. Thread-safe. Dropping it never blocks;
    the transfer goes on. (What a recv has written is known to autograd once its end was seen: by wait(), done() or the
    batch's next transfer.)"""

    def __init__(self, transfer: Transfer, name: str, batch: object) -> None:
        """`name` is what errors call it. `batch` stays open as long as the handle is there."""
        self._core = transfer.core
        self._transfer = transfer
        self._name = name
        self._batch = batch

    def wait(self, timeout: float | None = None) -> int:
        """Blocks until it has ended; returns the version. Raises what it failed with, each time. After `timeout`
        seconds it raises DeadlineExceededError and the transfer goes on. Ctrl-C ends the wait, not the transfer."""
        if timeout is not None and not self._core.wait_for(timeout):
            now = self.progress
            done = f"{now.bytes_done} of {now.bytes_total} bytes"
            raise DeadlineExceededError(f"{self._name} has not ended after {timeout} s, at {done}; it goes on")
        return self._result()

    def wait_for(self, timeout: float) -> bool:
        """Waits `timeout` seconds at most: whether it has ended, well or not."""
        return self._settled(self._core.wait_for(timeout))

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._settled(self._core.done())

    def cancel(self) -> bool:
        """Ends it with CancelledError unless a receiver has begun to take it: then False, and it goes on."""
        return self._core.cancel()

    def withdraw(self) -> bool:
        """Of a send: takes the version back, also once a staged send has ended. True if no receiver had begun to take
        it; none ever will."""
        return self._core.withdraw()

    @property
    def progress(self) -> _core.Progress:
        """Bytes done and in all, of this rank, and their rate."""
        return self._core.progress()

    @property
    def version(self) -> int:
        """The version it sends or takes; 0 while a recv has chosen none."""
        return self._core.version()

    def __await__(self) -> Generator[asyncio.Future[None], None, int]:
        if not self._core.done():
            yield from self._ended()
        return self._result()

    def _ended(self) -> Generator[asyncio.Future[None], None, None]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        waiter = _core.Waiter(self._core)

        def wake() -> None:
            loop.remove_reader(waiter.fileno())
            if not future.done():
                future.set_result(None)

        loop.add_reader(waiter.fileno(), wake)
        try:
            yield from future
        finally:
            loop.remove_reader(waiter.fileno())
            waiter.close()

    def _result(self) -> int:
        """Once it has ended, or a signal ends the wait."""
        try:
            version = self._core.wait(None)
        except BaseException:
            self._settled(self._core.done())
            raise
        self._transfer.settle(True)
        return version

    def _settled(self, ended: bool) -> bool:
        if ended:
            self._transfer.settle()
        return ended

    def _show_progress(self, bars: Any) -> None:
        """Draws one of progress_bars() until it has ended."""
        with bars(desc=self._name, unit="B", unit_scale=True, unit_divisor=1024) as bar:
            ended = False
            while not ended:
                ended = self._core.wait_for(_BAR_SECONDS)
                now = self.progress
                bar.total = now.bytes_total or None
                bar.update(now.bytes_done - bar.n)

    def __repr__(self) -> str:
        state = "ended" if self.done() else f"{self.progress!r}"
        return f"Handle({self._name}, version {self.version}, {state})"


def progress_bars() -> Any:
    """tqdm's."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise InvalidArgumentError("progress=True draws with tqdm, which is missing: `pip install tqdm`") from None
    return tqdm


class _Receive(Protocol):
    """What a call returns: the version; or, not blocking, a Handle that resolves to it."""

    @overload
    def __call__(
        self,
        min_version: int | None = None,
        blocking: Literal[True] = True,
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> int: ...
    @overload
    def __call__(
        self,
        min_version: int | None = None,
        *,
        blocking: Literal[False],
        timeout: float | None = None,
        progress: bool = False,
    ) -> Handle: ...
    @overload
    def __call__(
        self,
        min_version: int | None,
        blocking: Literal[False],
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> Handle: ...
    @overload
    def __call__(
        self,
        min_version: int | None = None,
        blocking: bool = True,
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> int | Handle: ...


class _ReceiveMethod(Protocol):
    def __get__(self, batch: object, kind: type | None = None) -> _Receive: ...


def receives(method: Callable[..., int | Handle]) -> _ReceiveMethod:
    """The method itself; to type checkers, what it returns follows from `blocking`: recv() and stage() of a batch."""
    return cast(_ReceiveMethod, method)
