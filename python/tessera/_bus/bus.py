"""The bus as training and serving code uses it: connect, register, send and recv."""

from __future__ import annotations

import math
import reprlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from .. import _core
from .._arguments import choice, elements, flag, optional_text, pattern, seconds, text, whole
from .._closing import close_at_exit
from .._errors import AlreadyExistsError, CancelledError, InvalidArgumentError
from .._launch import launch
from .._tensors.layouts import LayoutLike, as_layout
from .._tensors.walk import Hold, other_names, require_hold
from .attachment import Direction, Mode, Share, left_of
from .batch import Batch, Lingers, close_batches
from .lingering import Lingering
from .mapping import Map
from .refusals import told_to_others
from .registration import Registration
from .replicas import AllowedReplicas
from .wire import Wire

# Names of tensors: regular expressions, one of which must match the whole name, or a predicate.
Names: TypeAlias = str | Iterable[str] | Callable[[str], bool]

DigestName = Literal["full", "sampled", "off"]

_SHOWN = 4  # names in a message
MAX_THREADS = 1024


def connect(
    pair: str,
    *,
    role: str,
    peer: str | Sequence[str],
    store: str | None = None,
    namespace: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    timeout: float = 60,
    layout: LayoutLike | None = None,
    agent: str | None = None,
    threads: int = 0,
    digest: bool | DigestName = True,
) -> Bus:
    """Joins job `role` with job `peer` under the name `pair`; blocks until all ranks of both are there.

    A sender may name several jobs, `peer=["engine0", "engine1"]`, and feeds them from one batch, each at its own pace,
    in its own layout and world. It waits for none of them: connect() returns once all ranks of this job are there, a
    send goes to those that are attached, and each may come, go, fail and come back (docs/guide/several-engines.md).

    It needs no process group of torch.distributed, and changes none.

    Args:
        pair: The name under which the two jobs meet.
        role: Name of this job, which the peer passes as `peer`.
        peer: Name of the other job; or a list of the jobs that this one sends to.
        store: URL of the store. None: TESSERA_STORE, else "auto", which needs no server on one machine.
        namespace: Name of this run among those that share a store. None: TESSERA_NAMESPACE, else "default".
        rank: Rank of this process in its job. None: from TESSERA_RANK, torchrun, MPI or Slurm, else from torch's
            default process group, if there is one; else 0.
        world: Number of processes of this job. None: from TESSERA_WORLD_SIZE, and so on; else 1.
        timeout: Seconds until the store has answered, this process has its rank, and all ranks of both jobs are there
            (with a list of peers: of this job). The same again until a batch is registered, unless register() gives
            another time.
        layout: Layout of plain tensors, which carry none. None: each rank that registers one holds all of it.
        agent: Who moves the data: "embedded", or "daemon", the `tessera agent` of this rank. None: TESSERA_AGENT.
        threads: Number of copy threads. 0: usable CPUs divided by the ranks of this job.
        digest: How to check what arrives: True or "full"; "sampled", which checks one block of 16 KiB in sixteen,
            others in each version; False or "off". The weaker choice of the two sides holds for both.

    Raises:
        DeadlineExceededError: It names the ranks that are missing.
        AlreadyExistsError: A living process has this rank.
        MismatchError: Ranks of one job disagree.
        UnavailableError: No store answers.
        KeyboardInterrupt: Ctrl-C ends the wait.
    """
    return Connecting().connect(
        pair,
        role=role,
        peer=peer,
        store=store,
        namespace=namespace,
        rank=rank,
        world=world,
        timeout=timeout,
        layout=layout,
        agent=agent,
        threads=threads,
        digest=digest,
    )


