"""Local tensors as a batch registers them: where they lie, what may change between transfers, and what is refused.

A batch keeps a `Source` for each name. locate() looks the tensor up as it is now; a transfer holds what it returns, so
that the memory stays while it is read or written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from . import _core
from ._errors import Error, InvalidArgumentError, UnimplementedError
from ._foreign import dtype as dtype_name
from ._foreign import type_name
from ._layouts import as_layout, layout_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Location:
    """Where the local tensor of this rank lies now."""

    address: int
    dtype: str
    shape: tuple[int, ...]  # local
    strides: tuple[int, ...]  # in elements
    layout: _core.Layout | None  # None: this rank holds all of it
    global_shape: tuple[int, ...] | None  # None: it follows from the layout, or is `shape`
    memory: Any = field(compare=False, repr=False, default=None)  # what keeps it there


class Source(Protocol):
    """What is registered under a name."""

    def locate(self) -> Location: ...

    def written(self) -> None:
        """Tells its library that the elements are about to change, or have changed."""


def is_torch_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of some library: torch's, NumPy's, or one with DLPack."""
    return is_torch_tensor(value) or hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__")


def is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


# --- refusals


def _refuse(name: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"tensor {name}: {why}")


def _check_torch(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The plain local tensor of `tensor`, or a refusal that says what it is."""
    import torch

    kind = type(tensor)
    if kind.__name__ == "AsyncCollectiveTensor" and hasattr(tensor, "wait"):
        tensor = tensor.wait()
        kind = type(tensor)
    plain = (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
    if kind.__torch_dispatch__ not in plain:  # it may keep its elements anywhere
        raise _refuse(name, f"a {type_name(tensor)} cannot be moved: register what it wraps")
    if tensor.is_meta:
        raise _refuse(name, "it is on the meta device and has no memory: materialise it first (to_empty)")
    if tensor.layout is not torch.strided:
        raise _refuse(name, f"{tensor.layout} tensors cannot be moved: register its values, or to_dense()")
    if tensor.device.type != "cpu":
        raise UnimplementedError(f"tensor {name}: it is on {tensor.device}; this build moves host memory alone")
    if tensor.is_quantized:
        raise _refuse(name, "quantised tensors of torch cannot be moved: register int_repr() and the scales")
    if tensor.is_conj():
        raise _refuse(name, "it is a conjugate view, whose memory holds other values: resolve_conj() it")
    if tensor.is_neg():
        raise _refuse(name, "it is a negative view, whose memory holds other values: resolve_neg() it")
    return tensor


def _check_overlap(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if 0 in shape:
        return  # whatever its strides are: NumPy's may be 0 then
    extent = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride == 0:
            raise _refuse(name, f"it is expanded (shape {shape}, strides {strides}): one element stands for several")
        if stride < extent:
            raise _refuse(name, f"its elements overlap in memory (shape {shape}, strides {strides})")
        extent += stride * (size - 1)


# --- torch


def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, _core.Layout | None, tuple[int, ...] | None]:
    """(the local tensor, layout, global shape) of a DTensor or a plain tensor."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return _check_torch(name, tensor), None, None
    try:
        layout = layout_of(tensor)
    except Error as error:
        raise type(error)(f"tensor {name}: {error}") from None
    return _check_torch(name, tensor._local_tensor), layout, tuple(tensor.shape)


def _torch_location(name: str, tensor: torch.Tensor) -> Location:
    local, layout, global_shape = _local(name, tensor)
    shape, strides = tuple(local.shape), tuple(local.stride())
    dtype = dtype_name(local.dtype)
    if dtype == "f4":  # two elements a byte along the last dim
        shape, strides, global_shape, layout = _unpacked(name, shape, strides, global_shape, layout)
    _check_overlap(name, shape, strides)
    address = local.data_ptr() if local.numel() else 0
    return Location(address, dtype, shape, strides, layout, global_shape, local.untyped_storage())


def _unpacked(
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    global_shape: tuple[int, ...] | None,
    layout: _core.Layout | None,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, _core.Layout | None]:
    """Of torch's pairs of 4-bit elements: the same in elements."""
    if not shape or strides[-1] != 1:
        raise _refuse(name, f"4-bit elements lie in pairs along the last dim, which must be dense (strides {strides})")
    shape = (*shape[:-1], 2 * shape[-1])
    strides = (*(2 * stride for stride in strides[:-1]), 1)
    if global_shape is None:
        return shape, strides, None, layout
    pairs = global_shape
    global_shape = (*global_shape[:-1], 2 * global_shape[-1])
    if layout is not None:
        for rank in layout.mesh.ranks:
            halved = layout.local_shape(pairs, rank)
            if layout.local_shape(global_shape, rank) != (*halved[:-1], 2 * halved[-1]):
                raise _refuse(
                    name,
                    f"{layout} cuts its {pairs[-1]} pairs of 4-bit elements unevenly: the last dim must divide evenly",
                )
    return shape, strides, global_shape, layout


def _version_counter(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor without storage that has `tensor`'s version counter: to be bumped, while the storage may go."""
    import torch

    if tensor.is_inference():
        return None  # it has none
    with torch.no_grad():
        counter = tensor.detach()
        counter.data = torch.empty(0, dtype=tensor.dtype)
    return counter


class TorchTensor:
    """A tensor out of a dict. Its storage is held weakly: it may be freed or resized between transfers, which is an
    error at the next one. (That the dict's owner has put another tensor in its place cannot be seen from here.)"""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._name = name
        self._location = replace(_torch_location(name, tensor), memory=None)
        local, _, _ = _local(name, tensor)
        storage = local.untyped_storage()
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._bytes = storage.nbytes()
        self._data = storage.data_ptr()
        self._counter = _version_counter(local)

    def locate(self) -> Location:
        import torch

        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise InvalidArgumentError(
                f"tensor {self._name}: its memory was freed; keep the tensor, or register the module that owns it"
            )
        if storage.nbytes() != self._bytes:
            raise InvalidArgumentError(
                f"tensor {self._name}: its storage was resized from {self._bytes} to {storage.nbytes()} bytes since it "
                "was registered; register it again"
            )
        moved = storage.data_ptr() - self._data if self._location.address else 0  # share_() moves storages
        return replace(self._location, address=self._location.address + moved, memory=storage)

    def written(self) -> None:
        import torch

        if self._counter is not None:
            torch.autograd.graph.increment_version(self._counter)


class ModuleTensor:
    """A parameter or buffer of a module, looked up again each time: it may have been replaced."""

    def __init__(self, name: str, module: torch.nn.Module, attribute: str, *, buffer: bool) -> None:
        self._name = name
        self._tensors = module._buffers if buffer else module._parameters
        self._attribute = attribute
        self._sharded = _is_distributed(self._current())

    def _current(self) -> torch.Tensor:
        tensor = self._tensors.get(self._attribute)
        if tensor is None:
            raise InvalidArgumentError(f"tensor {self._name}: the module has no {self._attribute} any more")
        return tensor

    def locate(self) -> Location:
        tensor = self._current()
        if self._sharded and not _is_distributed(tensor):
            raise InvalidArgumentError(
                f"tensor {self._name}: it was registered sharded and is gathered now: call reshard() on the FSDP "
                "module first, or send after the optimiser's step"
            )
        return _torch_location(self._name, tensor)

    def written(self) -> None:
        import torch

        tensor: Any = self._current()
        torch.autograd.graph.increment_version(tensor._local_tensor if _is_distributed(tensor) else tensor)


def _is_distributed(tensor: Any) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


# --- NumPy, and others with DLPack


class Array:
    """An array of NumPy, or of any library with DLPack; held as long as the batch is."""

    def __init__(self, name: str, array: Any) -> None:
        import numpy

        if not isinstance(array, numpy.ndarray):
            try:
                array = numpy.from_dlpack(array)
            except (BufferError, RuntimeError, TypeError) as error:
                raise _refuse(
                    name, f"a {type(array).__module__}.{type(array).__name__} cannot be read: {error}"
                ) from None
        self._name = name
        self._array = array

    def locate(self) -> Location:
        array = self._array
        dtype = dtype_name(array.dtype)
        size = array.itemsize
        if any(stride % size for stride in array.strides):
            raise _refuse(self._name, f"its strides {array.strides} are not whole elements of {size} bytes")
        if not array.dtype.isnative:
            raise _refuse(self._name, f"its elements are not in this machine's byte order ({array.dtype.str})")
        shape, strides = tuple(array.shape), tuple(stride // size for stride in array.strides)
        if any(stride < 0 for stride in strides):
            raise _refuse(self._name, f"it runs backwards in memory (strides {strides}): copy it")
        _check_overlap(self._name, shape, strides)
        address = array.__array_interface__["data"][0] if array.size else 0
        return Location(address, dtype, shape, strides, None, None, array)

    @property
    def writeable(self) -> bool:
        return bool(self._array.flags.writeable)

    def written(self) -> None:
        if not self._array.flags.writeable:
            raise _refuse(self._name, "the array is read-only and cannot be received into")


# --- what a user registers

# Modules that torch.compile and activation checkpointing put around others: no part of a parameter's name.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class WithLayout:
    """A local tensor whose layout is said beside it."""

    def __init__(self, name: str, source: Source, layout: _core.Layout, shape: tuple[int, ...] | None = None) -> None:
        self._name = name
        self._source = source
        self._layout = layout
        self._shape = shape

    def locate(self) -> Location:
        found = self._source.locate()
        if found.layout is not None:
            raise _refuse(self._name, f"it is a DTensor with a layout of its own, {found.layout}: give it alone")
        return replace(found, layout=self._layout, global_shape=self._shape)

    def written(self) -> None:
        self._source.written()


def source_of(name: str, value: Any) -> Source:
    """The Source of a tensor, or of (tensor, layout) or (tensor, layout, global shape)."""
    if isinstance(value, tuple) and len(value) in (2, 3) and is_tensor(value[0]):
        shape = tuple(value[2]) if len(value) == 3 else None
        return WithLayout(name, source_of(name, value[0]), as_layout(value[1]), shape)
    if is_torch_tensor(value):
        return TorchTensor(name, value)
    if is_tensor(value):
        return Array(name, value)
    raise _refuse(name, f"a {type_name(value)} is not a tensor")


def walk(tensors: Any, skipped: list[str], keep: Callable[[str], bool]) -> Iterator[tuple[str, Source, Any]]:
    """(name, source, tensor) of everything to be kept of a module, or of a dict of tensors, nested ones with dotted
    names. Names of what is no tensor are appended to `skipped`."""
    if is_module(tensors):
        yield from _walk_module(tensors, keep)
    elif isinstance(tensors, Mapping):
        yield from _walk_values(tensors, "", skipped, keep)
    else:
        raise InvalidArgumentError(
            f"a {type_name(tensors)} cannot be registered: give a torch module or {{name: tensor or (array, layout)}}"
        )


def _walk_values(
    values: Mapping[str, Any], prefix: str, skipped: list[str], keep: Callable[[str], bool]
) -> Iterator[tuple[str, Source, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _walk_values(value, f"{name}.", skipped, keep)
        elif isinstance(value, list) and any(is_tensor(each) for each in value):
            yield from _walk_values({str(i): each for i, each in enumerate(value)}, f"{name}.", skipped, keep)
        elif not is_tensor(value) and not (isinstance(value, tuple) and value and is_tensor(value[0])):
            skipped.append(name)
        elif keep(name):
            yield name, source_of(name, value), value[0] if isinstance(value, tuple) else value


def _walk_module(model: torch.nn.Module, keep: Callable[[str], bool]) -> Iterator[tuple[str, Source, Any]]:
    """The names of model.state_dict(): parameters and persistent buffers; tied ones under each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = "".join(f"{part}." for part in prefix.split(".") if part and part not in _WRAPPERS)
        buffers = {
            name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        for is_buffer, tensors in ((False, module._parameters), (True, buffers)):
            for attribute, tensor in tensors.items():
                if tensor is not None and keep(name := f"{dot}{attribute}"):
                    yield name, ModuleTensor(name, module, attribute, buffer=is_buffer), tensor
