"""Senders that wait, as they are closed, for the jobs that have not taken their last version."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from types import FrameType

from .._closing import Closing

EXIT_LINGER = 5.0  # seconds, as the interpreter ends
_PACKAGE = __name__.partition(".")[0]


class Lingering(Closing):
    """One whose close() waits for other jobs: at the end of a `with` block too, but not after an exception."""

    @abstractmethod
    def close(self, linger: float | None = None) -> None: ...

    @abstractmethod
    def _close_all(self, linger: float | None = None, most: float = math.inf) -> None:
        """Closes its batches, which wait `linger` seconds, or each its own, at most `most`."""

    def abandon(self) -> None:
        """Closes it because of an error: what is not taken is dropped."""
        self._close_all(0)

    def close_soon(self) -> None:
        """Closes it as the interpreter ends."""
        self._close_all(most=EXIT_LINGER)


def depth_of_user() -> int:
    """Returns the stacklevel at which a warning of the caller shows the user's line."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, depth = frame.f_back, depth + 1
    return depth
