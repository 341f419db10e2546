"""How the ranks of a trainer hear what became of its calls: rank 0 speaks with the servers, and tells the others.

Each of the other ranks is a job of its own on the bus, so that one that is late, or gone, keeps no other one waiting.
What rank 0 tells is a state, of which a rank takes the newest as soon as it is there. In the other direction a rank
says that it has sent a version by taking that number, which rank 0 offers where it has to know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from .._bus.bus import Bus, connect
from .._closing import Closing
from .._errors import (
    CancelledError,
    DeadlineExceededError,
    Error,
    InvalidArgumentError,
    PeerLostError,
    UnavailableError,
)
from ._names import with_end
from ._updates import read

_BYTES = 1 << 15
_MOST_TEXT = 4000  # characters, of up to 4 bytes
_LISTEN_SECONDS = (1.0, 10.0)  # between looks whether rank 0 is back, and at other times
_POLL_SECONDS = (0.001, 0.05)  # the first, and the longest
_LOST_SECONDS = 3.0  # a process that was stopped may go on
_TELL_SECONDS = 1.0
_HEAR_SECONDS = 2.0
_KINDS = {kind.code: kind for kind in Error.__subclasses__()}


@dataclasses.dataclass(frozen=True)
class State:
    """The calls of rank 0 so far.

    Attributes:
        ended: Number on the bus of the version whose send() has ended; 0: Trainer() has; -1: it has not.
        busy: Whether a server is at work on a version.
        failed: The call that raised last, likewise; -1: none has.
        kind: Code of the error that it raised; empty: none of Tessera's.
        text: That error's.
        closed: Whether rank 0 leaves.
    """

    ended: int = -1
    busy: bool = False
    failed: int = -1
    kind: str = ""
    text: str = ""
    closed: bool = False

    @property
    def error(self) -> Error:
        """The error of `failed`, to be raised by another rank."""
        return _KINDS.get(self.kind, UnavailableError)(self.text)

    def after(self, call: int, error: BaseException | None) -> State:
        """Return the state once a call has ended, or has raised."""
        ended = dataclasses.replace(self, ended=call)
        if error is None:
            return ended
        kind = error.code if isinstance(error, Error) else CancelledError.code
        text = str(error) if isinstance(error, Error) else f"rank 0 has raised {type(error).__name__}: {error}"
        return dataclasses.replace(ended, failed=call, kind=kind, text=text[:_MOST_TEXT])


class Ranks(Closing):
    """One rank's end. On rank 0 tell() is thread-safe; the others have one caller at a time."""

    def __init__(
        self, pair: str, role: str, batch: str, store: str | None, rank: int, world: int, timeout: float
    ) -> None:
        """Blocks until rank 0 is there. Nothing is needed for a trainer of one rank.

        Args:
            pair: As the trainer's, like the others.
            timeout: Seconds for that.
        """
        self.leads = rank == 0
        self.state = State()
        self._bus: Bus | None = None
        self._lock = threading.Lock()
        self._is_leaving = False
        self._raised = -1  # the last error of rank 0 that was raised here
        self._lost: tuple[float, Exception] | None = None
        self._threads: list[threading.Thread] = []
        self._world = world
        self._sent = 0  # number on the bus of the last version that this rank has sent
        if world == 1:
            return
        names = [with_end(role, f".rank{other}") for other in range(world)]
        own, peers = names[rank], names[1:] if self.leads else names[0]
        self._memory = torch.zeros(_BYTES, dtype=torch.uint8)
        self._bus = connect(
            pair, role=own, peer=peers, store=store, rank=0, world=1, timeout=timeout, threads=1, agent="embedded"
        )
        try:
            self._batch, self._numbers = (
                self._bus.register(
                    {"bytes": memory},
                    with_end(batch, f".{what}"),
                    "staged" if self.leads else "inplace",
                    direction="send" if self.leads else "recv",
                    timeout=timeout,
                )
                for what, memory in (("state", self._memory), ("number", torch.zeros(1, dtype=torch.uint8)))
            )
        except BaseException:
            self._bus.close()
            raise
        for work in () if self.leads else (self._listen, self._answer):
            self._threads.append(threading.Thread(target=work, name="tessera-ranks", daemon=True))
            self._threads[-1].start()

    # --- rank 0

    def tell(self, change: Callable[[State], State]) -> None:
        """Tell the other ranks, if this is rank 0, a state that is changed from the last one. Never raises: a rank that
        does not hear ends its waits by their deadlines."""
        if self._bus is None or not self.leads:
            return
        with self._lock, contextlib.suppress(Error):
            state = change(self.state)
            if state == self.state:
                return
            data = json.dumps(dataclasses.asdict(state), ensure_ascii=False).encode(errors="replace")
            self._memory.zero_()
            self._memory[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            # The host's clock: a trainer that is started again goes on with higher numbers.
            self._batch.send(time.monotonic_ns(), timeout=_TELL_SECONDS).wait()
            self.state = state

    def wait_for_all(self, number: int, seconds: float) -> None:
        """Wait until all ranks have sent a version, by its number on the bus. Raises UnavailableError."""
        if self._bus is None:
            return
        try:
            with self._lock:
                if self._numbers.version < number:
                    self._numbers.send(number, timeout=_TELL_SECONDS).wait()
            self._numbers.wait_peers(self._world - 1, number, seconds)
        except Error as error:
            raise UnavailableError(f"not all ranks of this trainer have sent the version: {error}") from None

    # --- the other ranks

    def has_sent(self, number: int) -> None:
        """Let rank 0 know, if it asks, that this rank has sent a version."""
        self._sent = number

    def wait(self, is_so: Callable[[State], bool], what: str, seconds: float) -> State:
        """Wait for a state of rank 0.

        Args:
            what: It waits for, for messages.

        Raises:
            PeerLostError: Rank 0 is gone.
            DeadlineExceededError: It is late.
        """
        began = time.monotonic()
        pause, longest = _POLL_SECONDS
        while not is_so(self.state):
            now, lost = time.monotonic(), self._lost
            if lost is not None and now - max(lost[0], began) > _LOST_SECONDS:
                raise PeerLostError(f"rank 0 of this trainer is gone, and has not told {what}: {lost[1]}")
            if now - began > seconds:
                raise DeadlineExceededError(f"rank 0 of this trainer has not told in {seconds:.3g} s {what}")
            time.sleep(pause)
            pause = min(longest, 2 * pause)
        return self.state

    def wait_for_begin(self, seconds: float) -> None:
        """Wait for what rank 0 does before the first send. Raises what it raises there."""
        state = self.wait(lambda state: state.ended >= 0 or state.closed, "that it has begun", seconds)
        if state.failed == 0:
            self.raise_failure(state)

    def wait_for_end(self, call: int, seconds: float) -> State:
        """Wait until a call has ended on rank 0, before this rank sends the next version. Raises UnavailableError, or
        what rank 0 has raised, if it leaves."""
        state = self.wait(
            lambda state: state.ended >= call or state.closed, "that its send() before has ended", seconds
        )
        if state.closed:
            self.raise_failure(state)
            raise UnavailableError("rank 0 has closed this trainer: it sends nothing more")
        return state

    def wait_until_idle(self, call: int, seconds: float) -> State:
        """Wait until no server is busy with the version of a call, or one before it. Never raises: if rank 0 is gone,
        its servers take nothing more."""

        def is_over(state: State) -> bool:
            return state.closed or (state.ended >= call and not state.busy)

        try:
            return self.wait(is_over, "that no server is busy", seconds)
        except Error:
            return self.state

    def raise_failure(self, state: State) -> None:
        """Raise what rank 0 has raised, unless this rank has raised it before."""
        if state.failed > self._raised:
            self._raised = state.failed
            raise state.error

    def has_failed(self, call: int) -> None:
        """Note that this rank has raised an error in a call: what rank 0 raises there is not raised again."""
        self._raised = max(self._raised, call)

    def _listen(self) -> None:
        while True:
            try:
                self._batch.recv(self._batch.version + 1, timeout=_LISTEN_SECONDS[self._lost is None])
                self.state = read(State, json.loads(self._memory.numpy().tobytes().rstrip(b"\0")))
                self._lost = None
            except DeadlineExceededError:
                self._lost = None
            except (CancelledError, InvalidArgumentError, ValueError):  # this rank leaves; or rank 0 is another release
                return
            except Error as error:
                if self._lost is None:
                    self._lost = time.monotonic(), error
                time.sleep(_POLL_SECONDS[1])

    def _answer(self) -> None:
        while True:
            try:
                number = self._numbers.wait_version(self._numbers.version + 1, _LISTEN_SECONDS[1])
                while self._sent < number:
                    if self._is_leaving:
                        return
                    time.sleep(_POLL_SECONDS[0])
                self._numbers.recv(number, timeout=_TELL_SECONDS)
            except DeadlineExceededError:
                continue
            except (CancelledError, InvalidArgumentError):  # this rank leaves
                return
            except Error:
                time.sleep(_POLL_SECONDS[1])

    # --- all

    def close(self) -> None:
        """Leaves; rank 0 once the others have heard what it told last, for which it waits a moment."""
        bus = self._bus
        if bus is None or bus.closed:
            return
        self._is_leaving = True
        self.tell(lambda state: dataclasses.replace(state, busy=False, closed=True))
        try:
            if self.leads:
                end = time.monotonic() + _HEAR_SECONDS
                while not all(self._has_heard(peer) for peer in self._batch.peers.values()) and time.monotonic() < end:
                    time.sleep(_POLL_SECONDS[0])
        finally:
            bus.close(linger=0)  # those that have not heard it were waited for
            for thread in self._threads:
                thread.join()

    def _has_heard(self, peer: Any) -> bool:
        return bool(peer.version >= self._batch.version or (peer.error is not None and not peer.attached))
