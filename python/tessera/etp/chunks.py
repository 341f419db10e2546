"""What a rank has of a logical tensor, for checkpoints: which boxes of the whole its rows are, also of what tensor
parallelism has cut before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from .parts import WholePart
    from .weight import Weight

    Cuttable: TypeAlias = "Weight | WholePart"


class Cut(NamedTuple):
    """A tensor that tensor parallelism has cut along `dim`: in each of `halves` blocks, this rank has
    [begin, end)."""

    dim: int
    halves: int
    total: int  # of the whole
    begin: int
    end: int

    def whole(self, shape: tuple[int, ...]) -> torch.Size:
        """Of a part's shape."""
        return torch.Size((*shape[: self.dim], self.total, *shape[self.dim + 1 :]))

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        blocks = full.chunk(self.halves, self.dim)
        return torch.cat([each.narrow(self.dim, self.begin, self.end - self.begin) for each in blocks], self.dim)

    def places(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Of [begin, end) of the part: where each piece of it begins in the part and in the whole, and its size."""
        each, block = self.end - self.begin, self.total // self.halves
        for half in range(self.halves):
            low, high = max(begin, half * each), min(end, (half + 1) * each)
            if low < high:
                yield low, half * block + self.begin + low - half * each, high - low


class Box(NamedTuple):
    """Of the tensor that the ranks of an ETP group share; contiguous within this rank's rows, too."""

    offsets: torch.Size
    sizes: torch.Size
    rows: tuple[int, int]  # of this rank's


def boxes_of(weight: Cuttable) -> list[Box]:
    """They cover this rank's rows once, in order. Rows of more than two dims may begin and end within a slice; a stack
    is cut within each expert."""
    if weight.lead:
        begin, end = weight.rows
        sizes = (*weight.lead, end - begin, *weight.matrix[1:])
        offsets = (*(0 for _ in weight.lead), begin, 0)
        rows = (0, math.prod(sizes[:-1]))
        return [Box(torch.Size(offsets), torch.Size(sizes), rows)] if begin < end else []
    cut = next(i for i in range(1, len(weight.shape) + 1) if math.prod(weight.shape[:i]) == weight.matrix[0])
    leading, rest = weight.shape[:cut], weight.shape[cut:]
    begin, end = weight.rows
    boxes, at = [], 0
    for offsets, sizes in _boxes(begin, end, leading):
        count = math.prod(sizes)
        boxes.append(Box(torch.Size(offsets + (0,) * len(rest)), torch.Size(sizes + tuple(rest)), (at, at + count)))
        at += count
    return boxes


Ints = tuple[int, ...]


def _boxes(begin: int, end: int, shape: torch.Size) -> list[tuple[Ints, Ints]]:
    """Of elements [begin, end) of a shape, in the order of memory: offsets and sizes."""
    if begin == end:
        return []
    if len(shape) == 1:
        return [((begin,), (end - begin,))]
    inner = math.prod(shape[1:])
    found: list[tuple[Ints, Ints]] = []
    while begin < end:
        slab, within = divmod(begin, inner)
        slabs = (end - begin) // inner if within == 0 else 0
        if slabs:
            found.append(((slab,) + (0,) * (len(shape) - 1), (slabs, *shape[1:])))
            begin += slabs * inner
            continue
        until = min(end - slab * inner, inner)
        found += [((slab, *offsets), (1, *sizes)) for offsets, sizes in _boxes(within, until, shape[1:])]
        begin = slab * inner + until
    return found


class Piece(NamedTuple):
    """Of the logical tensor, which tensor parallelism has not cut."""

    offsets: torch.Size
    sizes: torch.Size
    box: Box  # that it lies in
    at: int  # where it begins there, along the dim of the cut


def pieces_of(weight: Cuttable) -> list[Piece]:
    cut = weight.tp_cut
    if cut is None:
        return [Piece(box.offsets, box.sizes, box, 0) for box in boxes_of(weight)]
    found = []
    for box in boxes_of(weight):
        begin = box.offsets[cut.dim]
        for low, offset, size in cut.places(begin, begin + box.sizes[cut.dim]):
            offsets, sizes = (list(each) for each in (box.offsets, box.sizes))
            offsets[cut.dim], sizes[cut.dim] = offset, size
            found.append(Piece(torch.Size(offsets), torch.Size(sizes), box, low - begin))
    return found


def whole_shape(weight: Cuttable) -> torch.Size:
    return weight.shape if weight.tp_cut is None else weight.tp_cut.whole(weight.shape)


def write_items(fqn: str, weight: Cuttable, rows: torch.Tensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(rows)
    return [
        WriteItem(
            index=MetadataIndex(fqn, piece.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(piece.offsets, piece.sizes), properties, whole_shape(weight)
            ),
        )
        for piece in pieces_of(weight)
    ]


def chunk_list(weight: Cuttable) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(piece.offsets, piece.sizes) for piece in pieces_of(weight)]


def shard_at(weight: Cuttable, rows: torch.Tensor, offsets: torch.Size | None) -> torch.Tensor:
    """The piece that begins there, as a view."""
    cut = weight.tp_cut
    for piece in pieces_of(weight):
        if piece.offsets == offsets:
            box = piece.box
            found = rows.view(-1, weight.matrix[1])[box.rows[0] : box.rows[1]].view(box.sizes)
            return found if cut is None else found.narrow(cut.dim, piece.at, piece.sizes[cut.dim])
    raise KeyError(f"no rows of this rank begin at {offsets}")
