"""Tensors of torch: as sources of a batch, over given memory, and as input for the codec.

The only module that imports torch, after its user has. Code that names no type of torch needs no import.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from .. import _core
from .._errors import Error, InvalidArgumentError, UnimplementedError
from .foreign import foreign_dtype, type_name
from .layouts import is_dtensor, readings
from .location import OUTSIDE, Location, element_type, refusal, sound_strides

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

Readings: TypeAlias = tuple[_core.Layout, _core.Layout | None]


def is_torch_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(value: Any) -> TypeGuard[torch.nn.Module]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


# --- the place of a tensor


def plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or what it waits for, if its elements are in host memory; otherwise refuses it and says what it is."""
    import torch

    if type(tensor).__name__ == "AsyncCollectiveTensor" and hasattr(tensor, "wait"):
        tensor = tensor.wait()
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_nested:
            raise refusal(name, "nested tensors cannot be moved: register its values() and offsets()")
    if torch.nn.parameter.is_lazy(tensor):
        raise refusal(name, "it is not initialised yet: run a lazy module once before its parameters are registered")
    _require_known(name, tensor, torch.Tensor, torch.nn.Parameter)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        raise refusal(name, "it is a tensor of a transform (vmap, grad, functionalize): register outside of it")
    if tensor.is_meta:
        raise refusal(name, "it is on the meta device and has no memory: materialise it first (to_empty)")
    if tensor.is_quantized:
        raise refusal(name, "quantised tensors of torch cannot be moved: register int_repr() and the scales")
    if tensor.layout is not torch.strided:
        raise refusal(name, f"{tensor.layout} tensors cannot be moved: register its values, or to_dense()")
    if tensor.device.type != "cpu":
        raise UnimplementedError(
            f"tensor {name}: it is on {tensor.device}; this build moves only host memory: register a copy on the CPU"
        )
    if tensor.is_conj():
        raise refusal(name, "it is a conjugate view, whose memory holds other values: resolve_conj() it")
    if tensor.is_neg():
        raise refusal(name, "it is a negative view, whose memory holds other values: resolve_neg() it")
    return tensor


# Subclasses whose __torch_function__ passes everything on to torch's, so that they are the plain tensors that they
# wrap.
_PLAIN_SUBCLASSES = frozenset({"vllm.model_executor.parameter.BasevLLMParameter"})


def _require_known(name: str, tensor: torch.Tensor, *known: type) -> None:
    """Refuses a subclass that gives its elements a meaning of its own, and may keep them anywhere: its operations go
    through its methods, not those of the `known` types. A subclass that only adds attributes counts as its base."""
    import torch

    kind = type(tensor)
    if kind in known:
        return
    disabled = (torch._C._disabled_torch_function_impl, torch._C._disabled_torch_dispatch_impl)
    for method in ("__torch_function__", "__torch_dispatch__"):
        definer = next(each for each in kind.__mro__ if method in vars(each))
        is_plain = f"{definer.__module__}.{definer.__qualname__}" in _PLAIN_SUBCLASSES
        if not (definer in known or is_plain or getattr(kind, method) in disabled):
            raise refusal(name, f"a {type_name(tensor)} cannot be moved: register what it wraps")


def local_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's plain tensor of a DTensor; any other tensor is returned as it is."""
    if not is_dtensor(tensor):
        return plain(name, tensor)
    import torch
    from torch.distributed.tensor import DTensor

    _require_known(name, tensor, DTensor, torch.Tensor)
    return plain(name, tensor._local_tensor)


def torch_location(name: str, tensor: torch.Tensor, known: Readings | None = None) -> Location:
    """The place of `tensor`. `known` are its readings() if it is a DTensor for which they are known."""
    local = local_tensor(name, tensor)
    shape, strides = tuple(local.shape), tuple(local.stride())
    dtype = element_type(name, local.dtype)
    layout, other_layout, global_shape, rank = None, None, None, None
    if is_dtensor(tensor):
        layout, other_layout = known or named_readings(name, tensor)
        global_shape, rank = tuple(tensor.shape), _rank_in_mesh(tensor)
    if dtype == "f4":  # two elements in a byte along the last dim
        shape, strides, global_shape = _unpacked(name, shape, strides, global_shape, layout)
    storage = local.untyped_storage()
    _require_memory(name, local, storage)
    return Location(
        local.data_ptr() if local.numel() else 0,
        dtype,
        shape,
        sound_strides(name, shape, strides),
        layout,
        global_shape,
        rank,
        other_layout,
        storage,
    )


