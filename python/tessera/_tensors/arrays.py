"""Arrays of NumPy, and of any library with DLPack, as sources of a batch."""

from __future__ import annotations

import sys
from typing import Any

from .._errors import UnimplementedError
from .foreign import type_name
from .location import Location, element_type, refusal, sound_strides

_HOST = 1  # kDLCPU of DLPack


def is_array(value: Any) -> bool:
    """Whether it is an array of NumPy or has DLPack. (NumPy's scalars are numbers.)"""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    return hasattr(value, "__dlpack__") and not isinstance(value, type)


class Array:
    """One array, kept alive as long as the batch."""

    current = None

    def __init__(self, name: str, array: Any) -> None:
        import numpy

        if isinstance(array, numpy.ma.MaskedArray):
            raise refusal(name, "a masked array cannot be moved: its mask would be lost; register its .data")
        self._name = name
        self._exported_by = "" if isinstance(array, numpy.ndarray) else type_name(array)
        self._array = _from_dlpack(name, array) if self._exported_by else array

    def locate(self) -> Location:
        name, array = self._name, self._array
        if array.dtype.fields is not None:
            fields = ", ".join(array.dtype.fields)
            raise refusal(name, f"its elements are records: register its fields ({fields}), each under a name")
        if not array.dtype.isnative:
            raise refusal(
                name,
                f"its elements are not in this machine's byte order ({array.dtype.str}): register "
                "array.astype(array.dtype.newbyteorder('='))",
            )
        dtype = element_type(name, array.dtype)
        address = array.__array_interface__["data"][0] if array.size else 0
        return Location(address, dtype, array.shape, self._strides(), None, None, memory=array)

    def _strides(self) -> tuple[int, ...]:
        """In elements."""
        name, array = self._name, self._array
        size, shape = array.itemsize, array.shape
        strides = tuple(stride // size for stride in array.strides)
        if array.flags.c_contiguous and 0 not in shape and 1 not in shape:  # most are, and there may be many
            return strides
        if array.size and any(stride % size for stride, extent in zip(array.strides, shape, strict=True) if extent > 1):
            raise refusal(name, f"its strides {array.strides} are not whole elements of {size} bytes: copy it")
        return sound_strides(name, shape, strides)

    def require_writeable(self) -> None:
        if not self._array.flags.writeable:
            why = (
                f" (a {self._exported_by} exported it so, as all do that speak a DLPack before 1.0)"
                if self._exported_by
                else ""
            )
            raise refusal(
                self._name, f"the array is read-only and cannot be received into{why}: register one that can be written"
            )

    def begin_write(self) -> None:
        pass

    def written(self) -> None:
        self.require_writeable()


def _from_dlpack(name: str, exporter: Any) -> Any:
    """A NumPy array over the same memory."""
    import numpy

    what = type_name(exporter)
    try:
        device, number = exporter.__dlpack_device__()
    except Exception as error:
        raise refusal(name, f"a {what} does not say on which device it is (__dlpack_device__): {error}") from None
    if device != _HOST:
        raise UnimplementedError(
            f"tensor {name}: a {what} is on device {number} of DLPack's type {int(device)}; this build moves only "
            "host memory: register a copy in host memory"
        )
    try:
        return numpy.from_dlpack(exporter)
    except Exception as error:
        raise refusal(
            name, f"NumPy cannot read what a {what} exports by DLPack: {error}; register a NumPy array of its memory"
        ) from None
