"""What a transfer under way holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import _core
from .._errors import Error
from .registration import Held


class Transfer:
    """A transfer of the core under way, and what it holds until it has ended: memory, where it is, and the tensors that
    it writes."""

    def __init__(self, core: _core.Handle, held: Sequence[Held], writes: bool, torn: Callable[[], bool]) -> None:
        """torn: whether a transfer that has failed may have written."""
        self.core = core
        self._held = held
        self._writes = writes
        self._torn = torn

    def begun(self) -> None:
        """The caller goes on while it is under way."""
        if self._writes:
            for held in self._held:
                held.written()

    def settle(self, well: bool = False) -> None:
        """Bumps the counters of what it has written, and lets go of it. Idempotent. REQUIRES: it has ended; `well`, if
        the caller knows that."""
        held, self._held = self._held, ()
        if held and self._writes and (well or self._has_written()):
            for each in held:
                each.written()

    def _has_written(self) -> bool:
        try:
            self.core.wait(None)
        except Error:
            return self._torn()
        return True
