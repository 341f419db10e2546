"""Rows of optimisers' states in memory that other ranks read, so that one rank may read a state alone.

Each rank has a *board* in shared memory that only it writes: a head, and an entry for each state that it keeps, with
the place of its rows. Ranks name a state alike without a word: by the update that has made it, its weight and its key.
States are written within updates only, which begin once all ranks have come to them, and the head counts these: it is
odd while this rank writes. A reader waits until the owner's count is even and not behind its own, copies, and looks
again. So a rank that reads alone sees what the last update has left, and waits for owners that have not ended it yet.

What is let go is freed once the next update has begun, when no rank reads: one that is behind may still want it.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import weakref
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from .. import _core
from .._errors import DeadlineExceededError, Error, InvalidArgumentError
from .store import Spec

# Words of a board's head, and of an entry.
_MAGIC, _COUNT, _CHANGES, _USED, _NEXT_ARENA, _NEXT_OFFSET, _NEXT_ENTRIES = range(7)
_NAME, _STAMP, _ARENA, _OFFSET, _BYTES = range(5)
_WORDS = 8
_MARK = 0x3154534154454554
_ENTRIES = 1022  # of a first board: 64 KiB
Words = Any  # an array of NumPy, which Python writes in a tenth of the time that tensors take
_FIRST_WAIT, _LONGEST_WAIT = 50e-6, 2e-3  # seconds between two looks


class SharedRows:
    """A state's rows on the board; they leave it with their store."""

    def __init__(self, states: SharedStates, name: int, entry: Words, block: torch.Tensor) -> None:
        self._states, self._name, self._entry = states, name, entry
        weakref.finalize(self, states.let_go, entry, block).atexit = False

    def note(self, stamp: int) -> None:
        """Show what has gone into the rows."""
        self._states.note(self._entry, stamp)

    def read(self, what: str, spec: Spec, rows: torch.Tensor, stamp: int) -> tuple[torch.Tensor, list[int]]:
        """Return the whole tensor of all ranks' rows, in memory of its own, and every rank's stamp. Asks nobody."""
        return self._states.read(what, self._name, spec, rows, stamp)

    @property
    def readable(self) -> bool:
        return not self._states.writing


class _Board:
    """Another rank's, as it was read last."""

    def __init__(self, arena: int, offset: int) -> None:
        self.arena, self.offset = arena, offset
        self.changes = -1
        self.places: dict[int, tuple[int, int, int, int]] = {}  # arena, offset, bytes and stamp by name


