"""Tensors of NumPy and torch as input for the codec: matrices, or stacks of them, in host memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import _core
from .._errors import Error, UnimplementedError
from .foreign import numpy_dtype, type_name
from .layouts import is_dtensor
from .location import refusal
from .torch import is_torch_tensor, new_tensor, plain, tensor_of

if TYPE_CHECKING:
    import torch

_FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Stack:
    """A tensor [..., M, K]."""

    matrices: _core.MatrixStack
    shape: tuple[int, ...]
    of_torch: bool


def stack_of(name: str, tensor: Any, *, any_dims: bool = False) -> Stack:
    """The memory of `tensor`; a copy of it if its rows are not dense, or overlap. Refuses, by name, what the codec
    cannot read. A tensor of fewer than two dims counts as one row if `any_dims`."""
    of_torch = is_torch_tensor(tensor)
    if of_torch:
        view = _plain_torch(name, tensor)
    elif _is_numpy(tensor):
        view = _plain_numpy(name, tensor)
    else:
        raise refusal(name, f"a {type_name(tensor)}: give a NumPy array or a tensor of torch's")
    dtype = _float(name, view.dtype)
    shape = tuple(view.shape)
    if len(shape) < 2 and not any_dims:
        raise refusal(name, f"its shape is {shape}: give a matrix, or a stack of them (..., rows, columns)")
    if len(shape) < 2:
        view = view.reshape(1, -1)
    strides = _strides(view)
    if strides is None or not _dense_rows(view.shape, strides):
        view = _packed(view)
        strides = _strides(view) or ()
    matrices = _core.MatrixStack(address_of(view), dtype, list(view.shape), list(strides), view)
    return Stack(matrices, shape, of_torch)


def _plain_torch(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if is_dtensor(tensor):
        raise refusal(name, "a DTensor: its shards share an amax; give its to_local(), and amax= of the whole tensor's")
    if tensor.device.type not in ("cpu", "meta"):
        raise UnimplementedError(
            f"tensor {name}: it is on {tensor.device}; this build computes on the CPU: give x.cpu()"
        )
    return plain(name, tensor).detach()


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _plain_numpy(name: str, array: Any) -> Any:
    import numpy

    if isinstance(array, numpy.ma.MaskedArray):
        raise refusal(name, "a masked array: its mask would be lost; give its .data")
    array = numpy.asarray(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _float(name: str, dtype: Any) -> str:
    try:
        known = _core.dtype(dtype)
    except Error:
        known = ""
    if known not in _FLOATS:
        raise refusal(name, f"its dtype is {dtype}: cast it to float32, float16 or bfloat16")
    return known


def _strides(view: Any) -> tuple[int, ...] | None:
    """In elements; None if some stride is not a whole number of them."""
    if is_torch_tensor(view):
        return tuple(view.stride())
    size = view.itemsize
    if any(stride % size for stride in view.strides):
        return None
    return tuple(stride // size for stride in view.strides)


def _dense_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    rows, columns = shape[-2:]
    return (columns <= 1 or strides[-1] == 1) and (rows <= 1 or strides[-2] >= columns)


def _packed(view: Any) -> Any:
    if is_torch_tensor(view):
        return view.contiguous()
    import numpy

    return numpy.ascontiguousarray(view)


# --- output of the codec


def new_array(of_torch: bool, shape: Sequence[int], dtype: str) -> Any:
    """A packed array with uninitialised elements; `dtype` is Tessera's name."""
    if of_torch:
        return new_tensor(shape, dtype)
    import numpy

    return numpy.empty(tuple(shape), dtype=numpy_dtype(dtype))


def array_of(of_torch: bool, values: Sequence[float], shape: Sequence[int]) -> Any:
    """An array of f32."""
    if of_torch:
        return tensor_of(values, shape)
    import numpy

    return numpy.array(values, dtype=numpy.float32).reshape(tuple(shape))


def address_of(array: Any) -> int:
    if is_torch_tensor(array):
        return array.data_ptr()
    return int(array.ctypes.data)