class Bus(Lingering):
    """This process in a pair of jobs: what connect() returns. Thread-safe. As a context manager it closes its batches
    at the end."""

    def __init__(
        self,
        core: _core.Bus,
        joined: _core.Pair,
        pair: str,
        role: str,
        peer: str | Sequence[str],
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
        #: The name under which the two jobs meet.
        self.pair = pair
        #: This job's name.
        self.role = role
        #: The other jobs' names: one, or those that connect() was given in a list.
        self.peers = (peer,) if isinstance(peer, str) else tuple(peer)
        #: The other job's name; if there are several, all of them, separated by commas.
        self.peer = ", ".join(self.peers)
        #: Rank of this process in its job.
        self.rank = rank
        #: Number of processes of this job.
        self.world = world
        #: Number of processes of the other job when connect() returned; 0 if there are several jobs.
        self.peer_world = joined.peer_world()
        close_at_exit(self)

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
        snapshots: int | None = None,
        grace: float | None = None,
        linger: float | None = None,
        pinned: bool = False,
        delta: bool = False,
        map: Map | None = None,
        wire: Wire | None = None,
        replicas: AllowedReplicas | None = None,
        hold: Hold = "strong",
    ) -> Batch:
        """Registers tensors that are transferred as one.

        Args:
            tensors: A torch module: its parameters and persistent buffers, looked up again at each transfer, so that
                a replaced one is noticed. Or {name: tensor}, nested as a state_dict may be, where a value is a
                torch tensor or DTensor, a NumPy array, anything with DLPack in a dtype that NumPy can read (not bf16
                and 8-bit floats), or (local array, layout[, global shape]).
                DTensors carry their layout; each rank that registers a plain tensor holds all of it. Entries that are
                not tensors are skipped and listed in Batch.skipped. `hold` says what the batch keeps alive.
            batch: Name of the batch, which both jobs use.
            mode: "inplace" or "staged". A staged sender makes a copy and goes on. A staged receiver takes a version on
                all ranks of the job or on none.
            only: Names to register (see Names). None: all.
            ignore: Names to leave out.
            missing_ok: For a receiver: leave out tensors that the sender lacks, instead of raising.
            direction: "send" or "recv": register with the other job now. Tensors need not be filled yet: replicas are
                compared by the first send. None: the first transfer registers, in its direction.
            timeout: Seconds until all ranks of both jobs have registered it. They count from the call that
                registers: the first send or recv, or this one, if it is given a direction. None: the time-out of
                connect().
            snapshots: For a staged sender: number of copies, 2 to 8, whatever the number of jobs. One is the newest; a
                slow job that still reads an older one holds another. None: 2; with several peers 3, so that two of them
                may be slow without delaying a send.
            grace: For an in-place sender with several peers: seconds that a send waits, once one of them has the
                version, for the others to begin to take it. A job that has not begun by then misses this version, and
                is not waited for again until it takes one. None: 1.
            linger: For a sender: seconds that close() waits for jobs that have not taken the last version yet
                (Batch.close()). 0: it is dropped. None: `timeout`.
            pinned: Refuse a peer that comes back with another world size or other layouts.
            delta: Send a region as its changes since the last version, where these are smaller. It takes effect only
                if all ranks of both jobs ask for it. A sender spends memory on it: a copy of what
                it sends, and room for the changes. Nobody else may change a receiver's tensors between two
                transfers; if dtypes are equal and digests are on, that is checked. It pays off where few elements
                change and bandwidth is scarce; within a host a full copy is about as fast. See `Batch.stats`.
            map: Names on the bus, for local tensors and for parts of them: {local name: name, Part, list of
                these, or None to leave it out}, with regular expressions as keys, or a function of (local name,
                tensor) that returns the same. `tessera.maps` has some. only= and ignore= use local names.
            wire: Formats that tensors are quantised to on their way: one for all tensors that it fits, or {regular
                expression: format, or None for no format}. An expression must match the whole name on the bus; the
                first match counts. One job asks, or both ask for the same. Only f64, f32, f16 and bf16 of two dims or
                more are quantised: each matrix of the last two dims, with the amax of the sending job's whole tensor,
                or of the slice that is taken. Tensors in private memory behind an agent daemon are not quantised yet:
                UnimplementedError.
            replicas: For a sender: {regular expression: "first"}, for names on the bus whose replicas may differ, such
                as statistics that each rank of data parallelism gathers itself. They are not compared; receivers get
                those of the lowest ranks, and Batch.skipped lists them on the others. All ranks give the same.
            hold: "strong": the batch keeps the module or dict alive, with its tensors, and looks each name up again at
                every transfer: after `d["w"] = new` the new tensor is sent (and the old one released). A tensor that
                no longer fits (another dtype, shape or layout) or was removed is an error before anything is sent. So
                is one that moved although it is received in place. Names added later are not part of the batch.
                "weak": the batch keeps nothing alive. Its tensors are those registered here: one whose memory was
                freed or resized is an error at the next transfer; one that was replaced cannot be noticed.

        Raises:
            InvalidArgumentError: A tensor cannot be moved; the error names it and the reason. Or there is nothing to
                move: only= and ignore= leave nothing, or a job of one rank has none. (One rank of several may register
                {}.) Or a pattern of only=, ignore=, map=, wire= or replicas= matches no name on any rank of the job: it
                is told with the nearest names, by the first transfer if there are several ranks. Names that are left
                out count, and `tessera.maps.optional()` marks patterns that may match nothing.
            MismatchError: The two jobs disagree; the error lists every mismatch.
        """
        _core.check_name("batch", text("batch", batch))
        with self._lock:
            pair = self._require_open()
            if batch in self._batches:
                raise AlreadyExistsError(f"batch {batch} of pair {self.pair} is registered already: close() it first")
            with told_to_others([pair], batch):
                require_mode(mode)
                require_hold(hold)
                if direction is not None:
                    require_direction(direction)
                missing_ok, pinned, delta = (
                    flag(what, value)
                    for what, value in (("missing_ok", missing_ok), ("pinned", pinned), ("delta", delta))
                )
                snapshots = snapshots_for(len(self.peers)) if snapshots is None else whole("snapshots", snapshots, 2, 8)
                grace = None if grace is None else seconds("grace", grace)
                linger = None if linger is None else seconds("linger", linger)
                timeout = self._timeout if timeout is None else seconds("timeout", timeout)
                only, ignore = _names("only", only), _names("ignore", ignore)
                is_wanted = _matcher("only", only)
                is_ignored = _matcher("ignore", ignore)
                given: dict[str, None] = {}  # names, in order

                def keep(name: str) -> bool:
                    given[name] = None
                    return (only is None or is_wanted(name)) and not (ignore is not None and is_ignored(name))

                registration = Registration.collect(
                    tensors,
                    keep=keep,
                    rank=self.rank,
                    fallback=self._layout,
                    missing_ok=missing_ok,
                    names=map,
                    wire=wire,
                    replicas=replicas,
                    hold=hold,
                )
                if not registration._sources:
                    self._allow_nothing(batch, given, {"only": only, "ignore": ignore, "map": map})
                patterns = {"only": only, "ignore": ignore, "map": map, "wire": wire, "replicas": replicas}
                registration.name_patterns({**given, **dict.fromkeys(other_names(tensors))}, patterns)
                if self.world == 1:
                    registration.require_matches()
                made = Batch(
                    self._require_core(),
                    batch,
                    [Share(self.pair, pair, registration)],
                    mode=mode,
                    timeout=timeout,
                    snapshots=snapshots,
                    grace=grace,
                    linger=linger,
                    named=len(self.peers),
                    pinned=pinned,
                    delta=delta,
                    forget=self._forget,
                )
            self._batches[batch] = made
        if direction is not None:
            try:
                made.attach(direction)
            except BaseException:
                made.close()
                raise
        return made

    def manifest(self, batch: str = "default", timeout: float | None = None) -> list[_core.ManifestEntry]:
        """The tensors that the other job offers under `batch`, once all its ranks have registered it."""
        limit = self._timeout if timeout is None else seconds("timeout", timeout)
        return self._require_open().manifest(text("batch", batch), limit)

    def close(self, linger: float | None = None) -> None:
        """Closes every batch and leaves the pair. Calls of other threads that wait for other ranks end with
        CancelledError; a transfer that reads or writes tensors is waited for. Idempotent.

        Args:
            linger: Seconds to wait for jobs that have not taken the last version of a batch yet: see Batch.close().
                None: as each batch was registered.
        """
        self._close_all(linger)

    def _close_all(self, linger: float | None = None, most: float = math.inf) -> None:
        lingers = Lingers(linger, most)
        with self._lock:
            core, batches = self._core, list(self._batches.values())
        try:
            for batch in batches:  # while waits for other ranks may still succeed
                batch.await_beginning(lingers.left(batch))
        except BaseException:
            lingers.end()
            raise
        finally:
            self._end(core, lingers)

    def _end(self, core: _core.Bus | None, lingers: Lingers) -> None:
        if core is not None:
            core.end_waits()
        with self._lock:
            batches = list(self._batches.values())
        try:
            close_batches(batches, lingers)
        finally:
            with self._lock:
                core, self._core = self._core, None
                pair, self._pair = self._pair, None
            if pair is not None:
                pair.close()
            if core is not None:
                core.close()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._core is None

    def _allow_nothing(self, batch: str, given: Collection[str], options: Mapping[str, Any]) -> None:
        """Refuses a registration without tensors, unless other ranks of this job may have some."""
        filters = [f"{key}={reprlib.repr(value)}" for key, value in options.items() if value is not None]
        names = ", ".join(list(given)[:_SHOWN]) + (", ..." if len(given) > _SHOWN else "")
        if filters and given:
            raise InvalidArgumentError(
                f"batch {batch}: {' and '.join(filters)} leaves nothing of the {len(given)} names given ({names}): a "
                "pattern matches whole names; a rank that holds none of the batch's tensors registers {}"
            )
        if self.world == 1:
            raise InvalidArgumentError(f"batch {batch}: there is no tensor in what was given ({names or 'no names'})")

    def _require_open(self) -> _core.Pair:
        if self._pair is None:
            raise InvalidArgumentError(f"pair {self.pair}: this bus is closed: connect() again")
        return self._pair

    def _require_core(self) -> _core.Bus:
        self._require_open()
        if self._core is None:
            raise AssertionError("a bus that is open has a core")
        return self._core

    def _forget(self, batch: Batch) -> None:
        with self._lock:
            if self._batches.get(batch.name) is batch:
                del self._batches[batch.name]

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._batches)} batches"
        own, peer = f"{self.role}/{self.rank} of {self.world}", f"{self.peer} of {self.peer_world}"
        return f"Bus({self.pair!r}: {own}, peer {peer}, {state})"