def _require_memory(name: str, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Refuses a tensor whose storage was resized to less than it needs; FSDP frees storages this way."""
    if not tensor.numel():
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if needed > storage.nbytes():
        raise refusal(
            name, f"its storage has {storage.nbytes()} bytes, and it needs {needed}: it was freed by resizing"
        )


def named_readings(name: str, tensor: DTensor) -> Readings:
    try:
        return readings(tensor)
    except Error as error:
        raise type(error)(f"tensor {name}: {error}") from None


def _rank_in_mesh(tensor: DTensor) -> int:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    return OUTSIDE if coordinate is None else int(mesh.mesh[tuple(coordinate)])


def _unpacked(
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    global_shape: tuple[int, ...] | None,
    layout: _core.Layout | None,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Shape and strides in elements for torch's pairs of 4-bit elements."""
    if not shape or (strides[-1] != 1 and shape[-1] > 1):
        raise refusal(
            name,
            f"4-bit elements lie in pairs along the last dim, which must be dense (shape {shape}, strides {strides}): "
            "register a contiguous() copy",
        )
    shape = (*shape[:-1], 2 * shape[-1])
    strides = (*(2 * stride for stride in strides[:-1]), 1)
    if global_shape is None:
        return shape, strides, None
    pairs = global_shape
    global_shape = (*pairs[:-1], 2 * pairs[-1])
    for rank in layout.mesh.ranks if layout is not None else ():
        assert layout is not None
        halved = layout.local_shape(pairs, rank)
        if layout.local_shape(global_shape, rank) != (*halved[:-1], 2 * halved[-1]):
            raise refusal(
                name,
                f"{layout} cuts its {pairs[-1]} pairs of 4-bit elements unevenly: the last dim must divide evenly",
            )
    return shape, strides, global_shape


# --- sources


def _counters(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors without storage that share the version counters of `tensor`: they are bumped, and its storage may be
    freed."""
    import torch

    if tensor.is_inference():
        return []  # it has none
    # Avoids DTensor's dispatch, which would take milliseconds to work out the placements of a detach().
    as_plain = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python))
    with torch.no_grad(), torch.inference_mode(False), as_plain:
        alias = tensor.detach()
        alias.data = torch.empty(0, dtype=tensor.dtype)
    # Autograd checks the counter of the DTensor if it has saved that, and the local tensor's behind to_local().
    return [alias, *_counters(tensor._local_tensor)] if is_dtensor(tensor) else [alias]


class Locator:
    """Finds the place of the current tensor of one name."""

    __slots__ = ("_known", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: tuple[Any, Readings] | None = None  # the last DTensorSpec, and its readings

    def locate(self, tensor: torch.Tensor) -> Location:
        if not is_dtensor(tensor):
            return torch_location(self._name, tensor)
        if self._known is None or self._known[0] is not tensor._spec:
            self._known = (tensor._spec, named_readings(self._name, tensor))
        return torch_location(self._name, tensor, self._known[1])


class WeakTensor:
    """A tensor whose storage is held weakly: it may be freed or resized between transfers, which is an error at the
    next one."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._name = name
        self._location = torch_location(name, tensor)._replace(memory=None)
        storage = local_tensor(name, tensor).untyped_storage()
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._bytes = storage.nbytes()
        self._data = storage.data_ptr()
        self._counters = _counters(tensor)
        self.current: Callable[[], torch.Tensor | None] = weakref.ref(tensor)

    def locate(self) -> Location:
        import torch

        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise InvalidArgumentError(
                f"tensor {self._name}: its memory was freed; keep the tensor, or register it with hold='strong'"
            )
        if storage.nbytes() != self._bytes:
            raise InvalidArgumentError(
                f"tensor {self._name}: its storage was resized from {self._bytes} to {storage.nbytes()} bytes since it "
                "was registered; register it again"
            )
        moved = storage.data_ptr() - self._data if self._location.address else 0  # share_() moves storages
        return self._location._replace(address=self._location.address + moved, memory=storage)

    def require_writeable(self) -> None:
        pass

    def begin_write(self) -> None:
        pass

    def written(self) -> None:
        bump(self._counters)


def written(tensor: Any) -> None:
    """Bumps the version counters of a tensor that has been written."""
    if not tensor.is_inference():
        bump([tensor, tensor._local_tensor] if is_dtensor(tensor) else tensor)


def bump(tensors: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Tells autograd that they have been written, by their version counters."""
    import torch

    torch.autograd.graph.increment_version(tensors)


# --- tensors over given memory


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for one of Tessera's names."""
    import torch

    found: torch.dtype = getattr(torch, foreign_dtype(name))
    return found


def tensor_in(block: Any, name: str, sizes: tuple[int, ...]) -> torch.Tensor:
    """A tensor of Tessera's dtype and `sizes` in elements, in the memory of `block`, which has DLPack."""
    import torch.utils.dlpack

    sizes = _in_pairs(name, sizes)
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=torch_dtype(name))
    return torch.utils.dlpack.from_dlpack(block).view(torch_dtype(name)).reshape(sizes)


def tensor_of_bytes(data: bytes, name: str, sizes: tuple[int, ...]) -> torch.Tensor:
    """Likewise, over a copy of `data`."""
    import torch

    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(torch_dtype(name)).reshape(_in_pairs(name, sizes))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Its elements, packed."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.numpy().data) if flat.numel() else b""


def new_tensor(sizes: Sequence[int], name: str) -> torch.Tensor:
    """A packed tensor with uninitialised elements."""
    import torch

    return torch.empty(tuple(sizes), dtype=torch_dtype(name), device="cpu")


def tensor_of(values: Sequence[float], sizes: Sequence[int]) -> torch.Tensor:
    """A tensor of f32."""
    import torch

    return torch.tensor(values, dtype=torch.float32, device="cpu").reshape(tuple(sizes))


def _in_pairs(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """For f4, two elements are one of torch's."""
    return (*sizes[:-1], sizes[-1] // 2) if name == "f4" else sizes


def move_storage(storage: torch.UntypedStorage, block: Callable[[int], Any]) -> None:
    """Moves a storage into block(its bytes), in place. REQUIRES: require_movable()."""
    import torch.utils.dlpack

    shared = torch.utils.dlpack.from_dlpack(block(storage.nbytes())).untyped_storage()
    shared.copy_(storage)
    owner: Any = storage
    owner._swap_data_ptr_(shared)


def require_movable(name: str, storage: torch.UntypedStorage) -> None:
    """Refuses a storage that move_storage() cannot move."""
    import torch

    if storage.is_shared() or not storage.resizable():
        raise InvalidArgumentError(
            f"tensor {name}: torch does not own its memory (it came from NumPy, a buffer, a mapped file or "
            "share_memory_()): clone() it first, or make it with tessera.zeros()"
        )
    if not hasattr(storage, "_swap_data_ptr_"):
        raise UnimplementedError(
            f"torch {torch.__version__} cannot move a storage: use torch 2.12 or newer, or make the tensors with "
            "tessera.zeros(); they work in private memory, too"
        )


# --- for a Watch


def exchange_api() -> object | None:
    """DLPack's C exchange API for torch's tensors, if this version of torch has it."""
    import torch

    return getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def is_watchable(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor, or a DTensor of one, and has a version counter."""
    import torch

    local = getattr(tensor, "_local_tensor", tensor)
    return type(local) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_inference()


def storage_getter() -> Callable[[Any], Any]:
    """Returns the function that gives a tensor's storage: torch's own method, which is quicker than a wrapper."""
    import torch

    return torch.Tensor.untyped_storage
