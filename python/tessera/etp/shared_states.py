"""Rows of optimisers' states, masters and gradients in memory that other ranks read, so that one rank may read them
alone.

Each rank has a *board* in shared memory that only it writes: a head, and an entry for each state, master and gradient
that it keeps, with the place of its rows. Ranks name these alike without a word: by the update that has made it, its
weight and its key. They are written within updates only, which begin once all ranks have come to them, and the head
counts these: it is odd while this rank writes. A reader waits until the owner's count is even and not behind its own,
copies, and looks again. So a rank that reads alone sees what the last update has left, and waits for owners that have
not ended it yet.

The end of a backward, where ranks meet, is an update in this sense. Within a backward an owner adds to a gradient, or
to what it makes in the memory of the last one, once all ranks have produced theirs or nothing will come: a rank that
still reads what the last backward has left has not.

What is let go is freed once the next update has begun, when no rank reads: one that is behind may still want it. So may
one that reads on when this rank has dropped the model: what is left then is kept until all others have dropped theirs.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import weakref
from typing import Any, TypeVar

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
_NAMES = 1 << 63
_MIX_COUNT, _MIX_NUMBER, _MIX_NTH = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9  # without a pattern
_FIRST_WAIT, _LONGEST_WAIT = 50e-6, 2e-3  # seconds between two looks


class SharedRows:
    """Rows on the board; they leave it with this object."""

    def __init__(self, states: SharedStates, name: int, entry: Words, rows: torch.Tensor, counted: int) -> None:
        """`counted` is how many bytes `states` has added for it."""
        self._states, self._name, self._entry = states, name, entry
        weakref.finalize(self, states.let_go, entry, rows, counted).atexit = False

    def note(self, stamp: int) -> None:
        """Show what has gone into the rows."""
        self._states.note(self._entry, stamp)

    _awaited = False  # where a rank that has come as far does not show it yet

    def read(self, what: str, spec: Spec, rows: torch.Tensor, stamp: int) -> tuple[torch.Tensor, list[int]]:
        """Return the whole tensor of all ranks' rows, in memory of its own, and every rank's stamp. Asks nobody."""
        return self._states.read(what, self._name, spec, rows, stamp, self._awaited)

    @property
    def readable(self) -> bool:
        return not self._states.writing

    def become(self, number: int) -> None:
        """Take the name of what this update makes of weight `number`: nobody has the rows of before."""
        self._name = self._states.rename(self._entry, number)


class SharedGradient(SharedRows):
    """A gradient's rows, to which owners add those of all ranks within backwards: as soon as all have come to them."""

    _awaited = True  # one that is assigned is shown when its rank comes to that line

    @property
    def readable(self) -> bool:
        return not (self._states.writing or self._states.adding)


Rows = TypeVar("Rows", bound=SharedRows)


class _Board:
    """Another rank's, as it was read last."""

    def __init__(self, arena: int, offset: int) -> None:
        self.arena, self.offset = arena, offset
        self.changes = -1
        self.places: dict[int, tuple[int, int, int, int]] = {}  # arena, offset, bytes and stamp by name