class SharedStates:
    """The boards of one model's ranks.

    Attributes:
        bytes: Of rows that this rank keeps there.
        writing: This rank is within an update.
    """

    bytes: int

    def __init__(self, core: _core.ShardGroup, rank: int, size: int, timeout: float) -> None:
        """Collective over `core`. `rank` and `size` are those of the ranks that share rows, one replica of it."""
        self._first = core.rank - rank  # of the replica
        self._rank, self._size, self._timeout = rank, size, timeout
        self._reader = _core.MemoryReader(core, 1)
        self._boards: list[Words] = []  # of this rank, each twice as long as the one before
        self._free: list[Words] = []  # entries
        self._gone: list[tuple[Words, torch.Tensor]] = []  # entries and blocks that have been let go
        self._made: dict[tuple[int, str], int] = {}  # states of this update, by weight and key
        self.bytes = 0
        self._depth = 0
        self._count = 0
        self._process = os.getpid()
        board = self._add_board(_ENTRIES)
        place = torch.tensor(self._reader.refer(board.ctypes.data, board.nbytes), dtype=torch.int64)
        told = core.exchange("where states are told", place.numpy().tobytes())
        self._others = [
            _Board(*torch.frombuffer(bytearray(one), dtype=torch.int64).tolist())
            for one in told[self._first : self._first + size]
        ]

    # --- what this rank shows

    def _add_board(self, entries: int) -> Words:
        board: Words = _shared(_WORDS * 8 * (entries + 1)).view(torch.int64).view(entries + 1, _WORDS).numpy()
        board[0, _MAGIC], board[0, _USED] = _MARK, entries
        self._free += list(board[1:])[::-1]
        if self._boards:
            last = self._boards[-1]
            arena, offset = self._reader.refer(board.ctypes.data, board.nbytes)
            last[0, _NEXT_ARENA], last[0, _NEXT_OFFSET], last[0, _NEXT_ENTRIES] = arena, offset, entries
        self._boards.append(board)
        return board

    @property
    def _head(self) -> Words:
        found: Words = self._boards[0][0]
        return found

    def begin(self) -> None:
        """Let states be written: all ranks have come, and none reads. Loads within an update are a part of it."""
        self._depth += 1
        if self._depth == 1:
            self._made.clear()
            self._next_count()
            self._take_away()

    def end(self) -> None:
        """Let them be read."""
        if self._depth == 1:
            self._next_count()
        self._depth = max(0, self._depth - 1)

    @property
    def writing(self) -> bool:
        return self._depth > 0

    def _next_count(self) -> None:
        self._count += 1
        self._show_count()

    def _show_count(self) -> None:
        _core.set_sequence(self._head[_COUNT:].ctypes.data, self._count)

    @property
    def count(self) -> int:
        """How often an update has begun or ended."""
        return self._count

    def align(self, count: int) -> None:
        """End an update that may have begun, or ended, on some ranks only. `count` is the largest of all ranks."""
        self._depth = 0
        self._count = count + count % 2
        self._show_count()

    def place(self, number: int, key: str, rows: torch.Tensor) -> tuple[torch.Tensor, SharedRows] | None:
        """Return rows in shared memory, with these values, of a state that all ranks make now of weight `number`. None:
        outside of an update."""
        if not self.writing:
            return None
        nth = self._made[number, key] = self._made.get((number, key), -1) + 1
        name = _name_of(self._count, number, key, nth, str(rows.dtype))
        size = rows.numel() * rows.element_size()
        block = _shared(max(size, 8))
        placed = block[:size].view(rows.dtype).view(rows.shape) if size else torch.empty_like(rows)
        placed.copy_(rows)
        if not self._free:
            self._add_board(2 * (self._boards[-1].shape[0] - 1))
        entry = self._free.pop()
        arena, offset = self._reader.refer(block.data_ptr(), block.numel())
        entry[_STAMP], entry[_ARENA], entry[_OFFSET], entry[_BYTES] = 0, arena, offset, size
        entry[_NAME] = name
        self._head[_CHANGES] += 1
        self.bytes += size
        return placed, SharedRows(self, name, entry, block)

    def note(self, entry: Words, stamp: int) -> None:
        """As SharedRows.note()."""
        entry[_STAMP] = stamp
        self._head[_CHANGES] += 1

    def let_go(self, entry: Words, block: torch.Tensor) -> None:
        """Note that this rank does not want a state any more. Others may still read it."""
        if os.getpid() == self._process:  # and not in a fork's copy of it
            self.bytes -= int(entry[_BYTES])
            self._gone.append((entry, block))

    def _take_away(self) -> None:
        """Free what has been let go. REQUIRES: no rank reads."""
        gone, self._gone = self._gone, []
        for entry, _ in gone:
            entry[_NAME] = 0
            self._free.append(entry)
        if gone:
            self._head[_CHANGES] += 1

    # --- what it reads of others

    def read(self, what: str, name: int, spec: Spec, rows: torch.Tensor, stamp: int) -> tuple[torch.Tensor, list[int]]:
        """As SharedRows.read()."""
        dim = spec.dim or 0
        shape = (spec.rows, *rows.shape[1:]) if spec.dim is None else tuple(spec.shape)
        whole, stamps = torch.empty(shape, dtype=rows.dtype), [stamp] * self._size
        for rank in range(self._size):
            begin, end = spec.bounds(rank)
            if begin == end:
                continue
            into = whole.narrow(dim, begin, end - begin)
            if rank == self._rank:
                into.copy_(rows)
                continue
            packed = into if into.is_contiguous() else torch.empty(into.shape, dtype=rows.dtype)
            stamps[rank] = self._copy(what, name, rank, packed)
            if packed is not into:
                into.copy_(packed)
        return whole.view(spec.shape), stamps

    def _copy(self, what: str, name: int, rank: int, into: torch.Tensor) -> int:
        """Copy the rows of one rank; return their stamp."""
        until, wait = time.monotonic() + self._timeout, _FIRST_WAIT
        board = self._others[rank]
        size = into.numel() * into.element_size()
        while True:
            head = self._words(rank, board.arena, board.offset, 1)[0]
            if head[_COUNT] % 2 == 0 and head[_COUNT] >= self._count:
                place = self._place_of(rank, board, head, name)
                if place is None:
                    raise InvalidArgumentError(
                        f"{what}: rank {rank} has no such state: it has let go its optimiser, or its step failed: let "
                        "all ranks keep their optimisers as long as one of them reads"
                    )
                arena, offset, found, stamp = place
                if found != size:
                    raise InvalidArgumentError(f"{what}: rank {rank} has {found} bytes of it, not {size}")
                error = self._read(rank, arena, offset, into)
                again = self._words(rank, board.arena, board.offset, 1)[0]
                if again[_COUNT] == head[_COUNT] and (
                    again[_CHANGES] == head[_CHANGES] or self._place_of(rank, board, again, name) == place
                ):
                    if error is not None:
                        raise error
                    return stamp
            if time.monotonic() > until:
                raise DeadlineExceededError(
                    f"{what}: rank {rank} has not ended its optimiser's step after {self._timeout:g} s: has it made as "
                    "many steps as this rank?"
                )
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _place_of(self, rank: int, board: _Board, head: list[int], name: int) -> tuple[int, int, int, int] | None:
        """Find a state on a board. REQUIRES: `head` has been read just now."""
        if head[_CHANGES] != board.changes:
            board.places = {}
            arena, offset, entries = board.arena, board.offset, head[_USED]
            while entries:
                first, *rest = self._words(rank, arena, offset, entries + 1)
                for entry in rest:
                    if entry[_NAME] != 0:
                        board.places[entry[_NAME]] = (entry[_ARENA], entry[_OFFSET], entry[_BYTES], entry[_STAMP])
                arena, offset, entries = first[_NEXT_ARENA], first[_NEXT_OFFSET], first[_NEXT_ENTRIES]
            board.changes = head[_CHANGES]
        return board.places.get(name)

    def _words(self, rank: int, arena: int, offset: int, entries: int) -> list[list[int]]:
        words = torch.empty((entries, _WORDS), dtype=torch.int64)
        self._reader.read([(self._first + rank, arena, offset, words.numel() * 8, words.data_ptr())])
        return words.tolist()

    def _read(self, rank: int, arena: int, offset: int, into: torch.Tensor) -> Exception | None:
        try:
            self._reader.read(
                [(self._first + rank, arena, offset, into.numel() * into.element_size(), into.data_ptr())]
            )
        except Error as error:  # it has been freed meanwhile
            return error
        return None


def _shared(size: int) -> torch.Tensor:
    """Return zeroed bytes that other processes can read."""
    found: torch.Tensor = from_dlpack(_core.shared_bytes(math.ceil(size / 8) * 8))
    return found


def _name_of(*parts: Any) -> int:
    found = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True) or 1
