"""A rank's rows of a logical tensor for torch.distributed.checkpoint: which boxes of the whole they are."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch


class Weight(Protocol):
    """What is cut, and where."""

    shape: torch.Size
    matrix: torch.Size
    rows: tuple[int, int]

    @property
    def lead(self) -> torch.Size: ...


class Box(NamedTuple):
    """Of the logical tensor; contiguous within this rank's rows, too."""

    offsets: torch.Size
    sizes: torch.Size
    rows: tuple[int, int]  # of this rank's


def boxes_of(weight: Weight) -> list[Box]:
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


def write_items(fqn: str, weight: Weight, rows: torch.Tensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(rows)
    return [
        WriteItem(
            index=MetadataIndex(fqn, box.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(ChunkStorageMetadata(box.offsets, box.sizes), properties, weight.shape),
        )
        for box in boxes_of(weight)
    ]


def chunk_list(weight: Weight) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(box.offsets, box.sizes) for box in boxes_of(weight)]


def shard_at(weight: Weight, rows: torch.Tensor, offsets: torch.Size | None) -> torch.Tensor:
    """The box that begins there, as a view."""
    for box in boxes_of(weight):
        if box.offsets == offsets:
            return rows.flatten(0, -2)[box.rows[0] : box.rows[1]].view(box.sizes)
    raise KeyError(f"no rows of this rank begin at {offsets}")
