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

_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2",
    "float8_e8m0fnu": "f8_e8m0",
    "float4_e2m1fn_x2": "f4",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "bool",
    "complex64": "c64",
}
_FOREIGN_NAMES = {ours: theirs for theirs, ours in _DTYPES.items()}
_AXIS_NAME = re.compile("[A-Za-z_][A-Za-z0-9_.-]*")
_REDUCE_OPS = ("sum", "avg", "min", "max", "product")


def type_name(value: Any) -> str:
    """What an error calls the type of `value`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def dtype(value: Any) -> str:
    """Tessera's name of a dtype of torch, NumPy or ml_dtypes, or of one that is named as theirs are."""
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES and value is not None and not isinstance(value, str):
        import numpy

        with contextlib.suppress(Exception):  # of whatever object
            name = numpy.dtype(value).name
    if name not in _DTYPES:
        raise InvalidArgumentError(
            f"dtype {value!r} is not one that Tessera moves: {', '.join(_core.dtypes())}; or as torch and NumPy name "
            f"them: {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def foreign_dtype(name: str) -> str:
    """What torch, NumPy and ml_dtypes call one of Tessera's dtypes."""
    return _FOREIGN_NAMES[name]


def numpy_dtype(name: str) -> Any:
    """NumPy's dtype for one of Tessera's names, out of ml_dtypes where NumPy has none."""
    import numpy

    foreign = _FOREIGN_NAMES[name]
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
