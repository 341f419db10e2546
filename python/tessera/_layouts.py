"""Layouts out of whatever says one: text, (mesh, placements), torch's DTensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from . import _core
from ._errors import InvalidArgumentError
from ._foreign import device_mesh, placement

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# What a layout may be given as: a Layout, its text form, or (mesh, placements), Tessera's or torch's.
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


def layout_of(tensor: DTensor) -> _core.Layout:
    """The layout that a DTensor really has."""
    spec = tensor._spec
    mesh = device_mesh(tensor.device_mesh)
    placements = [placement(each) for each in tensor.placements]
    order = _axis_order(spec, mesh.ndim)
    if order == list(range(mesh.ndim)):
        return _core.Layout(mesh, placements)
    # torch may shard one dim by its axes in another order than left to right: the same axes in that order do so too.
    ranks = tensor.device_mesh.mesh.permute(order).flatten().tolist()
    axes = [mesh.shape[axis] for axis in order]
    names = [mesh.names[axis] for axis in order]
    return _core.Layout(_core.Mesh(axes, names, ranks), [placements[axis] for axis in order])


def _axis_order(spec: Any, ndim: int) -> list[int]:
    """The mesh axes in an order in which those that shard one dim do so from left to right."""
    # torch 2.11 and later; before, and where a _StridedShard says it, the placements say everything.
    shard_order = getattr(spec, "shard_order", None) or ()
    if getattr(spec, "use_strided_shard_as_shard_order", False):
        shard_order = ()
    order = list(range(ndim))
    for entry in shard_order:
        places = sorted(entry.mesh_dims)
        for place, axis in zip(places, entry.mesh_dims, strict=True):
            order[place] = axis
    return order
