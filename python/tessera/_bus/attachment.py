"""A batch's registration with the other job: which of its tensors it includes, and when it happens."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

from .. import _core
from .._errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    UnavailableError,
)
from .refusals import told_to_others
from .registration import Registration

Mode: TypeAlias = Literal["inplace", "staged"]
Direction: TypeAlias = Literal["send", "recv"]

_log = logging.getLogger(__name__)
_MAX_UNPACKED = 64 << 20  # bytes


@dataclass(frozen=True)
class Share:
    """A batch's part in one pair."""

    name: str
    pair: _core.Pair
    registration: Registration


class Attachment:
    """Registers a batch with the other job, once: when its first transfer needs it, or before. Thread-safe."""

    def __init__(
        self,
        bus: _core.Bus,
        name: str,
        shares: Sequence[Share],
        timeout: float,
        options: tuple[Mode, int, bool, bool],
        grace: float | None,
    ) -> None:
        """`options` are mode, snapshots, pinned and delta."""
        self._bus = bus
        self._name = name
        self._shares = shares
        self._timeout = timeout
        self._options = options
        self._grace = grace
        #: Held during registration, and by code that reads the tensors' places.
        self.lock = threading.RLock()
        #: The core's batch, once it is registered.
        self.core: _core.Batch | None = None
        #: Its direction, once it is registered.
        self.direction: Direction | None = None
        self.closed = False
        self._stop = _core.StopSource()  # of the current registration
        self._registering: int | None = None  # the thread that registers
        self._registered = threading.Event()  # or registration has failed: none is in progress
        self._registered.set()
        self._attempting = threading.Lock()
        self._uncompared = False  # it was registered to send, and its replicas were not compared
        self._under_way: tuple[Future[None], Direction] | None = None  # in the background
        self._asked: Future[None] | None = None  # what the last `newest` has started, or waits for

    def close(self) -> _core.Batch | None:
        """Ends the current registration and waits for its end; returns the core's batch, which the caller closes."""
        self.closed = True
        self._stop.request_stop()
        if self._registering != threading.get_ident():  # false in a signal handler
            self._registered.wait()
        core, self.core = self.core, None
        return core

    def forget(self) -> None:
        """In a forked child: the batch belongs to its parent."""
        self.closed, self.core = True, None

    def ready(self, direction: Direction, timeout: float | None) -> tuple[_core.Batch, float | None]:
        """Returns the core's batch, registered with the other job, and the rest of `timeout`."""
        core = self.core
        if core is not None and self.direction == direction:
            return core, timeout
        begin = time.monotonic()
        core = self.attach(direction, timeout)
        return core, left_of(timeout, begin)

    def newest(self, timeout: float | None) -> int:
        """newest; registers as a receiver within `timeout` seconds, in the background, if it is not registered yet."""
        core = self.core
        if core is not None and self.direction == "recv":
            return core.newest()
        with self.lock_for(0.0) as locked:
            if not locked:  # another thread is registering it
                return 0
            asked, self._asked = self._asked, None
            if asked is not None and asked.done() and (error := asked.exception()) is not None:
                raise error
            self.require_open("recv")
            self._asked, _ = self._attempt("recv", self._timeout if timeout is None else timeout)
        return 0

    def attach_in_background(
        self, direction: Direction, limit: float, when_over: Callable[[Callable[[], None]], None]
    ) -> None:
        """Waits until a separate thread has registered it, so that registration goes on if the caller gives up: then
        `when_over` is called with the outcome. Raises the registration's error; DeadlineExceededError after `limit`
        seconds."""
        begin = time.monotonic()
        own = False
        while not own:
            left = limit - (time.monotonic() - begin)
            attempt, own = self._attempt(direction, max(left, 0.0))
            ended = threading.Event()
            when_over(ended.set)
            attempt.add_done_callback(lambda _, event=ended: event.set())  # type: ignore[misc]
            ended.wait(None if own else left)  # it knows that its own attempt will end
            if not attempt.done():
                raise self._registers_too_long(limit)
            error = attempt.exception()
            if error is None:
                return
            if own or not isinstance(error, DeadlineExceededError):  # otherwise an earlier caller had less time
                raise error

    def _attempt(self, direction: Direction, limit: float) -> tuple[Future[None], bool]:
        """The registration in the background, and whether it has just begun."""
        with self._attempting:
            self._require_no_other(direction)
            if self._under_way is not None:
                return self._under_way[0], False
            attempt: Future[None] = Future()
            threading.Thread(
                target=self._try, args=(attempt, direction, limit), name="tessera-register", daemon=True
            ).start()
            self._under_way = attempt, direction
            return attempt, True

    def _try(self, attempt: Future[None], direction: Direction, limit: float) -> None:
        failure: Exception | None = None
        try:
            self.attach(direction, limit)
        except Exception as error:
            failure = error.with_traceback(None)
        with self._attempting:
            self._under_way = None
        if failure is None:
            attempt.set_result(None)
        else:
            attempt.set_exception(failure)

    def _require_no_other(self, direction: Direction) -> None:
        """Refuses to register it in one direction while it is being registered in the other in the background."""
        if self._under_way is not None and self._under_way[1] != direction:
            registered, wanted = ("receiver", "send") if direction == "send" else ("sender", "receive")
            raise InvalidArgumentError(
                f"batch {self._name}: it is being registered as a {registered}, because of newest, "
                "query_transfer_signal() or a call that did not block; close it, register it again, and "
                f"{wanted} first"
            )

    def _registers_too_long(self, limit: float) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"batch {self._name}: another thread has been registering it for more than {limit} s"
        )

    def attach(
        self,
        direction: Direction,
        timeout: float | None = None,
        *,
        early: bool = False,
    ) -> _core.Batch:
        """Registers it with the other job, unless it is registered; blocks until the other job has registered it, too.
        `early`: the tensors may not hold the data to send yet."""
        self._require_no_other(direction)
        limit = self._timeout if timeout is None else timeout
        begin = time.monotonic()
        with self.lock_for(limit) as locked:
            if not locked:
                raise self._registers_too_long(limit)
            self.require_open(direction)
            if self.core is None:
                self._registered.clear()
                self._registering = threading.get_ident()
                self._stop = _core.StopSource()
                try:
                    self.require_open(direction)
                    core = self._register(direction == "send", max(limit - (time.monotonic() - begin), 0.0), early)
                    if self.closed:
                        core.close()
                    self.require_open(direction)
                    self.core, self.direction = core, direction
                    self._uncompared = early and direction == "send" and self._bus.world > 1
                finally:
                    self._registering = None
                    self._registered.set()
            return self.core

    @property
    def sends_at_once(self) -> bool:
        """True if nothing has to be compared with other ranks before a send."""
        return not self._uncompared

    def compare_replicas(self, timeout: float | None) -> float | None:
        """Compares replicas before the first send, if they were not when the batch was registered; returns the rest of
        `timeout`. Blocks until all ranks of the job call it. REQUIRES: the lock is held, and the tensors are located.
        """
        if not self._uncompared:
            return timeout
        begin = time.monotonic()
        membership = self._shares[0].pair.membership()
        told = [share.registration.replicas(self._bus.world, membership) for share in self._shares]
        try:
            gathered = self._gather(f"{self._name}:replicas", told, self._timeout if timeout is None else timeout)
        except PeerLostError as error:
            # A rank that has come back compares nothing: the others may have sent other versions since.
            _log.warning("batch %s: its replicas are not compared: %s", self._name, error)
        else:
            for number, share in enumerate(self._shares):
                share.registration.hear_replicas([of_rank[number] for of_rank in gathered])
                share.registration.compare_replicas(membership)
        self._uncompared = False
        return left_of(timeout, begin)

    @contextmanager
    def lock_for(self, timeout: float) -> Iterator[bool]:
        """Returns whether it could be locked within `timeout` seconds."""
        locked = self.lock.acquire(timeout=timeout) if timeout > 0 else self.lock.acquire(blocking=False)
        try:
            yield locked
        finally:
            if locked:
                self.lock.release()

    def require_open(self, direction: Direction) -> None:
        if self.closed:
            if self._registering:
                raise CancelledError(f"batch {self._name}: it was closed while it was registered")
            raise InvalidArgumentError(f"batch {self._name}: it is closed: register it again")
        if self.direction is not None and self.direction != direction:
            raise InvalidArgumentError(
                f"batch {self._name}: it {'sends' if self.direction == 'send' else 'receives'}; register another "
                "batch for the other direction"
            )

    def _register(self, sends: bool, timeout: float, early: bool) -> _core.Batch:
        # The core registers a batch over several pairs with the first of them in alphabetical order, under names
        # "PAIR/NAME".
        direction: Direction = "send" if sends else "recv"
        begin = time.monotonic()
        first = self._shares[0].pair
        prefixes = [f"{share.name}/" if len(self._shares) > 1 else "" for share in self._shares]
        pairs = [share.pair for share in self._shares]
        world = self._bus.world if sends and not early else 0
        membership = first.membership()
        with told_to_others(pairs, self._name):
            held = [share.registration.locate() for share in self._shares]  # while digests are taken
            for share in self._shares:
                share.registration.settle()  # nobody knows the old place yet
                if sends:
                    share.registration.offer()
                else:
                    share.registration.require_writeable()
            told = [share.registration.to_gather(world, membership) for share in self._shares]
        gathered = self._gather(self._name, told, left_of(timeout, begin))
        del held
        self.require_open(direction)
        if first.membership() != membership:  # what was gathered names the processes before
            raise UnavailableError(f"batch {self._name}: ranks of this job were started again meanwhile: try again")
        with told_to_others(pairs, self._name):
            for number, share in enumerate(self._shares):
                share.registration.agree([of_rank[number] for of_rank in gathered])
                if world:
                    share.registration.compare_replicas(membership)
        if not sends and any(share.registration.wants_manifest for share in self._shares):
            offered = {
                entry.name: entry.shape for entry in first.manifest(self._name, left_of(timeout, begin), self._stop)
            }
            with told_to_others(pairs, self._name):
                for share, prefix in zip(self._shares, prefixes, strict=True):
                    mine = {
                        name.removeprefix(prefix): shape for name, shape in offered.items() if name.startswith(prefix)
                    }
                    share.registration.choose(mine)
            self.require_open(direction)
        with told_to_others(pairs, self._name):
            parts = [(share.pair, share.registration.specs()) for share in self._shares]
        return self._bus.register_batch(
            self._name,
            parts,
            sends,
            left_of(timeout, begin),
            *self._options,
            self._stop,
            self._grace,
        )

    def _gather(self, name: str, told: list[str], timeout: float | None) -> list[list[str]]:
        """Returns what every rank tells of each share, by rank."""
        texts = self._shares[0].pair.all_gather(name, _pack(told), timeout, self._stop)
        return [_read(rank, text, len(self._shares)) for rank, text in enumerate(texts)]

    def require_core(self) -> _core.Batch:
        if self.core is None:
            raise InvalidArgumentError(
                f"batch {self._name}: it is {'closed' if self.closed else 'not registered with the other job yet'}"
            )
        return self.core


@overload
def left_of(timeout: float, begin: float) -> float: ...
@overload
def left_of(timeout: None, begin: float) -> None: ...
@overload
def left_of(timeout: float | None, begin: float) -> float | None: ...
def left_of(timeout: float | None, begin: float) -> float | None:
    """What is left of `timeout` seconds since `begin`."""
    return None if timeout is None else max(timeout - (time.monotonic() - begin), 0.0)


def _pack(told: list[str]) -> str:
    """Compressed, since names of tensors repeat, and a store takes 4 MiB of a rank."""
    return base64.b64encode(zlib.compress(json.dumps(told).encode(), 1)).decode()


def _read(rank: int, text: str, parts: int) -> list[str]:
    """Reads what another rank has packed: untrusted."""
    try:
        told = json.loads(zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED))
    except (ValueError, RecursionError, zlib.error):
        told = None
    if not isinstance(told, list) or len(told) != parts or not all(isinstance(each, str) for each in told):
        raise MismatchError(
            f"rank {rank} registers other pairs than the {parts} of this rank, or speaks another release"
        )
    return told
