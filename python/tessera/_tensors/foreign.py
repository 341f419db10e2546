"""Translates meshes, placements and element types of other libraries to Tessera's.

It imports no library: whoever passes an object has imported it. The core calls mesh(), placement() and dtype() for
objects that are not its own.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Any

from .. import _core
from .._errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_AXIS_NAME = re.compile("[A-Za-z_][A-Za-z0-9_.-]*")
_REDUCE_OPS = ("sum", "avg", "min", "max", "product")


def type_name(value: Any) -> str:
    """The name of the type of `value` in errors."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def dtype(value: Any) -> str:
    """Tessera's name for a dtype of torch, NumPy or ml_dtypes. The core itself reads strings: one that comes here is
    unknown."""
    if not isinstance(value, str):
        with contextlib.suppress(Exception):  # for any object
            return _core.dtype(str(value))
        with contextlib.suppress(Exception):
            if value is not None:
                import numpy

                return _core.dtype(numpy.dtype(value).name)
    ours = _core.dtypes()
    raise InvalidArgumentError(
        f"dtype {value!r} is not one that Tessera moves: {', '.join(ours)}; or as torch and NumPy name them: "
        f"{', '.join(foreign_dtype(name) for name in ours)}"
    )


def foreign_dtype(name: str) -> str:
    """The name that torch, NumPy and ml_dtypes use for one of Tessera's dtypes."""
    return _core.torch_name(name)


def numpy_dtype(name: str) -> Any:
    """NumPy's dtype for one of Tessera's names, from ml_dtypes if NumPy has none."""
    import numpy

    foreign = foreign_dtype(name)
    if hasattr(numpy, foreign):
        return numpy.dtype(getattr(numpy, foreign))
    try:
        import ml_dtypes
    except ImportError:
        raise InvalidArgumentError(f"NumPy has no {foreign}: `pip install ml_dtypes` brings it") from None
    if not hasattr(ml_dtypes, foreign):
        raise InvalidArgumentError(f"neither NumPy nor ml_dtypes has {foreign}; use a torch tensor")
    return numpy.dtype(getattr(ml_dtypes, foreign))


def mesh(value: Any) -> _core.Mesh:
    """A mesh for torch's DeviceMesh, over the ranks of the job in torch's numbering."""
    if is_device_mesh(value):
        return device_mesh(value)
    raise InvalidArgumentError(f"mesh {value!r}: give a tessera.Mesh or torch's DeviceMesh, not {type_name(value)}")


def is_device_mesh(value: Any) -> bool:
    torch_module = sys.modules.get("torch.distributed.device_mesh")
    return torch_module is not None and isinstance(value, torch_module.DeviceMesh)


def device_mesh(value: DeviceMesh) -> _core.Mesh:
    """A DeviceMesh with the same axes and ranks, and with those names that the text form of a layout can have."""
    ranks = value.mesh
    names = [name if _AXIS_NAME.fullmatch(name) else "" for name in value.mesh_dim_names or [""] * ranks.ndim]
    return _core.Mesh(list(ranks.shape), names, ranks.flatten().tolist())


def placement(value: Any) -> Any:
    """Tessera's placement for one of torch."""
    kinds = sys.modules.get("torch.distributed.tensor.placement_types")
    if kinds is not None:
        # Exactly these types: a derived one (such as _MaskPartial) means something else.
        kind = type(value)
        if kind is kinds.Replicate:
            return _core.Replicate()
        if kind is kinds.Shard:
            return _core.Shard(value.dim)
        if kind is getattr(kinds, "_StridedShard", None):
            return _core.StridedShard(value.dim, value.split_factor)
        if kind is kinds.Partial and value.reduce_op in _REDUCE_OPS:
            return _core.Partial(value.reduce_op)
    known = "Replicate, Shard, StridedShard (torch: _StridedShard), RaggedShard and Partial of " + ", ".join(
        _REDUCE_OPS
    )
    raise InvalidArgumentError(f"placement {value!r} ({type_name(value)}) is not one that Tessera knows: {known}")
