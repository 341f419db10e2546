"""Finds parts of a local tensor that are quantised as one, if they are quantised on their way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .. import _core
from .._errors import Error
from .._tensors.location import Location
from .mapping import Part
from .slices import Entry, entries, is_sharded

Fused: TypeAlias = tuple[str, tuple[int, int] | None]
"""For a part: the name of the fused tensor, and where the part begins in it (row and column), if that can be known."""


def fused_parts(parts: Mapping[str, Part], at: Location, layout: _core.Layout) -> dict[str, Fused]:
    """For parts of the same matrices, by name; a group is named after its first part, so that all ranks find the
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
    """The tensor's matrices that it is in, and where it begins in them: contiguous rows and columns. (If ranks hold
    shards, a position in a local tensor says nothing about the whole.)"""
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
        return None  # locating it refuses it
    if len(taken) < 2 or not all(_dense(each) for each in taken[-2:]):
        return None
    rows, columns = taken[-2:]
    assert isinstance(rows, range) and isinstance(columns, range)
    return str(list(taken[:-2])), (rows.start, columns.start) if known else None


def _dense(each: Entry) -> bool:
    return isinstance(each, range) and each.step == 1
