"""Staging memory whose pages are exchanged with those of live parameters: an update in place without a copy.

The addresses of both stay as they are. Whatever holds one (a view, a closure, a packed handle, a compiled graph, the
bus) keeps it, and finds the other content there, just as after a copy. This is for private memory of a CPU, and works
by Linux' mremap(); what lies in the incomplete pages at the ends of a parameter is copied.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from .._errors import InvalidArgumentError
from ._boxes import dense_shape
from ._learn import Form, LearnedMap, Piece
from ._live import Plan

LEAST_BYTES = 1 << 20  # of a parameter; a smaller one is copied as quickly
_TABLE = 2 << 20  # what one page table spans: it moves as one if both places lie alike in it
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4


class StagedPages:
    """Staging memory for a learned map. Parameters that can change their pages have a twin of the same form in it, of
    which their slices are views; the other slices have memory of their own, as LearnedMap.staging() gives it."""

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        learned: LearnedMap,
        *,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        """
        Args:
            parameters: The live ones, by the names of `learned`. Where one lies must not change afterwards.
            learned: Of this rank.
            least_bytes: Of a parameter that gets a twin.
        """
        self._parameters = parameters
        live = _exchangeable(parameters(), learned, least_bytes) if can_exchange() else {}
        self._twins = dict(zip(live, _alike(list(live.values())), strict=True))
        views: dict[str, torch.Tensor] = {}
        for piece in learned.pieces:
            if piece.parameter in self._twins:
                view = piece.view(self._twins[piece.parameter])
                assert view is not None
                views[learned.key(piece.source)] = view
        #: Memory for each slice, by key.
        self.staged: dict[str, torch.Tensor] = {}
        for each in learned.slices:
            key = learned.key(each)
            self.staged[key] = views[key] if key in views else torch.empty(each.shape, dtype=each.dtype)

    def applied(self, plan: Plan) -> Plan:
        """The same plan, which exchanges pages instead of copying where it can."""
        copied = [piece for piece in plan.pieces if piece.parameter not in self._twins]
        names = list(dict.fromkeys(piece.parameter for piece in plan.pieces if piece.parameter in self._twins))
        if not names:
            return plan
        exchange = ExchangedPages(self._parameters, {name: self._twins[name] for name in names})
        return Plan(copied, [*plan.changes, exchange], plan.refresh)


class ExchangedPages:
    """A Change of parameters and twins: swap() exchanges what they hold, and undo() does so again."""

    def __init__(self, parameters: Callable[[], Mapping[str, torch.Tensor]], twins: Mapping[str, torch.Tensor]) -> None:
        found = parameters()
        self._parameters = parameters
        self._live = {name: found[name].detach() for name in twins}
        self._twins = twins
        self._spans = [_Span.of(self._live[name], twin) for name, twin in twins.items()]
        self._scratch = _Memory(max(span.size for span in self._spans) + _TABLE)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._exchanged = False

    @property
    def names(self) -> Collection[str]:
        """Of the parameters."""
        return self._twins.keys()

    def build(self, staged: Mapping[str, torch.Tensor]) -> None:
        now = self._parameters()
        for name, live in self._live.items():
            if name not in now or now[name].data_ptr() != live.data_ptr() or Form.of(now[name]) != Form.of(live):
                raise InvalidArgumentError(
                    f"{name} has moved since staging memory was made for it, and cannot be written in place: make the "
                    "staging memory again, as /init_weight_transfer_engine does"
                )

    def swap(self) -> None:
        self._stop = threading.Event()
        # In a thread of its own: signal handlers, which may raise anywhere, run in the main one.
        thread = threading.Thread(target=self._exchange_unless, args=(self._stop,), name="tessera-exchange")
        thread.start()
        thread.join()

    def undo(self) -> None:
        with self._lock:
            self._stop.set()
            if self._exchanged:
                self._exchange()

    def drop(self) -> None:
        self._exchanged = False

    def _exchange_unless(self, stop: threading.Event) -> None:
        with self._lock:
            if not stop.is_set():
                self._exchange()

    def _exchange(self) -> None:
        for span in self._spans:
            span.exchange(self._scratch.address)
        self._exchanged = not self._exchanged


class _Span(NamedTuple):
    """Two places of as many bytes."""

    one: int
    other: int
    size: int

    @classmethod
    def of(cls, one: torch.Tensor, other: torch.Tensor) -> _Span:
        return cls(one.data_ptr(), other.data_ptr(), one.nbytes)

    @property
    def pages(self) -> range:
        """Addresses of whole pages of the first place."""
        first = -(-self.one // mmap.PAGESIZE) * mmap.PAGESIZE
        return range(first, max(first, (self.one + self.size) // mmap.PAGESIZE * mmap.PAGESIZE))

    def exchange(self, scratch: int) -> None:
        """Does not fail. `scratch`: room for the size and _TABLE more, which nobody else uses."""
        far = self.other - self.one
        pages = self.pages
        ends = (
            [(self.one, pages.start), (pages.stop, self.one + self.size)]
            if pages
            else [(self.one, self.one + self.size)]
        )
        room = scratch + (pages.start - scratch) % _TABLE
        for begin, end in ends:
            _cycle(_copy, begin, begin + far, room, end - begin)
        if pages:
            _cycle(_move, pages.start, pages.start + far, room, len(pages))


def _cycle(move: Callable[[int, int, int], object], one: int, other: int, room: int, size: int) -> None:
    move(one, room, size)
    move(other, one, size)
    move(room, other, size)


def _copy(source: int, to: int, size: int) -> None:
    ctypes.memmove(to, source, size)


def _move(source: int, to: int, size: int) -> None:
    """Of whole pages; what `source` holds afterwards is not said, but it remains mapped."""
    if _mremap()(source, size, size, _MAYMOVE | _FIXED | _DONTUNMAP, to) != to:
        _copy(source, to, size)  # too many mappings, or too little memory for page tables


@functools.cache
def _mremap() -> Callable[[int, int, int, int, int], int | None]:
    call = ctypes.CDLL(None).mremap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    found: Callable[[int, int, int, int, int], int | None] = call
    return found


class _Memory:
    """Private memory, unmapped with this object. Pages that nobody writes take none."""

    def __init__(self, size: int) -> None:
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)  # holds the map
        self.address = self.bytes.data_ptr()


@functools.cache
def can_exchange() -> bool:
    """Whether this system can: Linux 5.7 or later, which may be forbidden to."""
    try:
        memory, size = _Memory(3 * mmap.PAGESIZE), mmap.PAGESIZE
        memory.bytes[:size] = 1
        to = memory.address + size
        moved = _mremap()(memory.address, size, size, _MAYMOVE | _FIXED | _DONTUNMAP, to) == to
        return moved and int(memory.bytes[0]) == 0 and int(memory.bytes[size]) == 1
    except (AttributeError, OSError, ValueError):
        return False


def _exchangeable(
    parameters: Mapping[str, torch.Tensor], learned: LearnedMap, least_bytes: int
) -> dict[str, torch.Tensor]:
    """Parameters that lie as they are loaded, in memory that may change its pages, and whose elements are each given by
    a slice that goes nowhere else."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # its driver may have pinned pages
        return {}
    pieces: dict[str, list[Piece]] = {}
    for piece in learned.pieces:
        pieces.setdefault(piece.parameter, []).append(piece)
    uses = Counter(piece.source for piece in learned.pieces)
    found: dict[str, torch.Tensor] = {}
    for name, given in pieces.items():
        live = parameters.get(name)
        if live is None or live.device.type != "cpu" or live.nbytes < max(1, least_bytes):
            continue
        if Form.of(live) != learned.forms[name] or dense_shape(live.shape, live.stride()) is None:
            continue
        if name in learned.untouched or name in learned.computed:
            continue
        if any(uses[each.source] > 1 or each.view(live) is None for each in given):
            continue
        found[name] = live.detach()
    private = _are_private([(each.data_ptr(), each.data_ptr() + each.nbytes) for each in found.values()])
    return {name: each for (name, each), is_private in zip(found.items(), private, strict=True) if is_private}


