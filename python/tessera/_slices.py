"""Slices of tensors: of a local one, as a view; of one that is sharded, as the layout that the slice has.

An index is what NumPy calls a basic one: an int or a slice, or a tuple of them, one for each dim from the first on. A
slice goes upwards and stays inside the tensor; an int drops its dim.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from . import _core
from ._errors import InvalidArgumentError, UnimplementedError
from ._foreign import type_name
from ._tensors import Location

Index: TypeAlias = int | slice | tuple[int | slice, ...]
# Of one dim: an element, or those of a range.
Entry: TypeAlias = int | range

_Placement: TypeAlias = _core.Replicate | _core.Shard | _core.StridedShard | _core.RaggedShard | _core.Partial
_SHARDS = (_core.Shard, _core.StridedShard, _core.RaggedShard)


def entries(index: Index | None, shape: Sequence[int]) -> tuple[Entry, ...]:
    """`index` of a tensor of that shape, one entry for each dim. None takes all of it.

    Raises InvalidArgumentError for what is outside the shape, runs backwards or is no basic index.
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
                raise _refused(index, size, f"{bound!r} is no whole number")
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
    """As it stands between brackets in Python."""
    given = () if index is None else index if isinstance(index, tuple) else (index,)
    return ", ".join(_slice_text(each) if isinstance(each, slice) else str(each) for each in given)


def _slice_text(each: slice) -> str:
    bounds = ":".join("" if bound is None else str(bound) for bound in (each.start, each.stop))
    return bounds if each.step is None else f"{bounds}:{each.step}"


def shape_of(taken: Sequence[Entry]) -> tuple[int, ...]:
    """The shape of what the entries take."""
    return tuple(len(each) for each in taken if isinstance(each, range))


