"""Faults that are injected into a worker on demand: where, what and how often."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VOTES = ("settle", "ready", "swapped", "installed")
KINDS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: RuntimeError("injected"),
    "memory": lambda: MemoryError("injected"),
    "full": lambda: OSError(errno.ENOSPC, "injected: no space left"),
    "interrupt": lambda: KeyboardInterrupt("injected"),
}


@dataclass
class Fault:
    phase: str
    kind: str
    skip: int = 0  # passes before it
    times: int = 1

    def is_due(self, phase: str) -> bool:
        if phase != self.phase or not self.times:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Faults:
    """Raises, or stops the process, where it was told to."""

    def __init__(self) -> None:
        self.armed: list[Fault] = []
        self.fired: list[str] = []

    def arm(self, *fault: Any) -> None:
        self.fired.clear()
        self.armed = [Fault(*fault)]

    def disarm(self) -> list[str]:
        """Where one was injected since arm()."""
        self.armed = []
        return list(self.fired)

    def at(self, phase: str) -> None:
        for fault in self.armed:
            if fault.is_due(phase):
                self.fired.append(phase)
                if fault.kind == "stop":
                    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread, at once
                else:
                    raise KINDS[fault.kind]()

    def around(self, owner: Any, name: str, before: str | None, after: str | None = None) -> None:
        """Makes a function of `owner` a place for faults."""
        real = getattr(owner, name)

        def faulty(*args: Any, **options: Any) -> Any:
            if before is not None:
                self.at(before)
            found = real(*args, **options)
            if after is not None:
                self.at(after)
            return found

        setattr(owner, name, faulty)

    def around_worker(self) -> None:
        """The places that a worker has with any engine."""
        from tessera import engines
        from tessera._bus.batch import Batch
        from tessera._bus.bus import Bus
        from tessera.engines.vllm import _joined

        self.around(_joined.Connecting, "connect", "connect")
        self.around(_joined, "learn_map", "map")
        self.around(Bus, "register", "register", "registered")
        self.around(Batch, "recv", "recv", "received")
        real = engines.StoreVote._decide

        def decide(vote: Any, number: int, *rest: Any) -> bool:
            name = f"vote {VOTES[number % len(VOTES)]}"
            self.at(name)
            decided = real(vote, number, *rest)
            self.at(f"{name}, decided")
            return decided

        engines.StoreVote._decide = decide  # type: ignore[method-assign]