def _are_private(places: Sequence[tuple[int, int]]) -> list[bool]:
    """Which lie wholly in anonymous private memory, and apart from all others."""
    mapped = _anonymous()
    ends = [end for _, end in mapped]
    found = []
    for begin, end in places:
        at = bisect.bisect_left(ends, end)
        found.append(at < len(mapped) and mapped[at][0] <= begin)
    order = sorted(range(len(places)), key=places.__getitem__)
    for before, after in itertools.pairwise(order):
        if places[after][0] < places[before][1]:
            found[before] = found[after] = False
    return found


def _anonymous() -> list[tuple[int, int]]:
    """Addresses of anonymous private memory that can be written; what is adjacent is joined."""
    found: list[tuple[int, int]] = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, access, _, _, file = line.split(maxsplit=5)[:5]
            begin, end = (int(each, 16) for each in addresses.split("-"))
            if access != "rw-p" or file != "0":
                continue
            if found and found[-1][1] == begin:
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
    return found


def _alike(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory of the same forms, that lies alike in pages and page tables."""
    memory = _Memory(sum(each.nbytes + _TABLE for each in tensors) + _TABLE)
    found: list[torch.Tensor] = []
    at = 0
    for each in tensors:
        at += (each.data_ptr() - memory.address - at) % _TABLE
        flat = memory.bytes[at : at + each.nbytes].view(each.dtype)
        found.append(torch.as_strided(flat, each.shape, each.stride(), flat.storage_offset()))
        at += each.nbytes
    return found