def view(location: Location, taken: Sequence[Entry]) -> Location:
    """What the entries take of a local tensor: the same memory. Its layout and global shape are left as they are."""
    shape = shape_of(taken)
    first = [each if isinstance(each, int) else each.start for each in taken]
    strides = tuple(
        stride * each.step for each, stride in zip(taken, location.strides, strict=True) if isinstance(each, range)
    )
    if not math.prod(shape) or not location.address:
        return replace(location, address=0, shape=shape, strides=strides)
    bits = _core.bits_of(location.dtype) * sum(at * stride for at, stride in zip(first, location.strides, strict=True))
    if bits % 8:
        raise InvalidArgumentError(f"it begins inside a byte (element {first} of {location.dtype})")
    return replace(location, address=location.address + bits // 8, shape=shape, strides=strides)


def is_sharded(layout: _core.Layout) -> bool:
    """Whether a rank of its mesh may hold less than all."""
    return any(
        isinstance(each, _SHARDS) and size > 1 for each, size in zip(layout.placements, layout.mesh.shape, strict=True)
    )


def sharding_axes(layout: _core.Layout, dim: int) -> tuple[int, ...]:
    """The axes of the layout's mesh that shard `dim`. REQUIRES: the layout is bound."""
    return tuple(axis for axis, each in enumerate(layout.placements) if isinstance(each, _SHARDS) and each.dim == dim)


@dataclass(frozen=True)
class Cut:
    """What a slice of a sharded tensor is: a tensor with a layout of its own."""

    layout: _core.Layout
    shape: tuple[int, ...]  # global
    local: tuple[Entry, ...] | None  # what this rank holds of it, of its local tensor; None: it is not in the mesh


@dataclass(frozen=True)
class _Dim:
    """How one dim of a tensor lies along the mesh axes that shard it."""

    size: int
    axes: tuple[int, ...]
    pieces: tuple[tuple[int, int, tuple[int, ...]], ...]  # (begin, end, where along those axes), ascending
    own: tuple[tuple[int, int], ...]  # what this rank holds, as intervals

    def owner(self, element: int) -> tuple[int, ...]:
        """Where along the axes it is."""
        return self.pieces[bisect_right(self.pieces, element, key=lambda piece: piece[0]) - 1][2]

    def position(self, element: int) -> int:
        """In the local tensor of this rank, if it holds that element."""
        return sum(min(end, element) - begin for begin, end in self.own if begin <= element)


class Sharded:
    """A tensor of a global shape that lies as a layout says, seen from a rank: to be sliced."""

    def __init__(self, layout: _core.Layout, shape: Sequence[int], rank: int) -> None:
        self._layout = layout.bind(shape)
        self._mesh = self._layout.mesh
        self._placements = self._layout.placements
        self._coordinate = self._mesh.coordinate(rank)
        self._dims = [self._dim(dim, size) for dim, size in enumerate(shape)]
        self._submeshes: dict[tuple[int, ...], dict[tuple[int, ...], _core.Mesh]] = {}  # by axes, by places along them

    def cut(self, taken: Sequence[Entry]) -> Cut:
        """The slice `taken`. One of a dim that one axis shards contiguously becomes a RaggedShard by that axis; an
        element of a sharded dim is on those ranks alone that hold it, so that its mesh has fewer axes. Either is a view
        on every rank.

        Raises UnimplementedError for a slice of a dim that several axes shard, or one not contiguously.
        """
        placements = list(self._placements)
        fixed: dict[int, int] = {}  # axis: where along it the elements taken are
        local: list[Entry] = []
        kept = 0  # dims
        for number, (dim, each) in enumerate(zip(self._dims, taken, strict=True)):
            if isinstance(each, int):
                fixed.update(zip(dim.axes, dim.owner(each), strict=True))
                local.append(dim.position(each))
                continue
            if len(each) == dim.size:  # all of it
                local.append(range(sum(end - begin for begin, end in dim.own)))
            elif not dim.axes:
                local.append(each)
            else:
                axis, bounds = self._blocks(number, each)
                cuts = [min(max(at, each.start), each.stop) - each.start for at in bounds]
                placements[axis] = _core.RaggedShard(number, cuts)
                at = 0 if self._coordinate is None else self._coordinate[axis]
                begin = max(each.start - bounds[at], 0) if cuts[at] < cuts[at + 1] else 0
                local.append(range(begin, begin + cuts[at + 1] - cuts[at]))
            for axis in dim.axes:
                placements[axis] = _moved(placements[axis], kept)
            kept += 1
        left = [each for axis, each in enumerate(placements) if axis not in fixed]
        layout = _core.Layout(self._submesh(fixed), left or [_core.Replicate()])
        here = self._coordinate is not None and all(self._coordinate[axis] == at for axis, at in fixed.items())
        return Cut(layout, shape_of(taken), tuple(local) if here else None)

    def _dim(self, dim: int, size: int) -> _Dim:
        axes = sharding_axes(self._layout, dim)
        if not axes:
            return _Dim(size, (), ((0, size, ()),), ((0, size),))
        mesh = _core.Mesh([self._mesh.shape[axis] for axis in axes])
        alone = _core.Layout(mesh, [_moved(self._placements[axis], 0) for axis in axes])
        pieces = []
        own: tuple[tuple[int, int], ...] = ()
        for rank in mesh.ranks:
            at = mesh.coordinate(rank)
            owned = alone.owned([size], rank)
            assert at is not None
            intervals = owned[0] if owned is not None else ()
            pieces += [(begin, end, at) for begin, end in intervals]
            if self._coordinate is not None and at == tuple(self._coordinate[axis] for axis in axes):
                own = intervals
        return _Dim(size, axes, tuple(sorted(pieces)), own)

    def _blocks(self, dim: int, each: range) -> tuple[int, list[int]]:
        """The axis that shards a dim, and where its pieces begin, and its end."""
        axes, pieces = self._dims[dim].axes, self._dims[dim].pieces
        where = f"slice {each.start}:{each.stop}:{each.step} of dim {dim}, which {self._layout} shards"
        if each.step != 1:
            raise UnimplementedError(f"{where}: of a sharded dim, take contiguous slices")
        ends = {at[0]: end for _, end, at in pieces}
        if len(axes) > 1 or len(ends) < len(pieces):
            raise UnimplementedError(
                f"{where}: a slice of a dim that several mesh axes shard, or one not contiguously, has no layout; give "
                "parts with local=, layout= and shape="
            )
        bounds = [0]
        for at in range(self._mesh.shape[axes[0]]):
            bounds.append(ends.get(at, bounds[-1]))
        return axes[0], bounds

    def _submesh(self, fixed: dict[int, int]) -> _core.Mesh:
        """The part of the mesh that is at those places along those axes, without the axes."""
        if not fixed:
            return self._mesh
        axes = tuple(sorted(fixed))
        if axes not in self._submeshes:
            self._submeshes[axes] = self._split(axes)
        return self._submeshes[axes][tuple(fixed[axis] for axis in axes)]

    def _split(self, axes: tuple[int, ...]) -> dict[tuple[int, ...], _core.Mesh]:
        ranks: dict[tuple[int, ...], list[int]] = {}
        for rank in self._mesh.ranks:
            coordinate = self._mesh.coordinate(rank)
            assert coordinate is not None
            ranks.setdefault(tuple(coordinate[axis] for axis in axes), []).append(rank)
        left = [axis for axis in range(self._mesh.ndim) if axis not in axes]
        shape = [self._mesh.shape[axis] for axis in left] or [1]
        names = [self._mesh.names[axis] for axis in left] or None
        return {at: _core.Mesh(shape, names, those) for at, those in ranks.items()}


def _moved(placement: _Placement, dim: int) -> _Placement:
    """The same sharding of another dim."""
    if isinstance(placement, _core.Shard):
        return _core.Shard(dim)
    if isinstance(placement, _core.StridedShard):
        return _core.StridedShard(dim, placement.split_factor)
    if isinstance(placement, _core.RaggedShard):
        return _core.RaggedShard(dim, placement.bounds)
    return placement