class Connecting:
    """A connect() that another thread may end. For one call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = _core.StopSource()
        self._closed = False
        self._core: _core.Bus | None = None
        self._bus: Bus | None = None

    def close(self) -> None:
        """The call raises CancelledError, whether it has begun or will; the bus that it has returned is closed."""
        with self._lock:
            self._closed = True
            core, bus = self._core, self._bus
        self._stop.request_stop()
        if bus is not None:
            bus.close()
        elif core is not None:
            core.end_waits()

    def connect(
        self,
        pair: str,
        *,
        role: str,
        peer: str | Sequence[str],
        store: str | None = None,
        namespace: str | None = None,
        rank: int | None = None,
        world: int | None = None,
        timeout: float = 60,
        layout: LayoutLike | None = None,
        agent: str | None = None,
        threads: int = 0,
        digest: bool | DigestName = True,
    ) -> Bus:
        """See connect()."""
        pair, role, peer = text("pair", pair), text("role", role), peer_names("peer", peer)
        timeout = seconds("timeout", timeout)
        own_rank, own_world = launch(rank, world)
        default = None if layout is None else as_layout(layout)
        begin = time.monotonic()
        core = _core.Bus(
            job=role,
            rank=own_rank,
            world=own_world,
            store=optional_text("store", store),
            namespace=optional_text("namespace", namespace),
            agent=optional_text("agent", agent),
            threads=whole("threads", threads, 0, MAX_THREADS),
            digest=_digest_from(digest),
            timeout=timeout,
            stop=self._stop,
        )
        try:
            with self._lock:
                self._core = core
            self._require_wanted()
            joined = join(core, pair, peer, left_of(timeout, begin), default)
        except BaseException:
            core.close()  # the traceback may keep it alive: releases the rank
            raise
        bus = Bus(core, joined, pair, role, peer, own_rank, own_world, timeout, default)
        with self._lock:
            self._bus = bus
        try:
            self._require_wanted()
        except BaseException:
            bus.close()
            raise
        return bus

    def _require_wanted(self) -> None:
        if self._closed:
            raise CancelledError("connect() was ended by another thread")


def peer_names(what: str, peer: str | Sequence[str]) -> str | list[str]:
    """The name of a job, or a list of names; raises InvalidArgumentError for anything else."""
    if not isinstance(peer, list | tuple):
        return text(what, peer)
    if not peer:
        raise InvalidArgumentError(f"{what}={peer!r}: give the name of a job, or a list of names")
    return [text(what, name) for name in peer]


def join(core: _core.Bus, pair: str, peer: str | list[str], timeout: float, layout: _core.Layout | None) -> _core.Pair:
    """Joins the pair with one job, or with those of a list, for which it does not wait."""
    if isinstance(peer, str):
        return _core.Pair(core, pair, peer, timeout, layout)
    return _core.Pair(core, pair, "", timeout, layout, peer)


def snapshots_for(peers: int) -> int:
    """The number for a staged batch that goes to so many jobs, unless the user gives it."""
    return 2 if peers == 1 else 3


def require_mode(mode: str) -> None:
    """Raises InvalidArgumentError unless it is a Mode."""
    choice("mode", mode, get_args(Mode))


def require_direction(direction: str) -> None:
    """Raises InvalidArgumentError unless it is a Direction."""
    choice("direction", direction, get_args(Direction))


def _digest_from(digest: bool | DigestName) -> bool | str:
    return choice("digest", digest, get_args(DigestName)) if isinstance(digest, str) else flag("digest", digest)


def _names(what: str, names: Names | None) -> Names | None:
    """The same, but for an iterable that can be read once only, which becomes a list. Raises InvalidArgumentError."""
    if names is None or callable(names) or isinstance(names, str | list):
        return names
    return elements(what, names, "a regular expression, a list, or a function")


def _matcher(what: str, names: Names | None) -> Callable[[str], bool]:
    """Returns a predicate for names. Raises InvalidArgumentError."""
    if names is None or callable(names):
        return names or (lambda name: False)
    patterns = [pattern(what, each) for each in ([names] if isinstance(names, str) else names)]
    return lambda name: any(each.fullmatch(name) for each in patterns)
