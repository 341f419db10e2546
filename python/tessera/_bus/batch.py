"""A registered batch: tensors that are transferred as one."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from .. import _core
from .._arguments import seconds, whole
from .._errors import CancelledError, DeadlineExceededError, Error, InvalidArgumentError, UnimplementedError
from .attachment import Attachment, Direction, Mode, Share, left_of
from .handle import Handle, progress_bars, receives
from .lingering import EXIT_LINGER, Lingering, depth_of_user
from .registration import Held
from .transfer import Beginning, Transfer, What

_LEAST_LINGER = 1e-3  # of one that was to wait


class Batch(Lingering):
    """Tensors that are transferred as one. Thread-safe; one transfer at a time."""

    def __init__(
        self,
        bus: _core.Bus,
        name: str,
        shares: Sequence[Share],
        *,
        mode: Mode,
        timeout: float,
        snapshots: int,
        pinned: bool,
        delta: bool = False,
        grace: float | None = None,
        linger: float | None = None,
        named: int = 1,
        forget: Callable[[Batch], None],
    ) -> None:
        self._shares = sorted(shares, key=lambda share: share.name)
        self._timeout = timeout
        self._linger = timeout if linger is None else linger
        self._forget = forget
        self._attachment = Attachment(bus, name, self._shares, timeout, (mode, snapshots, pinned, delta), grace)
        self._named = named
        self._starting = threading.Lock()  # of self._beginning
        self._beginning: Beginning | None = None  # of the last transfer
        self._last: Transfer | None = None  # it may still be in progress
        self._process = os.getpid()
        #: Its name, which both jobs use.
        self.name = name
        #: "inplace" or "staged".
        self.mode = mode

    # --- properties

    @property
    def names(self) -> tuple[str, ...]:
        """Names on the bus of its tensors. Once a receiver is registered, without those that the sender lacks."""
        return tuple(name for share in self._shares for name in share.registration.names)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of entries that are not tensors, and of those that missing_ok left out."""
        return tuple(name for share in self._shares for name in share.registration.skipped)

    @property
    def version(self) -> int:
        """The version held: last received, or last sent; 0 before the first."""
        core = self._attachment.core
        return core.version() if core is not None else 0

    @property
    def direction(self) -> Direction | None:
        """Either "send" or "recv"; None before it is registered with the other job."""
        return self._attachment.direction

    @property
    def newest(self) -> int:
        """Receiver: the newest complete version on offer, 0 if none; waits for no peer. The readiness signal.

        Before the first recv() it registers the batch with the other job in the background, and is 0 until that is
        done. An error of that registration is raised once; the next call tries again."""
        return self.ask(None)

    @property
    def peers(self) -> dict[str, _core.BatchPeer]:
        """The other jobs by name, once it is registered: whether each is attached, the version that it has, and its
        error. First those that connect() named, then those that have come besides."""
        core = self._attachment.core
        return {peer.job: peer for peer in core.peers()} if core is not None else {}

    def wait_peers(self, jobs: int | None = None, version: int = 0, timeout: float | None = None) -> None:
        """Sender: registers the batch and blocks until so many other jobs are attached or, with a version, until that
        many have taken it or a newer one. None: as many as connect() named. DeadlineExceededError names those that are
        missing."""
        core, timeout = self._attachment.ready("send", self._timeout if timeout is None else timeout)
        core.wait_peers(self._named if jobs is None else jobs, version, timeout)

    @property
    def torn(self) -> bool:
        """Receiver: whether a transfer has begun but not succeeded, so that tensors may mix two versions."""
        core = self._attachment.core
        return core is not None and core.torn()

    @property
    def undecided(self) -> bool:
        """Staged receiver: whether the store could not be reached when a version was decided on."""
        core = self._attachment.core
        return core is not None and core.undecided()

    @property
    def stats(self) -> _core.BatchStats:
        """Counters and sizes, once it is registered with the other job."""
        return self._attachment.require_core().stats()

    def digests(self) -> dict[str, str]:
        """By name: layout-independent digests of this rank's part in the last transfer (docs/formats/digest.md)."""
        return self._attachment.require_core().digests()

    # --- transfers

    def send(
        self,
        version: int | None = None,
        blocking: bool = True,
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> Handle:
        """Offers the registered tensors. Collective over the job's ranks.

        In place, it ends when every attached receiving rank has taken them; until then the memory must not change, so
        wait before the next optimiser step. Staged, it ends when they are copied.

        The first send registers the batch with the other job; `register(direction="send")` registers earlier.

        Args:
            version: An integer that grows, at most 2^62 - 1. None: the newest + 1.
            blocking: Whether to wait for the end. If not, nothing waits, and the call returns a Handle to wait for or
                to `await`. The first send then registers in the background, and the tensors must stay unchanged until
                the handle has ended all the same.
            timeout: Seconds until the receivers have it; those of the first call cover the registration, too. None: 30,
                and for registering the time-out of connect().
            progress: Whether to draw a bar, with tqdm; only for blocking sends.

        Raises:
            InvalidArgumentError: The version does not grow, or a tensor was freed, resized, or replaced by one that
                does not fit.
            DeadlineExceededError, PeerLostError: They name the ranks that it waited for.
        """
        bars = progress_bars() if progress and blocking else None
        handle = self._start("send", version, timeout, blocking=blocking)
        if blocking:
            self._finish(handle, bars)
        return handle

    @receives
    def recv(
        self,
        min_version: int | None = None,
        blocking: bool = True,
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> int | Handle:
        """Takes the newest complete version that is newer than the one held. Collective: all ranks take the same one.

        The version counter of every tensor is bumped: a backward() whose forward() used the old values raises.

        The first receive registers the batch with the other job; `register(direction="recv")` registers earlier, and
        `newest` in the background.

        Args:
            min_version: The oldest version to take.
            blocking: Whether to wait for the end. If not, nothing waits: the first call registers in the background.
            timeout: Seconds until there is such a version; those of the first call cover the registration. None: 30,
                and for registering the time-out of connect(). Once data flows, 30 s without progress end it.
            progress: Whether to draw a bar, with tqdm; only if blocking.

        Returns:
            The version; or, not blocking, a Handle that resolves to it.

        Raises:
            DeadlineExceededError, PeerLostError, DataLossError: Batch.torn then says whether tensors mix two versions.
        """
        return self._take("recv", min_version, blocking, timeout, progress)

    @receives
    def stage(
        self,
        min_version: int | None = None,
        blocking: bool = True,
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> int | Handle:
        """Staged receiver: the first half of recv(). Afterwards all ranks have the version, and the registered tensors
        stay unchanged until commit(). So a server can swap weights between two requests."""
        return self._take("stage", min_version, blocking, timeout, progress)

    def commit(self) -> int:
        """Staged receiver: writes the staged version into the registered tensors and returns its number. Each rank of
        the job calls it; it blocks as long as the copy takes."""
        with self._attachment.lock:
            core = self._attachment.require_core()
            held = self._locate(writes=True)
            try:
                version = core.commit()
            except Error:
                if core.torn():
                    _written(held)
                raise
            _written(held)
        return version

    def wait_version(self, version: int, timeout: float | None = None) -> int:
        """Receiver: blocks until a version of at least `version` is on offer; returns it. Registers, as recv() does."""
        version = whole("version", version)
        core, timeout = self._attachment.ready("recv", None if timeout is None else seconds("timeout", timeout))
        return core.wait_version(version, timeout)

    def close(self, linger: float | None = None) -> None:
        """Frees what both sides keep for the batch; later calls of the peer fail with PeerLostError. Calls of other
        threads that wait for other ranks end with CancelledError; a transfer that reads or writes its tensors is waited
        for. Idempotent.

        A sender first waits until every job that is attached has taken the last version: the one that was sent last,
        staged; in place, one that is being sent by send(blocking=False). A job that closes the batch, dies or is
        stopped is not waited for; Ctrl-C ends the wait. A version that is not taken by then is dropped: a
        RuntimeWarning and the log name it and the jobs. At the end of a `with` statement by an exception nothing is
        waited for, and as the interpreter ends five seconds at most.

        Args:
            linger: Seconds to wait for the other jobs. 0: drop what is not taken, without a warning. None: what
                register() was given.
        """
        self._close_all(linger)

    # --- for the package

    def attach(self, direction: Direction) -> None:
        """Registers it with the other job; its tensors need not be filled yet. Blocks."""
        self._attachment.attach(direction, early=True)

    def ask(self, timeout: float | None) -> int:
        """newest; a registration may take `timeout` seconds."""
        beginning = self._beginning
        if beginning is not None and not beginning.over:
            if beginning.what == "send":
                raise InvalidArgumentError(f"batch {self.name}: it is being registered as a sender")
            return 0
        return self._attachment.newest(timeout)

    def await_beginning(self, linger: float) -> bool:
        """Waits for the beginning of a send that is under way in a registered batch, at most `linger` seconds: it may
        compare replicas with other ranks of this job first. Returns whether none is left that has not begun."""
        beginning = self._beginning
        if os.getpid() != self._process or beginning is None or beginning.what != "send" or beginning.over:
            return True
        return self._attachment.core is not None and linger > 0 and beginning.over_within(linger)

    # --- inside

    def _close_all(self, linger: float | None = None, most: float = math.inf) -> None:
        close_batches([self], Lingers(linger, most))

    def _close(self, linger: float) -> str:
        """Returns what is dropped, as text."""
        core, dropped = None, ""
        try:
            if os.getpid() != self._process:  # in a forked child it is its parent's
                self._attachment.forget()
                return ""
            if not self.await_beginning(0):
                dropped = f"batch {self.name}: a send that had not begun yet is dropped"
            core = self._attachment.close()
            if core is None:
                return dropped
            version, jobs = core.close(linger)
            if jobs:
                names = ", ".join(jobs)
                dropped = f"batch {self.name}: version {version} is dropped: not taken by {names} within {linger:.1f} s"
            return dropped
        finally:
            if core is not None and self._last is not None:
                self._last.settle()
            self._last = None
            self._forget(self)

    def _take(
        self,
        what: Literal["recv", "stage"],
        min_version: int | None,
        blocking: bool,
        timeout: float | None,
        progress: bool,
    ) -> int | Handle:
        bars = progress_bars() if progress and blocking else None
        handle = self._start(what, min_version, timeout, blocking=blocking)
        return self._finish(handle, bars) if blocking else handle

    def _finish(self, handle: Handle, bars: Any = None) -> int:
        """Waits for a transfer of this batch; Ctrl-C cancels it, unless somebody has begun to take it."""
        try:
            if bars is not None:
                handle._show_progress(bars)
            return handle.wait()
        except KeyboardInterrupt:
            if not handle.cancel():
                handle._beginning.abandoned = True
                handle._beginning.wait().begun()
            raise

    def _start(
        self,
        what: What,
        version: int | None,
        timeout: float | None,
        *,
        blocking: bool,
        check: Callable[[_core.Batch], None] | None = None,
    ) -> Handle:
        """Starts a transfer: now, or in the background if it would have to wait and is not `blocking`. Calls `check`
        before it begins."""
        if version is not None:
            version = whole("version" if what == "send" else "min_version", version)
        if timeout is not None:
            timeout = seconds("timeout", timeout)
        direction: Direction = "send" if what == "send" else "recv"
        self._attachment.require_open(direction)
        name = f"{what} of {self.name}"
        with self._starting:
            before = self._beginning
            if before is not None and not before.over and not before.blocking:
                if not before.abandoned:
                    raise InvalidArgumentError(f"{name}: a {before.what} of it is still under way: wait for its handle")
                before.cancel(name)
            beginning = self._beginning = Beginning(what, blocking, before)
        begin = partial(self._begin, beginning, version, check)
        if blocking:
            _begin_now(beginning, partial(begin, timeout))
        elif not self._begins_at_once(direction, beginning, partial(begin, timeout)):
            arguments = beginning, direction, timeout, begin
            threading.Thread(
                target=self._begin_in_background, args=arguments, name="tessera-begin", daemon=True
            ).start()
        return Handle(beginning, name, self, lambda: self.peers)

    def _begins_at_once(self, direction: Direction, beginning: Beginning, begin: Callable[[], None]) -> bool:
        """Begins it now, if that needs no wait."""
        if beginning.waits_for() is not None:
            return False
        attachment = self._attachment
        with attachment.lock_for(0.0) as locked:
            if not locked or attachment.core is None or attachment.direction != direction:
                return False
            if direction == "send" and not attachment.sends_at_once:
                return False
            _begin_now(beginning, begin)
        return True

    def _begin(
        self,
        beginning: Beginning,
        version: int | None,
        check: Callable[[_core.Batch], None] | None,
        timeout: float | None,
    ) -> None:
        """Begins a transfer, and keeps the tensors in place until it has ended."""
        what = beginning.what
        core, timeout = self._attachment.ready("send" if what == "send" else "recv", timeout)
        if check is not None:
            check(core)
        if (before := beginning.waits_for()) is not None:
            timeout = self._wait_for_abandoned(before, timeout)
        start = core.send if what == "send" else core.recv if what == "recv" else core.stage
        with self._attachment.lock:
            writes = what == "recv"
            held = self._locate(writes)
            if what == "send":
                timeout = self._attachment.compare_replicas(timeout)
            transfer = beginning.begin(lambda: Transfer(start(version, timeout), held, writes, core.torn))
            last, self._last = self._last, transfer
        if last is not None:
            last.settle()  # it has ended: otherwise the core would not have started this one
        if not beginning.blocking:  # the caller goes on
            transfer.begun()

    def _begin_in_background(
        self, beginning: Beginning, direction: Direction, timeout: float | None, begin: Callable[[float | None], None]
    ) -> None:
        """Registers the batch first. If the caller gives up in the meantime, it stays registered for the next
        transfer."""
        started = time.monotonic()
        try:
            if self._attachment.core is None:
                limit = self._timeout if timeout is None else timeout
                self._attachment.attach_in_background(direction, limit, beginning.when_over)
            begin(left_of(timeout, started))
        except Exception as error:
            beginning.fail(error)

    def _wait_for_abandoned(self, before: Beginning, timeout: float | None) -> float | None:
        """Waits until the last transfer, whose handle was dropped, has ended; returns the rest of `timeout`."""
        limit = self._timeout if timeout is None else timeout
        begin = time.monotonic()
        before.cancel(self.name)
        if not before.wait_for(limit):
            raise DeadlineExceededError(
                f"batch {self.name}: the {before.what} before, whose handle was dropped or whose await was cancelled, "
                f"has not ended after {limit} s"
            )
        return left_of(timeout, begin)

    def _locate(self, writes: bool) -> list[Held]:
        held = [share.registration.locate() for share in self._shares]
        for share in self._shares if writes else ():
            share.registration.begin_write()
        for share in self._shares:
            if share.registration.has_moved:
                self._relocate(share.registration.moved)
        return held

    def _relocate(self, moved: Sequence[str]) -> None:
        """Tells the core where the tensors are now; if they cannot be moved, the error quotes `moved`."""
        if len(self._shares) > 1:
            raise InvalidArgumentError(f"{moved[0]}: batch {self.name}, over several pairs, must be registered again")
        registration = self._shares[0].registration
        try:
            self._attachment.require_core().relocate(registration.relocated())
        except UnimplementedError as error:
            raise InvalidArgumentError(f"{moved[0]}: {error}") from None
        registration.settle()

    def __del__(self) -> None:
        attachment = getattr(self, "_attachment", None)
        core = attachment.core if attachment is not None else None
        if core is None or os.getpid() != self._process:
            return
        warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
        if sys.is_finalizing():  # no more threads can be started
            return
        # Closing may wait for a peer that reads: not in the garbage collector.
        linger = min(self._linger, EXIT_LINGER)
        threading.Thread(target=core.close, args=(linger,), name="tessera-close").start()

    def __repr__(self) -> str:
        where = "+".join(share.name for share in self._shares)
        words: dict[Direction | None, str] = {None: "not yet transferred", "send": "sends", "recv": "receives"}
        state = "closed" if self._attachment.closed else f"{words[self._attachment.direction]}, version {self.version}"
        return f"Batch({where}/{self.name}: {len(self.names)} tensors, {self.mode}, {state})"


class Lingers:
    """How long batches that are closed together wait for other jobs: all at one time."""

    def __init__(self, linger: float | None, most: float = math.inf) -> None:
        """`linger` seconds, or each batch its own if that is None; at most `most`. Raises InvalidArgumentError."""
        self._linger = None if linger is None else seconds("linger", linger)
        self._most = most
        self._began = time.monotonic()

    def whole(self, batch: Batch) -> float:
        """What the batch has, in seconds."""
        return min(batch._linger if self._linger is None else self._linger, self._most)

    def left(self, batch: Batch) -> float:
        """What is left of it: a batch that was to wait looks once more, at least."""
        whole = self.whole(batch)
        return whole and max(whole - (time.monotonic() - self._began), _LEAST_LINGER)

    def end(self) -> None:
        """Waits no longer."""
        self._most = 0.0


def close_batches(batches: Iterable[Batch], lingers: Lingers) -> None:
    """Closes them all, whatever one raises, which ends the wait of the others. Receivers are closed first: two jobs
    that send to each other do not wait for each other."""
    batches = sorted(batches, key=lambda batch: batch.direction != "send")
    dropped = []

    def close(batch: Batch) -> None:
        whole = lingers.whole(batch)
        try:
            batch.await_beginning(lingers.left(batch))
            text = batch._close(lingers.left(batch))
        except BaseException:
            lingers.end()
            raise
        if text and whole:
            dropped.append(text)

    with contextlib.ExitStack() as stack:  # the last one first
        for batch in batches:
            stack.callback(close, batch)
    for text in dropped:
        warnings.warn(text, RuntimeWarning, stacklevel=depth_of_user())


def _begin_now(beginning: Beginning, begin: Callable[[], None]) -> None:
    try:
        begin()
    except BaseException as error:
        beginning.fail(error if isinstance(error, Exception) else CancelledError("interrupted before it began"))
        raise


def _written(held: Sequence[Held]) -> None:
    for each in held:
        each.written()
