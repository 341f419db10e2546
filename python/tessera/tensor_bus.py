"""The bus with the interface that weight-transfer code commonly has: a client, pairs, batches matched by position.

    client = TensorBusClient(agent_rank=rank)
    client.init_pair(pair_name="weights", local_name="trainer", remote_name="inference",
                     expected_world_size=4, device_mesh=mesh, placements=(Shard(0),))
    handler = client.register_tensors(batch_id="policy", tensors=[(t, "weights") for t in tensors])
    handler.transfer("send", blocking=True)              # "recv" on the other side
    handler.query_transfer_signal(); handler.close()

It is built on the same parts as tessera.connect(), which is the shorter way.
"""

from __future__ import annotations

import math
import reprlib
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from . import _core
from ._arguments import elements, optional_text, seconds, text, whole
from ._bus.attachment import Direction, Mode, Share, left_of
from ._bus.batch import Batch, Lingers, close_batches
from ._bus.bus import join, peer_names, require_direction, require_mode, snapshots_for
from ._bus.handle import Handle
from ._bus.lingering import Lingering
from ._bus.refusals import told_to_others
from ._bus.registration import Registration
from ._bus.wire import wire_by_position
from ._closing import close_at_exit
from ._errors import AlreadyExistsError, InvalidArgumentError, MismatchError, NotFoundError
from ._tensors.walk import Hold, require_hold, single

MAX_RANKS = 1 << 31


