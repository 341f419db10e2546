"""Threads of one process that use one sharded model: one of them trains it, others may read it meanwhile.

A gather of a thread that does not train waits for the end of an update, and an update for gathers that are under way;
what was gathered before the update keeps its values. A second thread that begins a backward or an update while another
one is in either is refused by name.
"""

from __future__ import annotations

import threading

from .._errors import InvalidArgumentError
from .telling import known

_ident = threading.get_ident


class _Own(threading.local):
    forwards = 0


class Threads:
    """Which thread trains a model, and who may read it when."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds that a read waits for the end of an update."""
        self._timeout = timeout
        self._own = _Own()
        self._trainer: threading.Thread | None = None
        self._trainer_ident = 0
        self._gate = threading.Lock()  # held during an update, and during each gather
        self._updater = 0  # ident of the thread within an update

    @property
    def forwards(self) -> int:
        """Forwards of this thread that are under way, of modules in which parameters are used."""
        return self._own.forwards

    @forwards.setter
    def forwards(self, count: int) -> None:
        self._own.forwards = count

    def trains_here(self) -> bool:
        """Tell whether no other thread is the one that trains."""
        return self._trainer_ident in (0, _ident()) or self._trainer is None or not self._trainer.is_alive()

    def take_over(self, what: str, name: str, under_way: str) -> None:
        """Make this thread the one that trains.

        Args:
            what: It begins.
            name: Of the weights, in messages.
            under_way: What another thread may be in; empty: nothing.
        """
        if self._trainer_ident == _ident():
            return
        if under_way:
            self.require_alone(what, name, under_way)
        self._trainer, self._trainer_ident = threading.current_thread(), _ident()

    def require_alone(self, what: str, name: str, under_way: str) -> None:
        """Throw if another thread is in the midst of something."""
        if under_way and not self.trains_here():
            assert self._trainer is not None
            raise known(
                InvalidArgumentError(
                    f"{name}: thread {threading.current_thread().name!r} begins {what} while thread "
                    f"{self._trainer.name!r} is within {under_way} of the same model: let one thread train it, and "
                    "others only compute forwards without gradients, or join() them first"
                )
            )

    def keep_readers_out(self, name: str) -> None:
        """Begin an update, once gathers of other threads have ended."""
        self._close_gate(name, "an update")
        self._updater = _ident()

    def let_readers_in(self) -> None:
        """End the update."""
        if self._updater:
            self._updater = 0
            self._gate.release()

    def begin_gather(self, name: str) -> bool:
        """Wait for the end of another thread's update; tell whether end_gather() is to be called."""
        if self._updater == _ident():
            return False
        if not self._gate.acquire(False):
            self._close_gate(name, "a forward")
        return True

    def end_gather(self) -> None:
        self._gate.release()

    def _close_gate(self, name: str, what: str) -> None:
        if not self._gate.acquire(timeout=self._timeout):
            trainer = self._trainer.name if self._trainer is not None else "?"
            raise InvalidArgumentError(
                f"{name}: thread {threading.current_thread().name!r} begins {what}, and has waited {self._timeout:g} s "
                f"for thread {trainer!r}, which is within an update or a gather of the same model"
            )
