"""The bus as training and serving code uses it: connect, register, send and recv."""

from __future__ import annotations

import atexit
import os
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeAlias, overload

from . import _core
from ._errors import AlreadyExistsError, InvalidArgumentError
from ._handle import Handle
from ._launch import launch
from ._layouts import LayoutLike, as_layout
from ._mapping import Map
from ._registration import Registration

# Names of tensors: regular expressions of which one matches the whole name, or a function that says so.
Names: TypeAlias = str | Iterable[str] | Callable[[str], bool]
Mode: TypeAlias = Literal["inplace", "staged"]
Direction: TypeAlias = Literal["send", "recv"]

_open: weakref.WeakSet[Bus] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for bus in list(_open):
        bus.close()


def connect(
    pair: str,
    *,
    role: str,
    peer: str,
    store: str | None = None,
    namespace: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    timeout: float = 60,
    layout: LayoutLike | None = None,
    agent: str | None = None,
    threads: int = 0,
    digest: bool = True,
) -> Bus:
    """Joins job `role` with job `peer` under the name `pair`; blocks until all ranks of both are in.

    Nothing of torch.distributed is needed, used or touched.

    Args:
        pair: The name under which the two jobs meet.
        role: This job's name: what the peer calls it.
        peer: The other job's name.
        store: URL of the store. None: TESSERA_STORE, else "auto", which needs no server on one machine.
        namespace: Tells runs apart that share a store. None: TESSERA_NAMESPACE, else "default".
        rank: This process in its job. None: what TESSERA_RANK, torchrun, MPI or Slurm say.
        world: Processes of this job. None: what TESSERA_WORLD_SIZE, torchrun, MPI or Slurm say.
        timeout: Seconds to wait for the others, here and as a batch is registered.
        layout: Of plain tensors that bring none. None: each rank that registers one holds all of it.
        agent: Who moves the data: "embedded", or "daemon", the `tessera agent` of this rank. None: TESSERA_AGENT.
        threads: That copy. 0: usable CPUs over the ranks of this job.
        digest: Check what arrives; either side may switch it off for both.

    Raises:
        DeadlineExceededError: It names the ranks that are missing.
        AlreadyExistsError: A living process has this rank.
        MismatchError: Ranks of one job disagree.
        UnavailableError: No store answers.
        KeyboardInterrupt: Ctrl-C ends the wait.
    """
    own_rank, own_world = launch(rank, world)
    default = None if layout is None else as_layout(layout)
    core = _core.Bus(
        job=role,
        rank=own_rank,
        world=own_world,
        store=store or "",
        namespace=namespace or "",
        agent=agent or "",
        threads=threads,
        digest=digest,
        timeout=timeout,
    )
    return Bus(
        core, _core.Pair(core, pair, peer, timeout, default), pair, role, peer, own_rank, own_world, timeout, default
    )