class SharedStates:
    """The boards of one model's ranks.

    Attributes:
        bytes: Of states' rows that this rank keeps there.
        writing: This rank is within an update.
        adding: It is within a backward.
    """

    bytes: int
    adding: bool

    def __init__(self, core: _core.ShardGroup, rank: int, size: int, timeout: float) -> None:
        """Collective over `core`. `rank` and `size` are those of the ranks that share rows, one replica of it."""
        self._first = core.rank - rank  # of the replica
        self._rank, self._size, self._timeout = rank, size, timeout
        self._reader = _core.MemoryReader(core, 1)
        self._boards: list[Words] = []  # of this rank, each twice as long as the one before
        self._free: list[Words] = []  # entries
        self._gone: list[tuple[Words, torch.Tensor]] = []  # entries and rows that have been let go
        self._reading = core.reading()
        weakref.finalize(self, core.keep_for_readers, (self._boards, self._gone)).atexit = False
        self._made: dict[tuple[int, str], int] = {}  # states of this update, by weight and key
        self.bytes = 0
        self.adding = False
        self._depth = 0
        self._count = 0
        self._process = os.getpid()
        self._changed = False  # an entry, which is to be told at the end of this update
        board = self._add_board(_ENTRIES)
        self._head: Words = board[0]
        self._count_at = self._head[_COUNT:].ctypes.data
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
            self._made.clear()
        self._depth = max(0, self._depth - 1)

    @property
    def writing(self) -> bool:
        return self._depth > 0

    def _next_count(self) -> None:
        self._count += 1
        self._show_count()

    def _show_count(self) -> None:
        if self._changed:
            self._head[_CHANGES] += 1
            self._changed = False
        _core.set_sequence(self._count_at, self._count)

    def _change(self) -> None:
        """Note that an entry has changed: others read the board again."""
        if self.writing:
            self._changed = True
        else:
            self._head[_CHANGES] += 1

    @property
    def count(self) -> int:
        """How often an update has begun or ended."""
        return self._count

    def align(self, count: int) -> None:
        """End an update that may have begun, or ended, on some ranks only. `count` is the largest of all ranks. Nobody
        has used the next one: under the last, ranks may have made different things by the same names."""
        self._depth = 0
        self._made.clear()
        self._count = count + count % 2 + 2
        self._show_count()

    def place(self, number: int, key: str, rows: torch.Tensor) -> tuple[torch.Tensor, SharedRows] | None:
        """Return rows in shared memory, with these values, of a state that all ranks make now of weight `number`. None:
        outside of an update."""
        if not self.writing:
            return None
        name = _name_of(self._count, number, key, self._next(number, key), str(rows.dtype))
        placed = shared_like(rows)
        placed.copy_(rows)
        return placed, self._show(name, placed, True)

    @property
    def reads_private(self) -> bool:
        """Tell whether ranks may read each other's private memory. The same on all."""
        return not self._reader.refused

    def show(self, number: int, key: str, rows: torch.Tensor) -> SharedRows:
        """Show rows of weight `number` where they are: in shared memory unless ranks read private memory. REQUIRES:
        `writing`; no other rows of the weight have this key."""
        return self._show(_name_of(number, key), rows, False)

    def show_gradient(self, number: int, rows: torch.Tensor) -> SharedGradient:
        """Show a gradient of weight `number`, likewise."""
        return self._show(self._gradient_of(number), rows, False, SharedGradient)

    def show_assigned(self, number: int, rows: torch.Tensor, stamp: int) -> SharedGradient:
        """Show rows that all ranks take as a gradient of weight `number` once they come to this line. REQUIRES:
        `reads_private`."""
        name = _name_of(self._count, number, "assigned", self._next(number, "assigned"))
        return self._show(name, rows, False, SharedGradient, stamp)

    def rename(self, entry: Words, number: int) -> int:
        """Give an entry the name of a gradient that is made now, and return it."""
        name = self._gradient_of(number)
        entry[_STAMP], entry[_NAME] = 0, name
        self._change()
        return name

    def _gradient_of(self, number: int) -> int:
        """Name a gradient that is made now: a hash of the update, its weight, and how many there have been of these."""
        nth = self._next(number, "gradient")
        return ((self._count * _MIX_COUNT + number * _MIX_NUMBER + nth * _MIX_NTH) % _NAMES) or 1

    def _next(self, number: int, key: str) -> int:
        """Count what this update makes under one key of a weight."""
        nth = self._made[number, key] = self._made.get((number, key), -1) + 1
        return nth

    def _show(
        self,
        name: int,
        rows: torch.Tensor,
        counts: bool,
        kind: type[Rows] = SharedRows,  # type: ignore[assignment]
        stamp: int = 0,
    ) -> Rows:
        if not self._free:
            self._add_board(2 * (self._boards[-1].shape[0] - 1))
        entry = self._free.pop()
        size = rows.numel() * rows.element_size()
        arena, offset = self._reader.refer(rows.data_ptr(), size) if size else (0, 0)
        entry[_STAMP], entry[_ARENA], entry[_OFFSET], entry[_BYTES] = stamp, arena, offset, size
        entry[_NAME] = name  # last: others may read already
        self._change()
        counted = size if counts else 0
        self.bytes += counted
        return kind(self, name, entry, rows, counted)

    def note(self, entry: Words, stamp: int) -> None:
        """As SharedRows.note()."""
        entry[_STAMP] = stamp
        if self._depth > 0:
            self._changed = True
        else:
            self._change()

    def let_go(self, entry: Words, rows: torch.Tensor, counted: int) -> None:
        """Note that this rank does not want rows any more. Others may still read them."""
        if os.getpid() == self._process:  # and not in a fork's copy of it
            self.bytes -= counted
            self._gone.append((entry, rows))

    def _take_away(self) -> None:
        """Free what has been let go. REQUIRES: no rank reads."""
        gone = self._gone[:]
        for entry, _ in gone:
            entry[_NAME] = 0
            self._free.append(entry)
        if gone:
            self._change()
            del self._gone[: len(gone)]

    # --- what it reads of others

    def read(
        self, what: str, name: int, spec: Spec, rows: torch.Tensor, stamp: int, awaited: bool
    ) -> tuple[torch.Tensor, list[int]]:
        """Return what SharedRows.read() does. What is `awaited` may be shown later."""
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
            stamps[rank] = self._copy(what, name, rank, packed, awaited)
            if packed is not into:
                into.copy_(packed)
        return whole.view(spec.shape), stamps

    def _copy(self, what: str, name: int, rank: int, into: torch.Tensor, awaited: bool) -> int:
        """Copy the rows of one rank; return their stamp."""
        until, wait = time.monotonic() + self._timeout, _FIRST_WAIT
        board = self._others[rank]
        while True:
            head = self._words(rank, board.arena, board.offset, 1)[0]
            if head[_COUNT] % 2 == 0 and head[_COUNT] >= self._count:
                place = self._place_of(rank, board, head, name)
                if place is None and not awaited:
                    raise InvalidArgumentError(
                        f"{what}: rank {rank} has no such state: it has let go its optimiser, or its step failed: let "
                        "all ranks keep their optimisers as long as one of them reads"
                    )
                stamp = None if place is None else self._copy_from(what, rank, board, head, name, place, into)
                if stamp is not None:
                    return stamp
            if time.monotonic() > until:
                call = "backward pass, or has let its gradient go," if awaited else "optimiser's step"
                raise DeadlineExceededError(
                    f"{what}: rank {rank} has not ended its {call} after {self._timeout:g} s: has it made as many "
                    "steps as this rank?"
                )
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _copy_from(
        self,
        what: str,
        rank: int,
        board: _Board,
        head: list[int],
        name: int,
        place: tuple[int, int, int, int],
        into: torch.Tensor,
    ) -> int | None:
        """Copy rows from a place of a board whose head was `head`; return their stamp. None: the board has changed
        meanwhile."""
        arena, offset, found, stamp = place
        size = into.numel() * into.element_size()
        if found != size:
            raise InvalidArgumentError(f"{what}: rank {rank} has {found} bytes of it, not {size}")
        error = self._read(rank, arena, offset, into)
        again = self._words(rank, board.arena, board.offset, 1)[0]
        if again[_COUNT] != head[_COUNT] or (
            again[_CHANGES] != head[_CHANGES] and self._place_of(rank, board, again, name) != place
        ):
            return None
        if error is not None:
            raise error
        return stamp

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


def shared_like(rows: torch.Tensor) -> torch.Tensor:
    """Return contiguous zeros of the same shape and dtype, in memory that other processes can read."""
    size = rows.numel() * rows.element_size()
    return _shared(size).view(rows.dtype).flatten()[: rows.numel()].view(rows.shape) if size else torch.zeros_like(rows)


def _name_of(*parts: Any) -> int:
    found = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True) or 1
