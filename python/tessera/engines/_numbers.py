"""Numbers of a trainer's versions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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

    def __init__(self, world: int) -> None:
        """`world`: Number of the trainer's ranks."""
        self._world = world
        self._last: Number | None = None
        self._is_sent = True  # the last one

    @contextlib.contextmanager
    def sending(self, version: int | None) -> Iterator[Number]:
        """Yield the number of a version that is sent within: `version`, or the next one. What raises there, or is
        refused here, leaves the count as it was. With several ranks a version that fails once it has begun keeps its
        number, under which the other ranks may have sent it: a second one would be mixed of both.

        Raises:
            InvalidArgumentError: It is no number, or is not newer than the last.
        """
        number = self._next(version)
        try:
            yield number
        except BaseException:
            if self._world > 1:
                self._last, self._is_sent = number, False
            raise
        self._last, self._is_sent = number, True

    def _next(self, version: int | None) -> Number:
        last = self._last
        if version is None:
            return Number(1) if last is None else last._replace(version=last.version + 1)
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
