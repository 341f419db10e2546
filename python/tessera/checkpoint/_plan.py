"""Who writes what, and into which file: a pure function of what all ranks hold, so that they agree without a word."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from .._core import bits_of, dtypes, spread_over_files
from .._errors import MismatchError
from ._parts import Part, Region, size_of

Tensor: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, dtype and logical shape."""


class Holding(NamedTuple):
    """What one rank tells of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]


class Plan(NamedTuple):
    files: list[list[Tensor]]  # the tensors of each file, every one whole
    file_of: dict[str, int]
    writes: list[dict[str, list[Region]]]  # of each rank, by name


def told(parts: Iterable[Part]) -> list[Any]:
    """As JSON; a region that is the whole tensor is null."""

    def short(regions: list[Region] | None, shape: Sequence[int]) -> Any:
        return None if regions is None else [None if each == _whole(shape) else each for each in regions]

    return [
        [part.name, part.dtype, part.shape, short(part.regions, part.shape), short(part.others, part.shape), part.says]
        for part in parts
    ]


def heard(values: Sequence[Any]) -> tuple[list[list[Holding]], set[str]]:
    """Of what told() gave on each rank: what ranks hold, and the names of tensors of which one says how they are cut.
    Raises MismatchError for anything else."""
    said: set[str] = set()
    found: list[list[tuple[Holding, Holding | None]]] = []
    for rank, value in enumerate(values):
        try:
            found.append([_holdings(said, *each) for each in value])
        except (TypeError, ValueError):
            raise MismatchError(f"rank {rank} tells no list of tensors: run the same release on all ranks") from None
    held = [
        [other if other is not None and first.name in said else first for first, other in holdings]
        for holdings in found
    ]
    return held, said


def _whole(shape: Sequence[int]) -> Region:
    return tuple(((0, size),) for size in shape)


def _holdings(
    said: set[str], name: Any, dtype: Any, shape: Any, regions: Any, others: Any, says: Any
) -> tuple[Holding, Holding | None]:
    if not isinstance(name, str) or dtype not in dtypes():
        raise ValueError
    if says:
        said.add(name)
    sizes = tuple(_number(size) for size in shape)

    def held(regions: Any) -> Holding:
        return Holding(name, dtype, sizes, tuple(_region(each, sizes) for each in regions))

    return held(regions), None if others is None else held(others)


def _region(value: Any, shape: Sequence[int]) -> Region:
    if value is None:
        return _whole(shape)
    region = tuple(tuple((_number(begin), _number(end)) for begin, end in dim) for dim in value)
    for dim, size in zip(region, shape, strict=True):
        bounds = [0, *itertools.chain(*dim), size]
        if any(low > high for low, high in itertools.pairwise(bounds)) or any(begin == end for begin, end in dim):
            raise ValueError
    return region


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError
    return value


def plan(held: Sequence[Sequence[Holding]], files: int) -> Plan:
    """held: by rank. Every element is written by one of the ranks that hold it. Raises MismatchError unless all
    together hold each tensor whole."""
    tensors: dict[str, Tensor] = {}
    owners: dict[tuple[str, Region], list[int]] = {}
    for rank, holdings in enumerate(held):
        for each in holdings:
            known = tensors.setdefault(each.name, each[:3])
            if known != each[:3]:
                raise MismatchError(
                    f"tensor {each.name}: it is {_shown(each)} on rank {rank} and {_shown(known)} on another"
                )
            for region in each.regions:
                owners.setdefault((each.name, region), []).append(rank)
    _require_whole(tensors, owners)
    ordered = [tensors[name] for name in sorted(tensors)]
    count = min(files, len(ordered))  # none is empty
    file_of = dict(zip(sorted(tensors), spread_over_files(ordered, max(count, 1)), strict=True))
    return Plan(
        [[each for each in ordered if file_of[each[0]] == file] for file in range(count)],
        file_of,
        _writes(tensors, owners, len(held)),
    )


def _shown(tensor: Any) -> str:
    return f"{tensor[1]} {tuple(tensor[2])}"


def _writes(
    tensors: dict[str, Tensor], owners: dict[tuple[str, Region], list[int]], ranks: int
) -> list[dict[str, list[Region]]]:
    """What several ranks hold goes to the one that has least to write, the largest first."""
    load = [0] * ranks
    writes: list[dict[str, list[Region]]] = [{} for _ in range(ranks)]
    bits = {owned: size_of(owned[1]) * bits_of(tensors[owned[0]][1]) for owned in owners}
    for owned in sorted(owners, key=lambda owned: (len(owners[owned]) > 1, -bits[owned], owned)):
        rank = min(owners[owned], key=lambda rank: (load[rank], rank))
        load[rank] += bits[owned]
        writes[rank].setdefault(owned[0], []).append(owned[1])
    return writes


def _require_whole(tensors: dict[str, Tensor], owners: Iterable[tuple[str, Region]]) -> None:
    regions: dict[str, list[Region]] = {name: [] for name in tensors}
    for name, region in owners:
        regions[name].append(region)
    for name, (_, _, shape) in tensors.items():
        total, found = size_of(_whole(shape)), sum(size_of(each) for each in regions[name])
        if found != total or not disjoint(regions[name]):
            raise MismatchError(
                f"tensor {name} of shape {shape}: the ranks hold {found} elements of {total}, or some elements on "
                "several ranks by different cuts: all ranks that hold a part of the model have to call"
            )


def disjoint(regions: list[Region]) -> bool:
    """Most are rows: neighbours by their first dim. Others are compared with each other."""
    if all(region and len(region[0]) == 1 for region in regions):
        rows = sorted(region[0][0] for region in regions)
        if all(before[1] <= after[0] for before, after in itertools.pairwise(rows)):
            return True
    return not any(_meet(a, b) for a, b in itertools.combinations(regions, 2))


def _meet(a: Region, b: Region) -> bool:
    return all(any(max(x[0], y[0]) < min(x[1], y[1]) for x in p for y in q) for p, q in zip(a, b, strict=True))
