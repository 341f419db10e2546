"""Maps of all ranks of an engine, for reading: what each rank holds of each tensor of the checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._learn import LearnedMap, Slice

_MOST_COMPUTED = 4  # lines, of each reason
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a layer or an expert


@dataclass(frozen=True)
class Holding:
    """What ranks take of one tensor of the checkpoint.

    Attributes:
        boxes: By rank.
        parameters: Where it goes, on any rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[tuple[range, ...], ...], ...]
    parameters: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def nbytes_of(self, rank: int) -> int:
        return sum(math.prod(map(len, box)) for box in self.boxes[rank]) * self.dtype.itemsize


class Report:
    """The maps of ranks 0, 1 and so on, of one checkpoint."""

    def __init__(
        self, checkpoint: Mapping[str, tuple[tuple[int, ...], torch.dtype]], maps: Sequence[LearnedMap]
    ) -> None:
        self.maps = maps
        boxes: dict[str, list[list[tuple[range, ...]]]] = {name: [[] for _ in maps] for name in checkpoint}
        parameters: dict[str, dict[str, None]] = {name: {} for name in checkpoint}
        for rank, learned in enumerate(maps):
            for each in learned.slices:
                boxes[each.tensor][rank].append(each.ranges)
            for name in learned.by_loader:
                shape, dtype = checkpoint[name]
                whole = Slice(name, tuple(map(range, shape)), dtype, True)
                boxes[name][rank] = [whole.ranges]
            for piece in learned.pieces:
                parameters[piece.source.tensor][piece.parameter] = None
        self.holdings = [
            Holding(name, shape, dtype, tuple(tuple(each) for each in boxes[name]), tuple(parameters[name]))
            for name, (shape, dtype) in checkpoint.items()
        ]

    @property
    def nbytes(self) -> int:
        """Of the checkpoint."""
        return sum(each.nbytes for each in self.holdings)

    def nbytes_of(self, rank: int) -> int:
        """That a rank receives."""
        return sum(each.nbytes_of(rank) for each in self.holdings)

    def json(self) -> dict[str, Any]:
        return {
            "bytes": self.nbytes,
            "tensors": [
                {
                    "name": each.name,
                    "shape": each.shape,
                    "dtype": _dtype(each.dtype),
                    "bytes": each.nbytes,
                    "parameters": each.parameters,
                    "ranks": [
                        {
                            "rank": rank,
                            "bytes": each.nbytes_of(rank),
                            "boxes": [[[at.start, at.stop, at.step] for at in box] for box in boxes],
                        }
                        for rank, boxes in enumerate(each.boxes)
                    ],
                }
                for each in self.holdings
            ],
            "ranks": [
                {
                    "rank": rank,
                    "bytes": self.nbytes_of(rank),
                    "share": self.nbytes_of(rank) / self.nbytes if self.nbytes else 0.0,
                    "computed": dict(learned.computed),
                    "by_loader": list(learned.by_loader),
                    "untouched": dict(learned.untouched),
                }
                for rank, learned in enumerate(self.maps)
            ],
            "unused": [each.name for each in self.holdings if not any(each.boxes)],
        }

    def text(self, every_layer: bool = False) -> Iterator[str]:
        """Lines. Tensors whose names differ in numbers only, and which are held in the same way, are one entry."""
        for names, each in self._entries(every_layer):
            shape = "x".join(map(str, each.shape)) or "scalar"
            count = f"  ({len(names)} tensors)" if len(names) > 1 else ""
            yield f"{_together(names)}  {shape} {_dtype(each.dtype)}{count}"
            if not any(each.boxes):
                yield "    taken by no rank"
            for ranks, boxes in _by_boxes(each.boxes):
                held = "all of it" if boxes == (tuple(map(range, each.shape)),) else " and ".join(map(_box, boxes))
                yield f"    {_ranks(ranks, len(self.maps))}: {held or 'nothing'}"
        yield ""
        for rank, learned in enumerate(self.maps):
            of = self.nbytes_of(rank)
            share = f"{100 * of / self.nbytes:.1f} %" if self.nbytes else "-"
            yield f"rank {rank}: {_size(of)} in {len(learned.slices)} slices, {share} of the checkpoint"
        yield from self._computed()

    def _entries(self, every_layer: bool) -> Iterable[tuple[list[str], Holding]]:
        entries: dict[Any, tuple[list[str], Holding]] = {}
        for each in self.holdings:
            name = each.name if every_layer else _NUMBER.sub("#", each.name)
            entries.setdefault((name, each.shape, each.dtype, each.boxes), ([], each))[0].append(each.name)
        return entries.values()

    def _computed(self) -> Iterator[str]:
        reasons: dict[str, dict[str, None]] = {}
        needed: dict[str, None] = {}
        for learned in self.maps:
            needed |= dict.fromkeys(learned.by_loader)
            for parameter, why in learned.computed.items():
                reasons.setdefault(why, {})[parameter] = None
        if not reasons:
            yield "computed: nothing; each element of the engine's parameters is a copy, or padding"
            return
        yield f"computed by the loader, which needs {len(needed)} whole tensors for it:"
        for why, parameters in reasons.items():
            names: dict[str, list[str]] = {}
            for each in parameters:
                names.setdefault(_NUMBER.sub("#", each), []).append(each)
            lines = [f"    {_together(each)}: {why}" for each in names.values()]
            yield from lines[:_MOST_COMPUTED]
            if len(lines) > _MOST_COMPUTED:
                yield f"    and {len(lines) - _MOST_COMPUTED} more: {why}"


def _by_boxes(boxes: Sequence[Any]) -> Iterator[tuple[list[int], Any]]:
    found: dict[Any, list[int]] = {}
    for rank, each in enumerate(boxes):
        found.setdefault(each, []).append(rank)
    if any(boxes):
        yield from ((ranks, each) for each, ranks in found.items())


def _ranks(ranks: Sequence[int], world: int) -> str:
    if len(ranks) == world > 1:
        return "each rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {_numbers(ranks)}"


def _numbers(numbers: Sequence[int]) -> str:
    """0-3,6"""
    runs: list[list[int]] = []
    for each in sorted(numbers):
        if runs and each == runs[-1][-1] + 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _together(names: Sequence[str]) -> str:
    """model.layers.{0-31}.input_layernorm.weight"""
    numbers = [list(map(int, _NUMBER.findall(name))) for name in names]
    columns = iter([sorted(set(column)) for column in zip(*numbers, strict=True)])

    def shown(match: re.Match[str]) -> str:
        column = next(columns)
        return match[0] if len(column) == 1 else f"{{{_numbers(column)}}}"

    return _NUMBER.sub(shown, names[0])


def _box(ranges: Sequence[range]) -> str:
    return "[" + ", ".join(f"{at.start}:{at.stop}" + (f":{at.step}" if at.step > 1 else "") for at in ranges) + "]"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(nbytes: int) -> str:
    value, units = float(nbytes), ["B", "KB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{nbytes} B" if units[0] == "B" else f"{value:.2f} {units[0]}"