class Bus:
    """This process' place in a pair of jobs: what connect() returns. Thread-safe. As a context manager it closes at the
    end what was registered."""

    def __init__(
        self,
        core: _core.Bus,
        joined: _core.Pair,
        pair: str,
        role: str,
        peer: str,
        rank: int,
        world: int,
        timeout: float,
        layout: _core.Layout | None,
    ) -> None:
        self._core: _core.Bus | None = core
        self._pair: _core.Pair | None = joined
        self._lock = threading.Lock()
        self._batches: dict[str, Batch] = {}
        self._timeout = timeout
        self._layout = layout
        self.pair = pair
        self.role = role
        self.peer = peer
        self.rank = rank
        self.world = world
        self.peer_world = joined.peer_world()
        _open.add(self)

    def register(
        self,
        tensors: Any,
        batch: str = "default",
        mode: Mode = "inplace",
        *,
        only: Names | None = None,
        ignore: Names | None = None,
        missing_ok: bool = False,
        direction: Direction | None = None,
        timeout: float | None = None,
        snapshots: int = 2,
        pinned: bool = False,
        map: Map | None = None,
    ) -> Batch:
        """Registers tensors that are transferred as one.

        Args:
            tensors: A torch module: its parameters and persistent buffers, looked up again at each transfer, so that one
                that was replaced is noticed. Or {name: tensor}, nested as a state_dict may be, where a value is a torch
                tensor or DTensor, a NumPy array, anything with DLPack, or (local array, layout[, global shape]).
                DTensors carry their layout; a plain tensor is held whole by each rank that registers it. Of a dict's
                torch tensors the storage is held weakly: one that was freed or resized is an error at the next
                transfer, and one that was re-assigned cannot be seen. What is no tensor is skipped, and listed in
                Batch.skipped.
            batch: Its name, which both jobs use.
            mode: "inplace", or "staged": a staged sender copies and goes on, a staged receiver takes a version on all
                ranks of the job or on none.
            only: Names to register (see Names). None: all.
            ignore: Names to leave out.
            missing_ok: Of a receiver: leaves out what the sender has not, instead of raising.
            direction: "send" or "recv": registers with the other job now. None: the first transfer does, and says which.
            timeout: Seconds to wait for the others to register. None: as connect() was told.
            snapshots: Of a staged sender: copies, 2 to 8.
            pinned: Refuses a peer that comes back with another world or other layouts.
            map: What the tensors are called on the bus, where parts of them are tensors there: {local name: name, Part,
                list of them, or None to leave it out}, with regular expressions as keys, or a function of (local name,
                tensor) that returns the same. `tessera.maps` has some. only= and ignore= are of local names.

        Raises:
            InvalidArgumentError: A tensor that cannot be moved; it names the tensor and why.
            MismatchError: It lists every disagreement of the two jobs.
        """
        with self._lock:
            pair = self._require_open()
            if batch in self._batches:
                raise AlreadyExistsError(f"batch {batch} of pair {self.pair} is registered already: close() it first")
            registration = Registration.collect(
                tensors,
                keep=lambda name: (
                    (only is None or _matches(only, name)) and not (ignore is not None and _matches(ignore, name))
                ),
                rank=self.rank,
                fallback=self._layout,
                missing_ok=missing_ok,
                names=map,
            )
            made = Batch(self, pair, batch, mode, registration, timeout or self._timeout, snapshots, pinned)
            self._batches[batch] = made
        if direction is not None:
            try:
                made._open(direction)
            except BaseException:
                made.close()
                raise
        return made

    def manifest(self, batch: str = "default", timeout: float | None = None) -> list[_core.ManifestEntry]:
        """What the other job offers under `batch`, once all its ranks have registered it."""
        return self._require_open().manifest(batch, timeout or self._timeout)

    def close(self) -> None:
        """Closes every batch and leaves the pair. Idempotent."""
        with self._lock:
            batches = list(self._batches.values())
        for batch in batches:
            batch.close()
        with self._lock:
            self._pair = None
            self._core = None

    @property
    def closed(self) -> bool:
        return self._core is None

    def _require_open(self) -> _core.Pair:
        if self._pair is None:
            raise InvalidArgumentError(f"pair {self.pair}: this bus is closed: connect() again")
        return self._pair

    def _forget(self, batch: Batch) -> None:
        with self._lock:
            if self._batches.get(batch.name) is batch:
                del self._batches[batch.name]

    def __enter__(self) -> Bus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._batches)} batches"
        own, peer = f"{self.role}/{self.rank} of {self.world}", f"{self.peer} of {self.peer_world}"
        return f"Bus({self.pair!r}: {own}, peer {peer}, {state})"


