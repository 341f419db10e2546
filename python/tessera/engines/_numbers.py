"""Numbers of a trainer's versions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .._arguments import whole
from .._errors import InvalidArgumentError


class Number(NamedTuple):
    """A version of a run.

    Attributes:
        version: As the user and the engines count.
        offset: How much larger its number on the bus is: 1 in a run that begins with version 0, which the bus has not.
    """

    version: int
    offset: int = 0

    @property
    def on_bus(self) -> int:
        return self.version + self.offset


class Numbers:
    """Counts the versions of a run on one rank of its trainer. Every rank counts for itself, and so all of them send
    the same version with the same call. Not thread-safe."""

    def __init__(self, world: int, newest: Callable[[], int] = lambda: 0) -> None:
        """
        Args:
            world: Number of the trainer's ranks.
            newest: Gives the last that this rank has sent, by its number on the bus: also one that was interrupted.
        """
        self._world = world
        self._newest = newest
        self._last: Number | None = None
        self._is_sent = True  # the last one

    @contextlib.contextmanager
    def sending(self, number: Number) -> Iterator[None]:
        """Count it, as a version that is sent within. If that raises, the count is as it was. With several ranks such a
        version keeps its number, under which the other ranks may have sent it: a second one would be mixed of both."""
        try:
            yield
        except BaseException:
            if self._world > 1:
                self._last, self._is_sent = number, False
            raise
        self._last, self._is_sent = number, True

    def next(self, version: int | None) -> Number:
        """Return the number of the next version, which is `version` if it is not None. Raises InvalidArgumentError if
        it is no number, or is not newer than the last."""
        last = self._last
        if version is None:
            number = Number(1) if last is None else last._replace(version=last.version + 1)
            # One that was interrupted may be sent all the same. Of several ranks it may be another one's count.
            sent = self._newest() if self._world == 1 else 0
            return number if sent < number.on_bus else number._replace(version=sent + 1 - number.offset)
        version = whole("version", version, lowest=0)
        if last is None:
            return Number(version, int(version == 0))
        if version > last.version:
            return last._replace(version=version)
        if self._is_sent:
            raise InvalidArgumentError(
                f"version {version} is not newer than {last.version}, which this trainer has sent already: give a "
                f"newer one, or none, which is {last.version + 1}"
            )
        raise InvalidArgumentError(
            f"version {version} is not newer than {last.version}, which failed here, and which other ranks may have "
            f"sent: give a newer one, or none, which is {last.version + 1}"
        )

    @property
    def last(self) -> Number | None:
        """The last that was sent, or that has begun with several ranks; None: there was none."""
        return self._last
