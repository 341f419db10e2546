"""Slices of tensors: of a local one, as a view; of one that is sharded, as the layout that the slice has.

An index is what NumPy calls a basic one: an int or a slice, or a tuple of them, one for each dim from the first on. A
slice goes upwards and stays inside the tensor; an int drops its dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .. import _core
from .._errors import InvalidArgumentError, UnimplementedError
from .._tensors.foreign import type_name
from .._tensors.location import Location

Index: TypeAlias = int | slice | tuple[int | slice, ...]
# For one dim: an element, or the elements of a range.
Entry: TypeAlias = int | range

_SHARDS = (_core.Shard, _core.StridedShard, _core.RaggedShard)


def require_index(what: str, index: Any) -> None:
    """Raises InvalidArgumentError for what cannot be an index into any shape."""
    for each in index if isinstance(index, tuple) else (index,):
        bounds = (each.start, each.stop, each.step) if isinstance(each, slice) else (each,)
        for bound in bounds:
            if (bound is None and isinstance(each, slice)) or (
                hasattr(bound, "__index__") and not isinstance(bound, bool | type)
            ):
                continue
            raise InvalidArgumentError(f"{what}: index {each!r} ({type_name(each)}): give an int, a slice, or a tuple")


def entries(index: Index | None, shape: Sequence[int]) -> tuple[Entry, ...]:
    """`index` of a tensor of that shape, one entry for each dim. None takes all of it.

    Raises InvalidArgumentError if it is outside the shape, runs backwards or is not a basic index.
    """
    given = () if index is None else index if isinstance(index, tuple) else (index,)
    if len(given) > len(shape):
        raise InvalidArgumentError(f"index [{index_text(index)}] has {len(given)} dims, the tensor has {len(shape)}")
    taken = [_entry(each, size, index) for each, size in zip(given, shape, strict=False)]
    return (*taken, *(range(size) for size in shape[len(given) :]))


def _entry(each: Any, size: int, index: Index | None) -> Entry:
    if isinstance(each, slice):
        step = 1 if each.step is None else each.step
        for bound in (each.start, each.stop, step):
            if bound is not None and not hasattr(bound, "__index__"):
                raise _refused(index, size, f"{bound!r} is not a whole number")
        if step < 1:
            raise _refused(index, size, f"its step {step} is not positive")
        for bound in (each.start, each.stop):
            if bound is not None and not -size <= bound <= size:
                raise _refused(index, size, f"{bound} is outside")
        return range(*each.indices(size))
    if hasattr(each, "__index__") and not isinstance(each, bool):
        at = each.__index__()
        if not -size <= at < size:
            raise _refused(index, size, f"{at} is outside")
        return int(at % size)
    raise InvalidArgumentError(f"index {each!r} ({type_name(each)}): give an int, a slice, or a tuple of them")


def _refused(index: Index | None, size: int, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"index [{index_text(index)}] of a dim of {size}: {why}")


def index_text(index: Index | None) -> str:
    """The index as written between brackets in Python."""
    given = () if index is None else index if isinstance(index, tuple) else (index,)
    return ", ".join(_slice_text(each) if isinstance(each, slice) else str(each) for each in given)


def _slice_text(each: slice) -> str:
    bounds = ":".join("" if bound is None else str(bound) for bound in (each.start, each.stop))
    return bounds if each.step is None else f"{bounds}:{each.step}"


def shape_of(taken: Sequence[Entry]) -> tuple[int, ...]:
    """The shape of what the entries select."""
    return tuple(len(each) for each in taken if isinstance(each, range))


def view(location: Location, taken: Sequence[Entry]) -> Location:
    """The selected part of a local tensor, in the same memory. Layout and global shape are unchanged."""
    shape = shape_of(taken)
    first = [each if isinstance(each, int) else each.start for each in taken]
    strides = tuple(
        stride * each.step for each, stride in zip(taken, location.strides, strict=True) if isinstance(each, range)
    )
    location = location._replace(copy=None)
    if not math.prod(shape) or not location.address:
        return location._replace(address=0, shape=shape, strides=strides)
    bits = _core.bits_of(location.dtype) * sum(at * stride for at, stride in zip(first, location.strides, strict=True))
    if bits % 8:
        raise InvalidArgumentError(f"it begins inside a byte (element {first} of {location.dtype})")
    return location._replace(address=location.address + bits // 8, shape=shape, strides=strides)


def is_sharded(layout: _core.Layout) -> bool:
    """Whether some rank of its mesh may hold less than all."""
    return any(
        isinstance(each, _SHARDS) and size > 1 for each, size in zip(layout.placements, layout.mesh.shape, strict=True)
    )


def sharding_axes(layout: _core.Layout, dim: int) -> tuple[int, ...]:
    """The axes of the layout's mesh that shard `dim`. REQUIRES: the layout is bound."""
    return tuple(axis for axis, each in enumerate(layout.placements) if isinstance(each, _SHARDS) and each.dim == dim)


@dataclass(frozen=True)
class Cut:
    """A slice of a sharded tensor: a tensor with its own layout."""

    layout: _core.Layout
    shape: tuple[int, ...]  # global
    local: tuple[Entry, ...] | None  # this rank's part of it, in the local tensor; None: it is not in the mesh


def cut(layout: _core.Layout, shape: Sequence[int], rank: int, taken: Sequence[Entry]) -> Cut:
    """The slice `taken` of a tensor of global `shape` with the layout `layout`, seen from `rank`.

    One of a dim that one axis shards contiguously becomes a RaggedShard by that axis; an element of a sharded dim is on
    only those ranks that hold it, so that its mesh has fewer axes. Either is a view on every rank.

    Raises UnimplementedError for a slice of a dim that several axes shard, or one not contiguously.
    """
    slices = as_slices(taken)
    try:
        found = _core.sliced_layout(layout, shape, slices)
    except UnimplementedError as error:
        raise UnimplementedError(f"{error}; give parts with local=, layout= and shape=") from None
    if rank not in found.mesh:
        return Cut(found, shape_of(taken), None)
    here = _core.local_slices(layout, shape, slices, rank)
    local = tuple(begin if dropped else range(begin, end, step) for begin, end, step, dropped in here)
    return Cut(found, shape_of(taken), local)


def as_slices(taken: Sequence[Entry]) -> list[tuple[int, int, int, bool]]:
    """For the core: (begin, end, step, whether the dim is dropped) for each dim."""
    return [_slice(each) for each in taken]


def _slice(each: Entry) -> tuple[int, int, int, bool]:
    if isinstance(each, int):
        return each, each + 1, 1, True
    return each.start, max(each.start, each.stop), each.step, False
