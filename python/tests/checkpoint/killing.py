"""Ranks of a save() that are killed, or fail, at one of its steps.

The ranks are forked processes, and this process carries what they tell each other. A step is a call of the system or of
the core that changes a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tessera
from tessera.checkpoint import _folder, _load, _save
from tessera.checkpoint._ranks import Ranks

_CALLS = ("makedirs", "open", "rename", "fsync", "unlink")
_WRITER = ("create", "write_slice", "sync")


class Steps:
    """Of one process; before the given one, and after all of them, it calls `act`."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.names: list[str] = []
        self._at = at
        self._act = act

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*args: Any, **kwargs: Any) -> Any:
            self.before(name)
            return function(*args, **kwargs)

        return stepping

    def before(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self._at:
            self._act()


class _Around:
    """A module or object some of whose functions are steps."""

    def __init__(self, of: Any, names: tuple[str, ...], steps: Steps) -> None:
        self._of, self._names, self._steps = of, names, steps

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if name == "SharedSafetensors":
            return _Around(found, _WRITER, self._steps)
        stepping = self._steps.around(name, found) if name in self._names else found
        if name in ("create", "open") and self._of is tessera._core.SharedSafetensors:
            return lambda *args: _Around(stepping(*args), _WRITER, self._steps)
        return stepping


@contextlib.contextmanager
def stepping(at: int, act: Callable[[], None]) -> Iterator[Steps]:
    """save() within it acts before that step."""
    steps = Steps(at, act)
    with (
        mock.patch.object(_folder, "os", _Around(os, _CALLS, steps)),
        mock.patch.object(_save, "os", _Around(os, ("unlink",), steps)),
        mock.patch.object(_save, "_core", _Around(tessera._core, (), steps)),
    ):
        yield steps


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- ranks


def _send(end: socket.socket, blob: bytes) -> None:
    end.sendall(struct.pack("<Q", len(blob)) + blob)


def _receive(end: socket.socket) -> bytes | None:
    """None at the end."""
    length = _exactly(end, 8)
    return None if length is None else _exactly(end, struct.unpack("<Q", length)[0])


def _exactly(end: socket.socket, count: int) -> bytes | None:
    found = b""
    while len(found) < count:
        try:
            more = end.recv(count - len(found))
        except ConnectionError:
            return None
        if not more:
            return None
        found += more
    return found


def _exchange(end: socket.socket, size: int) -> Callable[[str, bytes], list[bytes]]:
    def exchange(what: str, blob: bytes) -> list[bytes]:
        try:
            _send(end, blob)
            found = [_receive(end) for _ in range(size)]
        except ConnectionError:
            found = [None]
        if None in found:
            raise RuntimeError("a rank was lost")
        return [each for each in found if each is not None]

    return exchange


def on_ranks(size: int, function: Callable[[int], str]) -> list[str | int]:
    """What function(rank) returns on each, whose save() and load() are collective; or the signal that killed it."""
    children, ends = [], []
    answers = [os.pipe() for _ in range(size)]
    for rank in range(size):
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            try:
                for each in (ours, *ends):
                    each.close()
                ranks = Ranks(rank, size, _exchange(theirs, size))
                with (
                    mock.patch.object(_save, "ranks_of", return_value=ranks),
                    mock.patch.object(_load, "ranks_of", return_value=ranks),
                ):
                    os.write(answers[rank][1], function(rank).encode()[:4000])
                os._exit(0)
            except BaseException as error:
                os.write(answers[rank][1], f"{type(error).__name__}: {error}".encode()[:4000])
                os._exit(1)
        theirs.close()
        os.close(answers[rank][1])
        children.append(child)
        ends.append(ours)
    _carry(ends)
    found: list[str | int] = []
    for child, (reading, _) in zip(children, answers, strict=True):
        _, status = os.waitpid(child, 0)
        with open(reading, "rb") as pipe:
            said = pipe.read().decode()
        found.append(os.WTERMSIG(status) if os.WIFSIGNALED(status) else said)
    return found


def _carry(ends: list[socket.socket]) -> None:
    """Between ranks, until one of them has gone."""
    while True:
        blobs = [_receive(end) for end in ends]
        if None in blobs:
            break
        for end in ends:
            with contextlib.suppress(ConnectionError):
                for blob in blobs:
                    _send(end, blob or b"")
    for end in ends:
        end.close()