class Batch:
    """Tensors that are transferred as one. Thread-safe; one transfer at a time."""

    def __init__(
        self,
        bus: Bus,
        pair: _core.Pair,
        name: str,
        mode: Mode,
        registration: Registration,
        timeout: float,
        snapshots: int,
        pinned: bool,
    ) -> None:
        self._bus = bus
        self._pair = pair
        self._registration = registration
        self._timeout = timeout
        self._snapshots = snapshots
        self._pinned = pinned
        self._lock = threading.RLock()
        self._core: _core.Batch | None = None
        self._direction: Direction | None = None
        self._held: Sequence[Any] = ()  # memory that the transfer under way reads or writes
        self._closed = False
        self._process = os.getpid()
        self.name = name
        self.mode = mode

    # --- what it is

    @property
    def names(self) -> tuple[str, ...]:
        """On the bus, of the tensors in it; of a receiver, once it is registered, without those that the sender has
        not."""
        return self._registration.names

    @property
    def skipped(self) -> tuple[str, ...]:
        """What was given and is no tensor, and what missing_ok left out."""
        return self._registration.skipped

    @property
    def version(self) -> int:
        """The version held: last received, or last sent; 0 before the first."""
        return self._core.version() if self._core is not None else 0

    @property
    def newest(self) -> int:
        """Receiver: the newest complete version on offer, 0 if none; waits for no peer. The readiness signal."""
        return self._open("recv").newest()

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

        In place it ends when every attached receiving rank has taken them; until then the memory must not change, so wait
        before the next optimiser step. Staged it ends when they are copied.

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
            core = self._open("send")
            held = self._registration.locate()
            self._held = held
            handle = Handle(core.send(version, timeout), self, f"send of {self.name}", self._release)
        return self._finish(handle, blocking, progress)

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
            held = self._registration.locate()
            self._registration.written()
            try:
                version = core.commit()
            finally:
                self._registration.written()
            del held
        return version

    def wait_version(self, version: int, timeout: float | None = None) -> int:
        """Receiver: blocks until a version of at least `version` is on offer; returns it."""
        return self._open("recv").wait_version(version, timeout)

    def close(self) -> None:
        """Frees what both sides hold for it; the peer's later calls fail with PeerLostError. Waits for a transfer that
        reads or writes its tensors. Idempotent."""
        self._closed = True
        core, self._core = self._core, None
        if core is not None:
            core.close()
        self._held = ()
        self._bus._forget(self)

    # --- inside

    def _take(
        self, what: str, min_version: int | None, blocking: bool, timeout: float | None, progress: bool
    ) -> int | Handle:
        with self._lock:
            core = self._open("recv")
            self._held = self._registration.locate()
            self._registration.written()
            start = core.recv if what == "recv" else core.stage
            handle = Handle(start(min_version, timeout), self, f"{what} of {self.name}", self._received)
        self._finish(handle, blocking, progress)
        return handle.wait() if blocking else handle

    def _finish(self, handle: Handle, blocking: bool, progress: bool) -> Handle:
        if not blocking:
            return handle
        try:
            if progress:
                handle._show_progress()
            handle.wait()
        except KeyboardInterrupt:
            handle.cancel()
            raise
        return handle

    def _received(self) -> None:
        self._registration.written()
        self._release()

    def _release(self) -> None:
        self._held = ()

    def _open(self, direction: Direction) -> _core.Batch:
        """Registers it with the other job, unless it is."""
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
                sends = direction == "send"
                if not sends:
                    self._registration.choose(lambda: self._pair.manifest(self.name, self._timeout))
                self._core = self._pair.register_batch(
                    self.name,
                    self._registration.specs(sends),
                    sends,
                    self._timeout,
                    self.mode,
                    self._snapshots,
                    self._pinned,
                )
                self._direction = direction
            return self._core

    def _require_core(self) -> _core.Batch:
        if self._core is None:
            raise InvalidArgumentError(
                f"batch {self.name}: it is {'closed' if self._closed else 'not registered with the other job yet'}"
            )
        return self._core

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is None or os.getpid() != self._process:
            return
        warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
        # Closing may wait for a peer that reads: not in the garbage collector.
        threading.Thread(target=core.close, name="tessera-close").start()

    def __repr__(self) -> str:
        words: dict[Direction | None, str] = {None: "not yet transferred", "send": "sends", "recv": "receives"}
        state = "closed" if self._closed else f"{words[self._direction]}, version {self.version}"
        return f"Batch({self._bus.pair}/{self.name}: {len(self.names)} tensors, {self.mode}, {state})"


def _matches(names: Names, name: str) -> bool:
    if callable(names):
        return bool(names(name))
    patterns = [names] if isinstance(names, str) else names
    return any(re.fullmatch(pattern, name) for pattern in patterns)
