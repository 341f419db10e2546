"""A transfer in progress."""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Protocol, cast, overload

from .. import _core
from .._arguments import seconds
from .._errors import DeadlineExceededError, Error, InvalidArgumentError
from .transfer import Beginning

_BAR_SECONDS = 0.1


class Handle:
    """A send or recv under way: wait for it, poll it, cancel it, or await it. Thread-safe.

    A transfer that is not blocking begins at once if its batch is registered with the other job. Otherwise the batch is
    registered in the background first, and if that fails, its error is the handle's.

    Dropping a handle before the transfer has ended cancels the transfer, as cancel() does, and warns: keep the handle.
    Dropping never blocks. Cancelling an `await` cancels it, too. If it is too late to cancel, the transfer goes on, and
    the next one of its batch begins after it. (Autograd learns what a recv has written once wait(), done() or the
    batch's next transfer finds that it has ended.)"""

    def __init__(
        self, beginning: Beginning, name: str, batch: object, peers: Callable[[], dict[str, _core.BatchPeer]]
    ) -> None:
        """Errors call it `name`. `batch` stays open as long as the handle lives."""
        self._peers = peers
        self._beginning = beginning
        self._name = name
        self._batch = batch

    def wait(self, timeout: float | None = None) -> int:
        """Blocks until it has ended and returns the version. If it failed, every call raises its error. After `timeout`
        seconds it raises DeadlineExceededError and the transfer goes on. Ctrl-C ends the wait, not the transfer."""
        if timeout is not None and not self._beginning.wait_for(seconds("timeout", timeout)):
            raise DeadlineExceededError(f"{self._name} has not ended after {timeout} s, {self._state()}; it goes on")
        return self._result()

    def wait_for(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds; returns whether it has ended, successfully or not."""
        return self._settled(self._beginning.wait_for(seconds("timeout", timeout)))

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._settled(self._beginning.ended())

    def cancel(self) -> bool:
        """Ends it with CancelledError, unless a receiver has begun to take it: then it returns False, and goes on."""
        return self._beginning.cancel(self._name)

    def withdraw(self) -> bool:
        """For a send: withdraws the version, even after a staged send has ended. True if no receiver had begun to take
        it; then none ever will."""
        if not self._beginning.over:
            return self.cancel()
        transfer = self._beginning.transfer
        return transfer is not None and transfer.core.withdraw()

    @property
    def progress(self) -> _core.Progress:
        """Bytes of this rank, done and in total, and their rate."""
        transfer = self._beginning.transfer
        return _core.Progress() if transfer is None else transfer.core.progress()

    @property
    def version(self) -> int:
        """The version it sends or takes; 0 while a recv has chosen none, or the batch is being registered."""
        transfer = self._beginning.transfer
        return 0 if transfer is None else transfer.core.version()

    @property
    def peers(self) -> dict[str, _core.BatchPeer]:
        """For a send: the other jobs by name, as they are now. A job has this version, or a newer one, if its `version`
        is at least this one. Otherwise `error` says why not; None if it may still take it."""
        return self._peers()

    def __await__(self) -> Generator[asyncio.Future[None], None, int]:
        try:
            yield from self._ended()
        except asyncio.CancelledError as error:
            self._beginning.abandoned = True
            if (yield from self._goes_on()):
                error.add_note(f"{self._name} has begun: it goes on, and the next transfer of its batch waits for it")
            raise
        except GeneratorExit:  # the coroutine was closed
            self._beginning.abandoned = True
            self._cancel_elsewhere()
            raise
        return self._result()

    def _goes_on(self) -> Generator[asyncio.Future[None], None, bool]:
        """Cancels it; returns whether it was too late for that."""
        loop = asyncio.get_running_loop()
        answered = loop.create_future()
        outcome: list[bool] = []

        def cancel() -> None:
            try:
                outcome.append(not self.cancel() and not self._beginning.ended())
            except Error:  # the agent does not answer
                outcome.append(True)
            finally:
                _wake(loop, answered)

        self._cancel_elsewhere(cancel)
        yield from answered
        return outcome == [True]

    def _cancel_elsewhere(self, cancel: Callable[[], object] | None = None) -> None:
        """Cancels in a thread, since it may have to ask an agent: not on an event loop, and not in the garbage
        collector."""
        work = partial(self._beginning.cancel, self._name) if cancel is None else cancel
        threading.Thread(target=work, name="tessera-cancel", daemon=True).start()

    def _ended(self) -> Generator[asyncio.Future[None], None, None]:
        loop = asyncio.get_running_loop()
        if not self._beginning.over:
            over = loop.create_future()
            self._beginning.when_over(partial(_wake, loop, over))
            yield from over
        transfer = self._beginning.transfer
        if transfer is None or transfer.core.done():
            return
        ended = loop.create_future()
        waiter = _core.Waiter(transfer.core)

        def wake() -> None:
            loop.remove_reader(waiter.fileno())
            _resolve(ended)

        loop.add_reader(waiter.fileno(), wake)
        try:
            yield from ended
        finally:
            loop.remove_reader(waiter.fileno())
            waiter.close()

    def _result(self) -> int:
        """The result, once it has ended or a signal ends the wait."""
        transfer = self._beginning.wait()
        try:
            version = transfer.core.wait(None)
        except BaseException:
            self._settled(transfer.core.done())
            raise
        transfer.settle(True)
        return version

    def _settled(self, ended: bool) -> bool:
        transfer = self._beginning.transfer if ended else None
        if transfer is not None:
            transfer.settle()
        return ended

    def _state(self) -> str:
        if not self._beginning.over:
            return "while it waits to be registered with the other job"
        now = self.progress
        return f"at {now.bytes_done} of {now.bytes_total} bytes"

    def __del__(self) -> None:
        beginning = getattr(self, "_beginning", None)
        if beginning is None or beginning.abandoned or sys.is_finalizing():
            return
        try:
            if beginning.ended():
                return
        except Error:  # in a forked child: it belongs to its parent
            return
        beginning.abandoned = True
        warnings.warn(
            f"the handle of {self._name} was dropped before it had ended, which cancels it if nobody has begun to take "
            "it: keep the handle, and wait for it",
            RuntimeWarning,
            stacklevel=2,
            source=self,
        )
        self._cancel_elsewhere()

    def _show_progress(self, bars: Any) -> None:
        """Draws one of progress_bars() until it has ended."""
        with bars(desc=self._name, unit="B", unit_scale=True, unit_divisor=1024) as bar:
            ended = False
            while not ended:
                ended = self._beginning.wait_for(_BAR_SECONDS)
                now = self.progress
                bar.total = now.bytes_total or None
                bar.update(now.bytes_done - bar.n)

    def __repr__(self) -> str:
        state = "ended" if self.done() else f"{self.progress!r}" if self._beginning.over else "registering"
        return f"Handle({self._name}, version {self.version}, {state})"


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Called from any thread."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def progress_bars() -> Any:
    """tqdm's bars."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise InvalidArgumentError("progress=True draws with tqdm, which is missing: `pip install tqdm`") from None
    return tqdm


class _Receive(Protocol):
    """The return type: the version or, if not blocking, a Handle that resolves to it."""

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
    """Returns the method itself; for type checkers, `blocking` determines the return type of recv() and stage()."""
    return cast(_ReceiveMethod, method)
