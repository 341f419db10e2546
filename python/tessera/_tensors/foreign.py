"""What other libraries call a mesh, a placement and an element type, in Tessera's words.

No library is imported here: its objects bring it along. The core calls mesh(), placement() and dtype() for whatever is
not its own.
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
    """What an error calls the type of `value`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def dtype(value: Any) -> str:
    """Tessera's name of a dtype of torch, NumPy or ml_dtypes; the core itself reads strings: here one is unknown."""
    if not isinstance(value, str):
        with contextlib.suppress(Exception):  # of whatever object
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
    """What torch, NumPy and ml_dtypes call one of Tessera's dtypes."""
    return _core.torch_name(name)


def numpy_dtype(name: str) -> Any:
    """NumPy's dtype for one of Tessera's names, out of ml_dtypes where NumPy has none."""
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
    """torch's DeviceMesh; its ranks are those of the job, as torch numbers them."""
    if is_device_mesh(value):
        return device_mesh(value)
    raise InvalidArgumentError(f"mesh {value!r}: give a tessera.Mesh or torch's DeviceMesh, not {type_name(value)}")


def is_device_mesh(value: Any) -> bool:
    torch_module = sys.modules.get("torch.distributed.device_mesh")
    return torch_module is not None and isinstance(value, torch_module.DeviceMesh)


def device_mesh(value: DeviceMesh) -> _core.Mesh:
    """The same axes and ranks. Names come along where the text form of a layout can have them."""
    ranks = value.mesh
    names = [name if _AXIS_NAME.fullmatch(name) else "" for name in value.mesh_dim_names or [""] * ranks.ndim]
    return _core.Mesh(list(ranks.shape), names, ranks.flatten().tolist())


def placement(value: Any) -> Any:
    """A placement of torch as Tessera's."""
    kinds = sys.modules.get("torch.distributed.tensor.placement_types")
    if kinds is not None:
        # Exactly these types: what derives from them (_MaskPartial, say) means something else.
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
