"""Layouts from text, (mesh, placements) or torch's DTensor."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from .. import _core
from .._errors import InvalidArgumentError
from .foreign import device_mesh, placement, type_name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Any form of a layout: a Layout, its text form, or (mesh, placements), Tessera's or torch's.
LayoutLike: TypeAlias = _core.Layout | str | tuple[Any, Iterable[Any]]


def as_layout(value: LayoutLike) -> _core.Layout:
    """The Layout that `value` stands for. Raises InvalidArgumentError."""
    if isinstance(value, _core.Layout):
        return value
    if isinstance(value, str):
        return _core.Layout(value)
    if isinstance(value, tuple) and len(value) == 2:
        return _core.Layout(value[0], value[1])
    raise InvalidArgumentError(
        f"layout {value!r}: give a tessera.Layout, its text ('dp=2,tp=4:R,S1') or (mesh, placements)"
    )


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(value, distributed.DTensor)


def layout_of(tensor: DTensor) -> _core.Layout:
    """The layout that a DTensor really has, over the ranks of its DeviceMesh.

    If torch shards one dim by several mesh axes in another order than left to right (`shard_order`), the layout has
    the axes in that order. A `_StridedShard` may stand for such an order or for itself. If the two give any rank other
    rows, the order counts if it gives the local shape of this rank: it is how FSDP2 cuts, and how torch's
    redistribute() reads. (A batch asks all ranks.)

    Raises InvalidArgumentError if it is not a DTensor, or has a placement that Tessera does not know.
    """
    return readings(tensor)[0]


def readings(tensor: DTensor) -> tuple[_core.Layout, _core.Layout | None]:
    """layout_of() it, and the layout that it has instead if another rank's local shape does not fit the first."""
    if not is_dtensor(tensor):
        raise InvalidArgumentError(f"a {type_name(tensor)} has no layout of its own: layout_of() takes a DTensor")
    mesh = device_mesh(tensor.device_mesh)
    placements = [placement(each) for each in tensor.placements]
    spec = tensor._spec
    if not any(isinstance(each, _core.StridedShard) for each in placements):
        return _in_order(mesh, placements, _said_order(spec, mesh.ndim)), None
    as_placed = _core.Layout(mesh, placements)
    # torch 2.11 and later tells whether a _StridedShard stands for an order of axes; before, it always did.
    if getattr(spec, "use_strided_shard_as_shard_order", True):
        order = _strided_order(mesh, placements)
        if order is not None and not _cut_alike(mesh, placements, order, tuple(tensor.shape)):
            # The placements describe one cut, the order that they stand for another. FSDP2 over TP makes the second
            # kind and redistribute() reads it; distribute_tensor() makes the first. The local shapes tell them apart.
            plain = [_core.Shard(each.dim) if isinstance(each, _core.StridedShard) else each for each in placements]
            nested = _in_order(mesh, plain, order)
            if _fits(nested, tensor):
                return nested, as_placed
    return as_placed, None


def _in_order(mesh: _core.Mesh, placements: Sequence[Any], order: Sequence[int]) -> _core.Layout:
    """The same placements with the mesh's axes in another order."""
    if list(order) == list(range(mesh.ndim)):
        return _core.Layout(mesh, placements)
    strides = [math.prod(mesh.shape[axis + 1 :]) for axis in range(mesh.ndim)]
    positions = [0]
    for axis in order:
        positions = [at + step * strides[axis] for at in positions for step in range(mesh.shape[axis])]
    permuted = _core.Mesh(
        [mesh.shape[axis] for axis in order],
        [mesh.names[axis] for axis in order],
        [mesh.ranks[position] for position in positions],
    )
    return _core.Layout(permuted, [placements[axis] for axis in order])


def _said_order(spec: Any, ndim: int) -> list[int]:
    """The mesh axes, ordered so that the axes that shard one dim do so from left to right."""
    order = list(range(ndim))
    for entry in getattr(spec, "shard_order", None) or ():  # torch 2.11 and later
        _place(order, entry.mesh_dims)
    return order


def _strided_order(mesh: _core.Mesh, placements: Sequence[Any]) -> list[int] | None:
    """The order of axes that _StridedShards stand for: `split_factor` is the product of the axes to the right that come
    before. None if they do not stand for any."""
    order = list(range(mesh.ndim))
    for dim in {each.dim for each in placements if hasattr(each, "dim")}:
        axes: list[int] = []  # in the order in which they cut the dim
        for axis in reversed(range(mesh.ndim)):
            if getattr(placements[axis], "dim", None) != dim:
                continue
            factor = getattr(placements[axis], "split_factor", 1)
            products = [math.prod(mesh.shape[before] for before in axes[:count]) for count in range(len(axes) + 1)]
            if factor not in products:
                return None
            axes.insert(products.index(factor), axis)
        _place(order, axes)
    return order


def _place(order: list[int], axes: Sequence[int]) -> None:
    """Moves `axes`, in that order, to the positions that they have in `order` now."""
    for place, axis in zip(sorted(axes), axes, strict=True):
        order[place] = axis


def _cut_alike(mesh: _core.Mesh, placements: Sequence[Any], order: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether strided placements cut a tensor of that shape as the order of axes does that they stand for."""
    for dim in {each.dim for each in placements if isinstance(each, _core.StridedShard)}:
        axes = [axis for axis in range(mesh.ndim) if getattr(placements[axis], "dim", None) == dim]
        sizes = tuple(mesh.shape[axis] for axis in axes)
        if shape[dim] % math.prod(sizes) == 0:
            continue
        factors = tuple(getattr(placements[axis], "split_factor", 1) for axis in axes)
        rank_order = tuple(sorted(range(len(axes)), key=lambda place: order.index(axes[place])))
        if not _cut_alike_along(shape[dim], sizes, factors, rank_order):
            return False
    return True


@lru_cache(maxsize=4096)
def _cut_alike_along(size: int, sizes: tuple[int, ...], factors: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """The same for one dim and the axes that shard it."""
    mesh = _core.Mesh(list(sizes))
    strided = _core.Layout(mesh, [_core.StridedShard(0, factor) for factor in factors])
    nested = _in_order(mesh, [_core.Shard(0)] * len(sizes), order)
    # Equal local shapes would not do: pieces of 9 rows in another order have the same sizes.
    return all(strided.owned([size], rank) == nested.owned([size], rank) for rank in mesh.ranks)


def _fits(layout: _core.Layout, tensor: DTensor) -> bool:
    """Whether it gives this rank its actual local shape."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return True  # it holds nothing, and agrees with FSDP2's ranks
    rank = int(tensor.device_mesh.mesh[tuple(coordinate)])
    return layout.local_shape(tuple(tensor.shape), rank) == tuple(tensor._local_tensor.shape)
