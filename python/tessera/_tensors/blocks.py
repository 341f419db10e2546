"""Blocks of Tessera's shared memory, and arrays in them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from .. import _core
from .._errors import ResourceExhaustedError
from .foreign import numpy_dtype
from .stacks import address_of
from .torch import is_torch_tensor, tensor_in, torch_dtype


class Block:
    """Zeroed shared memory with arrays in it: torch's if torch is imported, otherwise NumPy's."""

    def __init__(self, size: int) -> None:
        """`size` is in bytes. Raises ResourceExhaustedError."""
        as_array = tensor_in if "torch" in sys.modules else as_numpy
        self._bytes = as_array(shared_bytes(size), "u8", (size,))
        self.address: int = 0 if size == 0 else address_of(self._bytes)

    def array(self, offset: int, shape: Sequence[int], dtype: str) -> Any:
        """An array of Tessera's `dtype` at `offset`, which is a multiple of its size."""
        size = math.prod(shape) * _core.bits_of(dtype) // 8
        of_torch = is_torch_tensor(self._bytes)
        return (
            self._bytes[offset : offset + size].view((torch_dtype if of_torch else numpy_dtype)(dtype)).reshape(shape)
        )


def shared_bytes(size: int) -> Any:
    """A block of that many bytes. Raises ResourceExhaustedError."""
    if size >= 1 << 62:
        raise ResourceExhaustedError(f"{size} bytes of shared memory are wanted: no machine has them")
    return _core.shared_bytes(size)


def as_numpy(block: Any, name: str, sizes: tuple[int, ...]) -> Any:
    import numpy

    if math.prod(sizes) == 0:
        return numpy.empty(sizes, dtype=numpy_dtype(name))
    return numpy.from_dlpack(block).view(numpy_dtype(name)).reshape(sizes)