class TensorBusClient(Lingering):
    """This process on the bus: rank `agent_rank` of its job. Thread-safe. As a context manager it closes everything.

    Args:
        agent_rank: Rank of this process in its job, from 0.
        store: URL of the store. None: TESSERA_STORE, else "auto".
        namespace: Name of this run among those that share a store. None: TESSERA_NAMESPACE, else "default".
        agent: "embedded" or "daemon". None: TESSERA_AGENT.
    """

    def __init__(
        self,
        agent_rank: int,
        *,
        store: str | None = None,
        namespace: str | None = None,
        agent: str | None = None,
    ) -> None:
        self._rank = whole("agent_rank", agent_rank, 0, MAX_RANKS - 1)
        self._store = optional_text("store", store)
        self._namespace = optional_text("namespace", namespace)
        self._agent = optional_text("agent", agent)
        self._lock = threading.Lock()
        self._buses: dict[tuple[str, int], _core.Bus] = {}  # by job and world
        self._pairs: dict[str, _JoinedPair] = {}
        self._handlers: dict[str, BatchHandler] = {}
        close_at_exit(self)

    def init_pair(
        self,
        pair_name: str,
        local_name: str,
        remote_name: str | Sequence[str],
        expected_world_size: int,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Joins this job with another one; blocks until all ranks of both are there. Join several pairs in one order.

        Args:
            pair_name: The name under which the two jobs meet.
            local_name: This job's name.
            remote_name: The other job's; or a list of the jobs that this one sends to (see tessera.connect()).
            expected_world_size: Number of ranks of this job. (The other job brings its own.)
            device_mesh: For plain tensors: torch's DeviceMesh or a tessera.Mesh over this job's ranks.
            placements: One for each axis of the mesh. Without both, each rank holds all of a plain tensor.
            timeout: Seconds until the store has answered, this process has its rank, and all ranks of both jobs are
                there (with a list of jobs: of this one).

        Raises:
            DeadlineExceededError: It names the ranks that are missing.
            AlreadyExistsError: The pair has been initialised already, or a living process has this rank.
            MismatchError: Ranks of one job disagree.
        """
        pair_name, local_name = text("pair_name", pair_name), text("local_name", local_name)
        peers = peer_names("remote_name", remote_name)
        expected_world_size = whole("expected_world_size", expected_world_size, 1, MAX_RANKS)
        timeout = seconds("timeout", timeout)
        if (device_mesh is None) != (placements is None):
            raise InvalidArgumentError(f"pair {pair_name}: give device_mesh and placements, or neither")
        layout = None if device_mesh is None or placements is None else _core.Layout(device_mesh, placements)
        with self._lock:
            if pair_name in self._pairs:
                raise AlreadyExistsError(f"pair {pair_name}: it has been initialised already")
            begin = time.monotonic()
            known = self._buses.get((local_name, expected_world_size))
            bus = known
            if bus is None:
                bus = _core.Bus(
                    job=local_name,
                    rank=self._rank,
                    world=expected_world_size,
                    store=self._store,
                    namespace=self._namespace,
                    agent=self._agent,
                    timeout=timeout,
                )
            try:
                pair = join(bus, pair_name, peers, left_of(timeout, begin), layout)
            except BaseException:
                if known is None:
                    bus.close()  # the traceback may keep it alive: releases the rank
                raise
            self._buses[local_name, expected_world_size] = bus
            self._pairs[pair_name] = _JoinedPair(bus, pair, layout, 1 if isinstance(peers, str) else len(peers))

    def register_tensors(
        self,
        batch_id: str,
        tensors: Iterable[tuple[Any, str]],
        timeout: float = 30.0,
        *,
        mode: Mode = "inplace",
        wire: str | Sequence[str | None] | None = None,
        hold: Hold = "strong",
        linger: float | None = None,
    ) -> BatchHandler:
        """Registers tensors that are transferred as one.

        Both jobs list the same tensors in one order: they match by position. The first call with a direction waits for
        the other job: transfer(), or query_transfer_signal(), which only a receiver may call before.

        Args:
            batch_id: The batch's name, which both jobs use.
            tensors: (tensor, pair_name). A tensor is a DTensor, or this rank's local tensor, laid out by its pair's
                mesh and placements; its global shape follows from the local shapes of all ranks, which must be what
                those placements give of some tensor.
            timeout: Seconds until all ranks of both jobs have registered it.
            mode: "inplace" or "staged", as in Bus.register().
            wire: Format that tensors are quantised to on their way, as in Bus.register(): one for all that can be
                quantised, or a list with one for each, None for no format.
            hold: "strong": the batch keeps the tensors. "weak": it does not, as in Bus.register(). The list is read
                once, either way.
            linger: For a sender: seconds that close() waits for jobs that have not taken the last version yet, as in
                Batch.close(). 0: it is dropped. None: `timeout`.

        Raises:
            InvalidArgumentError: A tensor that cannot be moved; it names its position and why. Or a wrong `wire`.
            NotFoundError: A pair that was not initialised.
            AlreadyExistsError: The batch is registered already.
        """
        require_mode(mode)
        require_hold(hold)
        _core.check_name("batch_id", text("batch_id", batch_id))
        timeout = seconds("timeout", timeout)
        linger = None if linger is None else seconds("linger", linger)
        tensors = [_pair_of(each) for each in elements("tensors", tensors, "a list of (tensor, pair_name)")]
        with self._lock:
            if batch_id in self._handlers:
                raise AlreadyExistsError(f"batch {batch_id}: it is registered already: close() it first")
            named = dict.fromkeys(name for _, name in tensors)
            with told_to_others([self._pairs[name].pair for name in named if name in self._pairs], batch_id):
                batch = self._collect(batch_id, tensors, timeout, mode, wire, hold, linger)
            handler = self._handlers[batch_id] = BatchHandler(batch)
            return handler

    def _collect(
        self,
        batch_id: str,
        tensors: Sequence[tuple[Any, str]],
        timeout: float,
        mode: Mode,
        wire: str | Sequence[str | None] | None,
        hold: Hold,
        linger: float | None,
    ) -> Batch:
        wires = wire_by_position(wire, len(tensors))
        by_pair: dict[str, list[tuple[str, Any]]] = {}
        for position, (tensor, pair_name) in enumerate(tensors):
            if pair_name not in self._pairs:
                known = ", ".join(self._pairs) or "none"
                raise NotFoundError(f"tensor {position}: pair {pair_name!r} was not initialised; there are: {known}")
            by_pair.setdefault(pair_name, []).append((str(position), tensor))
        if not by_pair:
            raise InvalidArgumentError(f"batch {batch_id}: it has no tensors")
        shares = []
        for pair_name, tensors_of in by_pair.items():
            joined = self._pairs[pair_name]
            sources = [single(name, tensor, hold) for name, tensor in tensors_of]
            registration = Registration(sources, (), self._rank, joined.layout, wire=wires)
            shares.append(Share(pair_name, joined.pair, registration))
        first = self._pairs[next(iter(by_pair))]
        return Batch(
            first.bus,
            batch_id,
            shares,
            mode=mode,
            timeout=timeout,
            snapshots=snapshots_for(first.peers),
            linger=linger,
            named=first.peers,
            pinned=False,
            forget=self._forget,
        )

    def close(self, linger: float | None = None) -> None:
        """Closes all batches and leaves all pairs. Idempotent.

        Args:
            linger: Seconds to wait for jobs that have not taken the last version of a batch yet: see Batch.close().
                None: as each batch was registered.
        """
        self._close_all(linger)

    def _close_all(self, linger: float | None = None, most: float = math.inf) -> None:
        with self._lock:
            batches = [handler.batch for handler in self._handlers.values()]
        try:
            close_batches(batches, Lingers(linger, most))
        finally:
            with self._lock:
                left = [joined.pair for joined in self._pairs.values()] + list(self._buses.values())
                self._pairs.clear()
                self._buses.clear()
            for each in left:
                each.close()

    def _forget(self, batch: Batch) -> None:
        with self._lock:
            self._handlers.pop(batch.name, None)

    def __repr__(self) -> str:
        return f"TensorBusClient(agent_rank={self._rank}, pairs {list(self._pairs)}, batches {list(self._handlers)})"


class BatchHandler(Lingering):
    """A registered batch: what TensorBusClient.register_tensors() returns. Thread-safe; one transfer at a time."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._handle: Handle | None = None  # the last one
        self._direction: Direction | None = None  # of the last one
        self._matched = False  # tensor by tensor, with the other job's

    @property
    def batch(self) -> Batch:
        """The same batch with the shorter interface: versions, figures, staging."""
        return self._batch

    def transfer(
        self,
        direction: Direction,
        blocking: bool = True,
        timeout: float = 30.0,
        *,
        version: int | None = None,
    ) -> Handle:
        """Sends the registered tensors, or receives the newest version into them. Collective over the job's ranks.

        Args:
            direction: "send" or "recv"; the same in every call.
            blocking: Whether to wait for the end.
            timeout: Seconds until the other job has it, or offers it.
            version: For a send: its version (None: the newest + 1). For a recv: the oldest to take.

        Returns:
            The Handle, which has ended if blocking.

        Raises:
            MismatchError: The jobs list different tensors; at the first transfer, on both sides.
            InvalidArgumentError: query_transfer_signal() was called before the first send.
        """
        require_direction(direction)
        check = partial(self._require_matched, direction=direction)
        handle = self._batch._start(direction, version, timeout, blocking=blocking, check=check)
        self._handle, self._direction = handle, direction
        if blocking:
            self._batch._finish(handle)
        return handle

    def query_transfer_signal(self, timeout: float = 30.0) -> bool:
        """Whether a transfer would go ahead now; never waits for a peer.

        Receiver: whether a version newer than the one held is on offer. Sender: whether its last send has
        ended. Before the first transfer it acts as a receiver: it registers as one in the background, and returns False
        until that is done. If that fails, within `timeout` seconds, it raises the error once. So a job that sends must
        not call it before its first send, which would fail then.
        """
        timeout = seconds("timeout", timeout)
        if self._direction == "send":
            return self._handle is None or self._handle.done()
        return self._batch.ask(timeout) > self._batch.version

    def _require_matched(self, core: _core.Batch, direction: Direction) -> None:
        """Compares the numbers of the jobs' tensors."""
        if self._matched:
            return
        stats = core.stats()
        if stats.skipped:
            here, there = stats.tensors + stats.skipped, stats.tensors
            if direction == "recv":
                here, there = there, here
            raise MismatchError(
                f"batch {self._batch.name}: {here} tensors are listed here and {there} by the other job, and they "
                "match by position: register the same ones on both sides, in one order"
            )
        self._matched = True

    def close(self, linger: float | None = None) -> None:
        """Frees what both sides keep for the batch, once the last version is taken; see Batch.close(). Idempotent."""
        self._close_all(linger)

    def _close_all(self, linger: float | None = None, most: float = math.inf) -> None:
        close_batches([self._batch], Lingers(linger, most))

    def __repr__(self) -> str:
        return f"BatchHandler({self._batch!r})"


def _pair_of(given: Any) -> tuple[Any, str]:
    """(tensor, pair_name)."""
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[1], str):
        raise InvalidArgumentError(f"tensors: {reprlib.repr(given)} in the list: give (tensor, pair_name)")
    return given[0], given[1]


class _JoinedPair:
    def __init__(self, bus: _core.Bus, pair: _core.Pair, layout: _core.Layout | None, peers: int) -> None:
        self.bus = bus
        self.pair = pair
        self.layout = layout
        self.peers = peers
