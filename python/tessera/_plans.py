"""Planning, and executing a plan in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import _core
from ._arguments import sizes, whole
from ._errors import InvalidArgumentError
from ._tensors.foreign import numpy_dtype, type_name
from ._tensors.layouts import LayoutLike, as_layout
from ._tensors.torch import bytes_of, tensor_of_bytes


def plan(shape: Sequence[int], dtype: Any, src: LayoutLike, dst: LayoutLike) -> _core.Plan:
    """Plans how a tensor gets from one layout into another: which rank sends which elements to whom.

    shape: of the whole tensor. dtype: Tessera's name ('bf16') or a dtype of torch or NumPy. src, dst: layouts with
    one common numbering of ranks: a rank on both sides serves itself.

    Raises InvalidArgumentError if a layout does not fit the shape, or the destination is Partial.
    """
    return _core.plan(sizes("shape", shape), dtype, as_layout(src), as_layout(dst))


def simulate(plan: _core.Plan, arrays: Mapping[int, Any], dtype: Any = None) -> dict[int, Any]:
    """Moves local arrays along a plan, in this process: the reference for every faster executor.

    arrays: the local tensor of every source rank, NumPy arrays or torch tensors, of the plan's dtype. Returns the local
    tensor of every destination rank, of the same library, contiguous, cast to `dtype` if that is given. Partial sources
    are reduced in ascending rank order, in fp32.

    Raises InvalidArgumentError if an array is missing, is not an array, or has another shape, dtype or byte order.
    """
    if not isinstance(plan, _core.Plan) or not isinstance(arrays, Mapping):
        raise InvalidArgumentError(
            f"simulate({type_name(plan)}, {type_name(arrays)}): give a Plan, and {{rank: its local array}}"
        )
    target = plan.dtype if dtype is None else _core.dtype(dtype)
    uses_torch = any(_is_torch(array) for array in arrays.values())
    packed = {rank: _packed(plan, whole("rank", rank), array) for rank, array in arrays.items()}
    unpack = tensor_of_bytes if uses_torch else _numpy_array
    return {
        rank: unpack(data, target, plan.dst.local_shape(plan.shape, rank))
        for rank, data in _core.simulate_bytes(plan, packed, target).items()
    }


def _is_torch(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "torch"


def _packed(plan: _core.Plan, rank: int, array: Any) -> bytes:
    if not _is_torch(array) and not hasattr(array, "__array_interface__"):
        raise InvalidArgumentError(
            f"rank {rank}: a {type_name(array)} is not an array: give NumPy arrays or torch tensors"
        )
    if _core.dtype(array.dtype) != plan.dtype:
        raise InvalidArgumentError(f"rank {rank}: its array is {array.dtype}, the plan moves {plan.dtype}")
    shape = tuple(array.shape)
    if plan.dtype == "f4":
        shape = (*shape[:-1], 2 * shape[-1])
    expected = plan.src.local_shape(plan.shape, rank)
    if shape != expected:
        raise InvalidArgumentError(f"rank {rank}: its array has shape {shape}; {plan.src} gives it {expected}")
    if _is_torch(array):
        return bytes_of(array)
    if not array.dtype.isnative:
        raise InvalidArgumentError(
            f"rank {rank}: its elements are not in this machine's byte order ({array.dtype.str}): "
            "astype(array.dtype.newbyteorder('=')) converts them"
        )
    return bytes(array.tobytes())


def _numpy_array(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    import numpy

    return numpy.frombuffer(bytearray(data), dtype=numpy_dtype(dtype)).reshape(shape)
