"""Which parts of a local tensor are quantised as one, where they are on their way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .. import _core
from .._errors import Error
from .._tensors.location import Location
from .mapping import Part
from .slices import Entry, entries, is_sharded

Fused: TypeAlias = tuple[str, tuple[int, int] | None]
"""Of a part: the name of what it is fused into, and where it begins there, row and column, if that can be known."""


def fused_parts(parts: Mapping[str, Part], at: Location, layout: _core.Layout) -> dict[str, Fused]:
    """Of parts that lie in the same matrices, by their names; named after the first of them, so that all ranks find the
    same."""
    groups: dict[str, dict[str, tuple[int, int] | None]] = {}
    for name, part in parts.items():
        found = _box(part, at, layout)
        if found is not None:
            matrices, place = found
            groups.setdefault(matrices, {})[name] = place
    return {
        name: (next(iter(group)), place) for group in groups.values() if len(group) > 1 for name, place in group.items()
    }


def _box(part: Part, at: Location, layout: _core.Layout) -> tuple[str, tuple[int, int] | None] | None:
    """Which matrices of the tensor it lies in, and where it begins in these: rows and columns, none left out in
    between. (Where ranks hold shards, the place in a local tensor says nothing about the whole.)"""
    shape = at.global_shape or (None if is_sharded(layout) else at.shape)
    known = part.whole is not None or not is_sharded(layout)
    try:
        if part.whole is not None:
            taken = entries(part.whole, shape or ())
        elif part.local is not None:
            taken = entries(part.local, at.shape)
        else:
            return None
    except Error:
        return None  # it is refused where it is located
    if len(taken) < 2 or not all(_dense(each) for each in taken[-2:]):
        return None
    rows, columns = taken[-2:]
    assert isinstance(rows, range) and isinstance(columns, range)
    return str(list(taken[:-2])), (rows.start, columns.start) if known else None


def _dense(each: Entry) -> bool:
    return isinstance(each, range) and each.step == 1
