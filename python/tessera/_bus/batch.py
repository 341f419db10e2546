"""A registered batch: what is transferred as one."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from .. import _core
from .._closing import Closing
from .._errors import (
    CancelledError,
    DeadlineExceededError,
    Error,
    InvalidArgumentError,
    MismatchError,
    UnimplementedError,
)
from .handle import Handle, progress_bars, receives
from .registration import Held, Registration
from .transfer import Transfer

Mode: TypeAlias = Literal["inplace", "staged"]
Direction: TypeAlias = Literal["send", "recv"]


@dataclass(frozen=True)
class Share:
    """What a batch holds of one pair."""

    name: str
    pair: _core.Pair
    registration: Registration


class Batch(Closing):
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
        forget: Callable[[Batch], None],
    ) -> None:
        self._bus = bus
        self._shares = sorted(shares, key=lambda share: share.name)
        self._timeout = timeout
        self._snapshots = snapshots
        self._pinned = pinned
        self._delta = delta
        self._forget = forget
        self._lock = threading.RLock()
        self._core: _core.Batch | None = None
        self._direction: Direction | None = None
        self._last: Transfer | None = None  # it may be under way
        self._closed = False
        self._stop = _core.StopSource()  # of a registration, once it is closed
        self._registering: int | None = None  # the thread that does
        self._registered = threading.Event()  # or it has failed: none is under way
        self._registered.set()
        self._asking: threading.Thread | None = None  # registers it as a receiver
        self._failure: Error | None = None  # of that thread
        self._process = os.getpid()
        #: Its name, which both jobs use.
        self.name = name
        #: "inplace" or "staged".
        self.mode = mode

    # --- what it is

    @property
    def names(self) -> tuple[str, ...]:
        """On the bus, of the tensors in it; of a receiver, once it is registered, without those that the sender has
        not."""
        return tuple(name for share in self._shares for name in share.registration.names)

    @property
    def skipped(self) -> tuple[str, ...]:
        """What was given and is no tensor, and what missing_ok left out."""
        return tuple(name for share in self._shares for name in share.registration.skipped)

    @property
    def version(self) -> int:
        """The version held: last received, or last sent; 0 before the first."""
        return self._core.version() if self._core is not None else 0

    @property
    def direction(self) -> Direction | None:
        """Which way it goes; None before it is registered with the other job."""
        return self._direction

    @property
    def newest(self) -> int:
        """Receiver: the newest complete version on offer, 0 if none; waits for no peer. The readiness signal.

        Asked before the first recv(), it registers the batch with the other job in the background: 0 until that is
        done. What that has failed with is raised once; the next question tries again."""
        return self._ask(None)

    @property
    def torn(self) -> bool:
        """Receiver: whether a transfer has begun and not ended well, so that tensors may mix two versions."""
        return self._core is not None and self._core.torn()

    @property
    def undecided(self) -> bool:
        """Staged receiver: whether the store could not be reached when a version was decided on."""
        return self._core is not None and self._core.undecided()

    @property
    def stats(self) -> _core.BatchStats:
        """Figures, once it is registered with the other job."""
        return self._require_core().stats()

    def digests(self) -> dict[str, str]:
        """Of the last transfer, by name: layout-independent digests of this rank's part (docs/formats/digest.md)."""
        return self._require_core().digests()

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

        In place it ends when every attached receiving rank has taken them; until then the memory must not change, so
        wait before the next optimiser step. Staged it ends when they are copied.

        The first one registers the batch with the other job and waits for that, also if it is not `blocking`;
        `register(direction="send")` does that ahead.

        Args:
            version: An integer that grows. None: the newest + 1.
            blocking: Waits for the end.
            timeout: Seconds until the receivers have it. None: 30, after what connect() was told for registering.
            progress: Draws a bar, with tqdm; blocking sends only.

        Raises:
            InvalidArgumentError: A version that does not grow, or a tensor that was freed, resized, or replaced by one
                that does not fit.
            DeadlineExceededError, PeerLostError: They name whom it waited for.
        """
        bars = progress_bars() if progress and blocking else None
        handle = self._start("send", version, timeout, goes_on=not blocking)
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

        The first one registers the batch with the other job and waits for that, also if it is not `blocking`;
        `register(direction="recv")` does that ahead, and `newest` in the background.

        Args:
            min_version: Take no older one.
            blocking: Waits for the end.
            timeout: Seconds until there is such a version. None: 30, after what connect() was told for registering.
                Once data flows, 30 s without progress end it.
            progress: Draws a bar, with tqdm; if blocking.

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
        """Staged receiver: the first half of recv(): all ranks have the version, the registered tensors are as before
        until commit(). So a server swaps weights between two requests."""
        return self._take("stage", min_version, blocking, timeout, progress)

    def commit(self) -> int:
        """Staged receiver: writes what is staged into the registered tensors; returns its version. Each rank of the job
        calls it; it blocks as long as the copy takes."""
        with self._lock:
            core = self._require_core()
            held = self._locate()
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
        core, timeout = self._ready("recv", timeout)
        return core.wait_version(version, timeout)

    def close(self) -> None:
        """Frees what both sides hold for it; the peer's later calls fail with PeerLostError. Waits for a transfer that
        reads or writes its tensors. Idempotent."""
        self._closed = True
        here = os.getpid() == self._process  # in a forked child it is its parent's
        if here:
            self._stop.request_stop()
            if self._registering != threading.get_ident():  # as in a signal handler
                self._registered.wait()
        core, self._core = self._core, None
        if core is not None and here:
            core.close()
            if self._last is not None:
                self._last.settle()
        self._last = None
        self._forget(self)

    # --- inside

    def _take(
        self,
        what: Literal["recv", "stage"],
        min_version: int | None,
        blocking: bool,
        timeout: float | None,
        progress: bool,
    ) -> int | Handle:
        bars = progress_bars() if progress and blocking else None
        handle = self._start(what, min_version, timeout, goes_on=not blocking)
        return self._finish(handle, bars) if blocking else handle

    def _finish(self, handle: Handle, bars: Any = None) -> int:
        """Waits for a transfer of this batch; Ctrl-C cancels it, if nobody has begun to take it."""
        try:
            if bars is not None:
                handle._show_progress(bars)
            return handle.wait()
        except KeyboardInterrupt:
            if not handle.cancel():
                handle._transfer.begun()
            raise

    def _ready(self, direction: Direction, timeout: float | None) -> tuple[_core.Batch, float | None]:
        """The core's, registered with the other job, and what is left of `timeout`."""
        core = self._core
        if core is not None and self._direction == direction:
            return core, timeout
        begin = time.monotonic()
        core = self._attach(direction, timeout)
        return core, None if timeout is None else max(timeout - (time.monotonic() - begin), 0.0)

    def _start(
        self, what: Literal["send", "recv", "stage"], version: int | None, timeout: float | None, *, goes_on: bool
    ) -> Handle:
        """Starts a transfer, and keeps the tensors where they are until it has ended. `goes_on`: so does the caller."""
        core, timeout = self._ready("send" if what == "send" else "recv", timeout)
        start = core.send if what == "send" else core.recv if what == "recv" else core.stage
        with self._lock:
            held = self._locate()
            transfer = Transfer(start(version, timeout), held, writes=what == "recv", torn=core.torn)
            last, self._last = self._last, transfer
        if last is not None:
            last.settle()  # it has ended: else the core would not have started this one
        if goes_on:
            transfer.begun()
        return Handle(transfer, f"{what} of {self.name}", self)

    def _locate(self) -> list[Held]:
        held = [share.registration.locate() for share in self._shares]
        for share in self._shares:
            if share.registration.has_moved:
                self._relocate(share.registration.moved)
        return held

    def _relocate(self, moved: Sequence[str]) -> None:
        """Tells the core where the tensors are now, in the words of `moved` if they cannot be moved."""
        if len(self._shares) > 1:
            raise InvalidArgumentError(f"{moved[0]}: batch {self.name}, over several pairs, must be registered again")
        registration = self._shares[0].registration
        try:
            self._require_core().relocate(registration.relocated())
        except UnimplementedError as error:
            raise InvalidArgumentError(f"{moved[0]}: {error}") from None
        registration.settle()

    def _ask(self, timeout: float | None) -> int:
        """newest; registers as a receiver within `timeout` seconds, in the background, if it is not registered yet."""
        core = self._core
        if core is not None and self._direction == "recv":
            return core.newest()
        with self._lock_for(0.0) as locked:
            if not locked:  # another thread registers it
                return 0
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            self._require_open("recv")
            if self._asking is None or not self._asking.is_alive():
                self._asking = threading.Thread(target=self._answer, args=(timeout,), name="tessera-ask", daemon=True)
                self._asking.start()
        return 0

    def _answer(self, timeout: float | None) -> None:
        try:
            self._attach("recv", timeout)
        except Error as error:
            self._failure = error

    def _attach(self, direction: Direction, timeout: float | None = None, *, early: bool = False) -> _core.Batch:
        """Registers it with the other job, unless it is; blocks until that has registered it, too. `early`: the tensors
        may not hold yet what is to be sent."""
        asking = self._asking
        if direction == "send" and asking is not None and asking.is_alive():
            raise InvalidArgumentError(
                f"batch {self.name}: it is being registered as a receiver, because newest, or query_transfer_signal(), "
                "was asked before the first send; close it, register it again, and send first"
            )
        limit = self._timeout if timeout is None else timeout
        begin = time.monotonic()
        with self._lock_for(limit) as locked:
            if not locked:
                raise DeadlineExceededError(
                    f"batch {self.name}: another thread has been registering it for more than {limit} s"
                )
            self._require_open(direction)
            if self._core is None:
                self._registered.clear()
                self._registering = threading.get_ident()
                try:
                    core = self._register(direction == "send", max(limit - (time.monotonic() - begin), 0.0), early)
                    if self._closed:
                        core.close()
                    self._require_open(direction)
                    self._core, self._direction = core, direction
                finally:
                    self._registering = None
                    self._registered.set()
            return self._core

    @contextmanager
    def _lock_for(self, timeout: float) -> Iterator[bool]:
        """Whether it could be locked within `timeout` seconds."""
        locked = self._lock.acquire(timeout=timeout) if timeout > 0 else self._lock.acquire(blocking=False)
        try:
            yield locked
        finally:
            if locked:
                self._lock.release()

    def _require_open(self, direction: Direction) -> None:
        if self._closed:
            if self._registering:
                raise CancelledError(f"batch {self.name}: it was closed while it was registered")
            raise InvalidArgumentError(f"batch {self.name}: it is closed: register it again")
        if self._direction is not None and self._direction != direction:
            raise InvalidArgumentError(
                f"batch {self.name}: it {'sends' if self._direction == 'send' else 'receives'}; register another "
                "batch for the other direction"
            )

    def _register(self, sends: bool, timeout: float, early: bool) -> _core.Batch:
        # The core registers a batch over several pairs with the first of them, in alphabetical order, where names are
        # "PAIR/NAME".
        direction: Direction = "send" if sends else "recv"
        first = self._shares[0].pair
        prefixes = [f"{share.name}/" if len(self._shares) > 1 else "" for share in self._shares]
        held = [share.registration.locate() for share in self._shares]  # while digests are taken
        for share in self._shares:
            share.registration.settle()  # nobody knows yet where it was
            if sends:
                share.registration.offer()
            else:
                share.registration.require_writeable()
        world = self._bus.world if sends and not early else 0
        membership = first.membership()
        told = json.dumps([share.registration.to_gather(world, membership) for share in self._shares])
        gathered = [
            _read(rank, text, len(self._shares))
            for rank, text in enumerate(first.all_gather(self.name, told, timeout, self._stop))
        ]
        del held
        self._require_open(direction)
        for number, share in enumerate(self._shares):
            share.registration.agree([of_rank[number] for of_rank in gathered])
            if world:
                share.registration.compare_replicas(membership)
        if not sends and any(share.registration.wants_manifest for share in self._shares):
            offered = {entry.name: entry.shape for entry in first.manifest(self.name, timeout, self._stop)}
            for share, prefix in zip(self._shares, prefixes, strict=True):
                mine = {name.removeprefix(prefix): shape for name, shape in offered.items() if name.startswith(prefix)}
                share.registration.choose(mine)
            self._require_open(direction)
        return self._bus.register_batch(
            self.name,
            [(share.pair, share.registration.specs()) for share in self._shares],
            sends,
            timeout,
            self.mode,
            self._snapshots,
            self._pinned,
            self._delta,
            self._stop,
        )

    def _require_core(self) -> _core.Batch:
        if self._core is None:
            raise InvalidArgumentError(
                f"batch {self.name}: it is {'closed' if self._closed else 'not registered with the other job yet'}"
            )
        return self._core

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is None or os.getpid() != self._process:
            return
        warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
        if sys.is_finalizing():  # no thread starts any more
            return
        # Closing may wait for a peer that reads: not in the garbage collector.
        threading.Thread(target=core.close, name="tessera-close").start()

    def __repr__(self) -> str:
        where = "+".join(share.name for share in self._shares)
        words: dict[Direction | None, str] = {None: "not yet transferred", "send": "sends", "recv": "receives"}
        state = "closed" if self._closed else f"{words[self._direction]}, version {self.version}"
        return f"Batch({where}/{self.name}: {len(self.names)} tensors, {self.mode}, {state})"


def _written(held: Sequence[Held]) -> None:
    for each in held:
        each.written()


def _read(rank: int, text: str, parts: int) -> list[str]:
    """What another rank tells of each part: untrusted."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, list) or len(told) != parts or not all(isinstance(each, str) for each in told):
        raise MismatchError(
            f"rank {rank} registers other pairs than the {parts} of this rank, or speaks another release"
        )
    return told
