"""Tells the other ranks what this one refuses before the core comes to register it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from .. import _core
from .._errors import CancelledError, DeadlineExceededError, Error, InvalidArgumentError


@contextmanager
def told_to_others(pairs: Iterable[_core.Pair], batch: str) -> Iterator[None]:
    """Tells the ranks of both jobs of each pair why this rank does not register `batch`, if the block raises: they
    would wait for it to their deadlines. An error of the deadline, or of a close(), is this rank's alone."""
    try:
        yield
    except (CancelledError, DeadlineExceededError):
        raise
    except Exception as error:
        with suppress(Error):  # what this rank raises matters more
            for pair in pairs:
                pair.give_up(batch, *_as_status(error))
        raise


def _as_status(error: Exception) -> tuple[str, str]:
    """The code and the text that others get."""
    if isinstance(error, Error) and type(error) is not Error:
        return error.code, str(error)
    return InvalidArgumentError.code, f"{type(error).__name__}: {error}"
