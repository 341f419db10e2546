"""Objects that are closed when they are no longer needed, at the latest at the end of a `with` statement."""

from __future__ import annotations

import atexit
import os
import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager that is closed when it is left."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_open: weakref.WeakSet[Closing] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # a child has neither the threads nor the peers


def close_at_exit(what: Closing) -> None:
    """Closes it when the interpreter ends, while threads can still be joined, if it still exists."""
    _open.add(what)


@atexit.register
def _close_all() -> None:
    for each in list(_open):
        each.close()
