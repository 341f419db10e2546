"""Derives the global shape of a tensor from the local shapes of all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from .. import _core
from .._errors import InvalidArgumentError, MismatchError

Shape = tuple[int, ...]


def global_shape(name: str, layout: _core.Layout, shapes: Mapping[int, Shape]) -> Shape:
    """The one shape of which `layout` gives every rank of its mesh the local shape that `shapes` says.

    Raises MismatchError, with every rank's shape, where there is none; InvalidArgumentError for a layout that fits no
    tensor of that many dims.
    """
    missing = [rank for rank in layout.mesh.ranks if rank not in shapes]
    if missing:
        raise MismatchError(f"tensor {name}: {_ranks(missing)} of its mesh ({layout}) did not register it")
    local = {rank: shapes[rank] for rank in layout.mesh.ranks}
    ndims = {len(shape) for shape in local.values()}
    if len(ndims) != 1:
        raise MismatchError(f"tensor {name}: its ranks hold tensors of {sorted(ndims)} dims: {_listed(local)}")
    (ndim,) = ndims
    found = tuple(_size(layout, local, dim, ndim) for dim in range(ndim))
    try:
        expected = {rank: layout.local_shape(found, rank) for rank in local}
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"tensor {name}: {error}") from None
    if expected != local:
        raise MismatchError(
            f"tensor {name}: no tensor is split by {layout} so that its ranks hold {_listed(local)}; one of shape "
            f"{found} would be held as {_listed(expected)}"
        )
    return found


def _size(layout: _core.Layout, local: Mapping[int, Shape], dim: int, ndim: int) -> int:
    """The size of one dim: from the sizes along the axes that shard it, at the first coordinate of all other axes."""
    others = [
        axis
        for axis, placement in enumerate(layout.placements)
        if getattr(placement, "dim", None) not in (dim, dim - ndim)
    ]
    total = 0
    for rank, shape in local.items():
        coordinate = layout.mesh.coordinate(rank)
        if coordinate is not None and not any(coordinate[axis] for axis in others):
            total += shape[dim]
    return total


def _listed(shapes: Mapping[int, Shape]) -> str:
    return ", ".join(f"rank {rank} {shape}" for rank, shape in sorted(shapes.items()))


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
