"""Objects that are closed when they are no longer needed, at the latest at the end of a `with` statement."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager that is closed when it is left."""

    @abstractmethod
    def close(self) -> None: ...

    def abandon(self) -> None:
        """Closes it because of an error, without waiting for other ranks."""
        self.close()

    def close_soon(self) -> None:
        """Closes it as the interpreter ends, and waits for other ranks only briefly."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()


_open: weakref.WeakValueDictionary[int, Closing] = weakref.WeakValueDictionary()
_numbers = itertools.count()
os.register_at_fork(after_in_child=_open.clear)  # a child has neither the threads nor the peers


def close_at_exit(what: Closing) -> None:
    """Closes it when the interpreter ends, while threads can still be joined, if it still exists. The last one first:
    it may need those before it."""
    _open[next(_numbers)] = what


@atexit.register
def _close_all() -> None:
    interactive = hasattr(sys, "ps1")  # one goes on after an error
    failed = not interactive and getattr(sys, "last_value", None) is not None
    with contextlib.ExitStack() as stack:  # the last first, and all, whatever one raises
        for _, each in sorted(_open.items()):
            stack.callback(each.abandon if failed else each.close_soon)
