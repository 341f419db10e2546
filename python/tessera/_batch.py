"""A registered batch: what is transferred as one."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, overload

from . import _core
from ._closing import Closing
from ._errors import CancelledError, InvalidArgumentError, MismatchError, UnimplementedError
from ._handle import Handle
from ._registration import Registration

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
        forget: Callable[[Batch], None],
    ) -> None:
        self._bus = bus
        self._shares = sorted(shares, key=lambda share: share.name)
        self._timeout = timeout
        self._snapshots = snapshots
        self._pinned = pinned
        self._forget = forget
        self._lock = threading.RLock()
        self._core: _core.Batch | None = None
        self._direction: Direction | None = None
        self._held: Sequence[Any] = ()  # memory that the transfer under way reads or writes
        self._closed = False
        self._registering = False
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
        """Receiver: the newest complete version on offer, 0 if none; waits for no peer. The readiness signal."""
        return self._attach("recv").newest()

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

        Args:
            version: An integer that grows. None: the newest + 1.
            blocking: Waits for the end.
            timeout: Seconds until the receivers have it. None: 30.
            progress: Draws a bar, with tqdm; blocking sends only.

        Raises:
            InvalidArgumentError: A version that does not grow, or a tensor that was freed, resized, or replaced by one
                that does not fit.
            DeadlineExceededError, PeerLostError: They name whom it waited for.
        """
        with self._lock:
            core = self._attach("send")
            handle = self._begin("send", core.send, version, timeout)
        if blocking:
            self._finish(handle, progress)
        return handle

    @overload
    def recv(
        self,
        min_version: int | None = None,
        blocking: Literal[True] = True,
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> int: ...
    @overload
    def recv(
        self,
        min_version: int | None = None,
        *,
        blocking: Literal[False],
        timeout: float | None = None,
        progress: bool = False,
    ) -> Handle: ...
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

        Args:
            min_version: Take no older one.
            blocking: Waits for the end.
            timeout: Seconds until there is such a version (None: 30). Once data flows, 30 s without progress end it.
            progress: Draws a bar, with tqdm; if blocking.

        Returns:
            The version; or, not blocking, a Handle that resolves to it.

        Raises:
            DeadlineExceededError, PeerLostError, DataLossError: Batch.torn then says whether tensors mix two versions.
        """
        return self._take("recv", min_version, blocking, timeout, progress)

    @overload
    def stage(
        self,
        min_version: int | None = None,
        blocking: Literal[True] = True,
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> int: ...
    @overload
    def stage(
        self,
        min_version: int | None = None,
        *,
        blocking: Literal[False],
        timeout: float | None = None,
        progress: bool = False,
    ) -> Handle: ...
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
            self._held = self._locate()
            self._written()
            try:
                version = core.commit()
            finally:
                self._written()
                self._release()
        return version

    def wait_version(self, version: int, timeout: float | None = None) -> int:
        """Receiver: blocks until a version of at least `version` is on offer; returns it."""
        return self._attach("recv").wait_version(version, timeout)

    def close(self) -> None:
        """Frees what both sides hold for it; the peer's later calls fail with PeerLostError. Waits for a transfer that
        reads or writes its tensors. Idempotent."""
        self._closed = True
        if self._registering:  # on another thread, which waits for other ranks
            self._bus.interrupt()
        core, self._core = self._core, None
        if core is not None and os.getpid() == self._process:  # in a forked child it is its parent's
            core.close()
        self._held = ()
        self._forget(self)

    # --- inside

    def _take(
        self, what: str, min_version: int | None, blocking: bool, timeout: float | None, progress: bool
    ) -> int | Handle:
        with self._lock:
            core = self._attach("recv")
            handle = self._begin(what, core.recv if what == "recv" else core.stage, min_version, timeout)
        return self._finish(handle, progress) if blocking else handle

    def _finish(self, handle: Handle, progress: bool = False) -> int:
        """Waits for a transfer of this batch; Ctrl-C cancels it, if nobody has begun to take it."""
        try:
            if progress:
                handle._show_progress()
            return handle.wait()
        except KeyboardInterrupt:
            handle.cancel()
            raise

    def _received(self) -> None:
        self._written()
        self._release()

    def _begin(
        self,
        what: str,
        start: Callable[[int | None, float | None], _core.Handle],
        version: int | None,
        timeout: float | None,
    ) -> Handle:
        """Starts a transfer, and keeps the tensors where they are until it has ended."""
        under_way, self._held = self._held, self._locate()
        try:
            if what == "send":
                return Handle(start(version, timeout), self, "send", self._release)
            self._written()
            return Handle(start(version, timeout), self, what, self._received)
        except BaseException:
            if not under_way:  # else another one goes on, with the same tensors
                self._release()
            raise

    def _release(self) -> None:
        self._held = ()
        for share in self._shares:
            share.registration.release()

    def _locate(self) -> list[Any]:
        held: list[Any] = []
        for share in self._shares:
            held += share.registration.locate()
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

    def _written(self) -> None:
        for share in self._shares:
            share.registration.written()

    def _attach(self, direction: Direction, timeout: float | None = None, *, early: bool = False) -> _core.Batch:
        """Registers it with the other job, unless it is; blocks until that has registered it, too. `early`: the tensors
        may not hold yet what is to be sent."""
        core = self._core
        if core is not None and self._direction == direction:
            return core
        with self._lock:
            if self._closed:
                raise InvalidArgumentError(f"batch {self.name}: it is closed: register it again")
            if self._direction is not None and self._direction != direction:
                raise InvalidArgumentError(
                    f"batch {self.name}: it {'sends' if self._direction == 'send' else 'receives'}; register another "
                    "batch for the other direction"
                )
            if self._core is None:
                self._registering = True
                try:
                    core = self._register(direction == "send", timeout or self._timeout, early)
                finally:
                    self._registering = False
                    self._release()
                if self._closed:
                    core.close()
                    raise CancelledError(f"batch {self.name}: it was closed while it was registered")
                self._core = core
                self._direction = direction
            return self._core

    def _register(self, sends: bool, timeout: float, early: bool) -> _core.Batch:
        # The core registers a batch over several pairs with the first of them, in alphabetical order, where names are
        # "PAIR/NAME".
        first = self._shares[0].pair
        prefixes = [f"{share.name}/" if len(self._shares) > 1 else "" for share in self._shares]
        self._held = [share.registration.locate() for share in self._shares]
        for share in self._shares:
            share.registration.settle()  # nobody knows yet where it was
            if sends:
                share.registration.offer()
            else:
                share.registration.require_writeable()
        world = self._bus.world if sends and not early else 0
        said = json.dumps([share.registration.said(world) for share in self._shares])
        heard = [
            _read(rank, text, len(self._shares)) for rank, text in enumerate(first.all_gather(self.name, said, timeout))
        ]
        for number, share in enumerate(self._shares):
            share.registration.agree([of_rank[number] for of_rank in heard])
            if world:
                share.registration.compare_replicas(self._bus.created)
        if not sends and any(share.registration.wants_manifest for share in self._shares):
            offered = {entry.name: entry.shape for entry in first.manifest(self.name, timeout)}
            for share, prefix in zip(self._shares, prefixes, strict=True):
                mine = {name.removeprefix(prefix): shape for name, shape in offered.items() if name.startswith(prefix)}
                share.registration.choose(mine)
        return self._bus.register_batch(
            self.name,
            [(share.pair, share.registration.specs()) for share in self._shares],
            sends,
            timeout,
            self.mode,
            self._snapshots,
            self._pinned,
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
        # Closing may wait for a peer that reads: not in the garbage collector.
        threading.Thread(target=core.close, name="tessera-close").start()

    def __repr__(self) -> str:
        where = "+".join(share.name for share in self._shares)
        words: dict[Direction | None, str] = {None: "not yet transferred", "send": "sends", "recv": "receives"}
        state = "closed" if self._closed else f"{words[self._direction]}, version {self.version}"
        return f"Batch({where}/{self.name}: {len(self.names)} tensors, {self.mode}, {state})"


def _read(rank: int, text: str, parts: int) -> list[str]:
    """What another rank has said of each part: untrusted."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, list) or len(said) != parts or not all(isinstance(each, str) for each in said):
        raise MismatchError(
            f"rank {rank} registers other pairs than the {parts} of this rank, or speaks another release"
        )
    return said
