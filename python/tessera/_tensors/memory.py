"""Memory that the other job reads in place: creates tensors in it, and moves storages into it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .. import _core
from .._arguments import sizes as sizes_of
from .._errors import InvalidArgumentError
from .blocks import as_numpy, shared_bytes
from .dicts import leaves
from .foreign import type_name
from .location import brings_source
from .modules import fsdp_parameters, refuse_script
from .torch import is_module, is_torch_tensor, local_tensor, move_storage, require_movable, tensor_in

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def zeros(shape: int | Sequence[int], dtype: Any = None) -> Any:
    """A tensor of zeros in Tessera's shared memory, which the other job, or an agent daemon, reads and writes in place.

    Args:
        shape: Its sizes in elements. Two elements of f4 share a byte, so their last size must be even.
        dtype: A torch dtype gives a torch tensor, a NumPy dtype an array. One of Tessera's names, or None (f32), gives
            a torch tensor if torch is imported, else an array.

    Raises:
        ResourceExhaustedError: There is no room; the error names the bytes wanted and those available.
    """
    sizes = sizes_of("shape", shape, or_one=True)
    name = "f32" if dtype is None else _core.dtype(dtype)
    is_named = dtype is None or isinstance(dtype, str)
    uses_torch = "torch" in sys.modules if is_named else type(dtype).__module__.partition(".")[0] == "torch"
    if name == "f4" and (not sizes or sizes[-1] % 2):
        raise InvalidArgumentError(
            f"shape {sizes}: elements of f4 lie in pairs along the last dim: give at least one, of an even size"
        )
    block = shared_bytes(math.prod(sizes) * _core.bits_of(name) // 8)
    return tensor_in(block, name, sizes) if uses_torch else as_numpy(block, name, sizes)


def empty(shape: int | Sequence[int], dtype: Any = None) -> Any:
    """Like zeros(), for memory that you write before you read it. (Shared memory comes zeroed: it costs the same.)"""
    return zeros(shape, dtype)


def share_(value: T) -> T:
    """Moves the storage of a tensor, of all parameters and buffers of a module, or of all tensors in a dict, nested as
    register() takes it, into Tessera's shared memory, in place; returns it.

    It moves the storage, not one tensor: views, tied weights, optimisers, FSDP's own flat views, state_dicts
    and a pending backward all see it. Storages that are there already stay. Values do not change.

    Raises:
        InvalidArgumentError: torch does not own a storage (from_numpy, frombuffer, a mapped file, share_memory_()), or
            it is an array of another library; the error names the tensor, and nothing was moved. Or a dict has no
            tensor.
        UnimplementedError: torch is older than 2.12, and cannot move storages.
        ResourceExhaustedError: Memory has run out; storages moved before stay moved, which does no harm.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for name, tensor in _tensors_of(value):
        if brings_source(tensor):  # its memory is its own affair
            continue
        storage = local_tensor(name, tensor).untyped_storage()
        if storage.nbytes() == 0 or _core.in_shared_memory(storage.data_ptr(), storage.nbytes()):
            continue
        require_movable(name, storage)
        storages[storage._cdata] = storage
    for storage in storages.values():
        move_storage(storage, _core.shared_bytes)
    return value


def _tensors_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if is_torch_tensor(value):
        yield "given to share_()", value
    elif is_module(value):
        yield from _parameters_of(value)
        yield from value.named_buffers()
    elif isinstance(value, Mapping):
        yield from _tensors_in(value)
    else:
        raise InvalidArgumentError(
            f"share_() moves torch tensors, modules and dicts of tensors, not a {type_name(value)}"
        )


def _tensors_in(values: Mapping[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    skipped: list[str] = []
    found = list(leaves(values, skipped))
    if skipped and not found:
        raise InvalidArgumentError(f"share_(): there is no tensor in what was given ({', '.join(skipped)})")
    for leaf in found:
        name, tensor = leaf.name, leaf.value[0] if isinstance(leaf.value, tuple) else leaf.value
        if not is_torch_tensor(tensor):
            raise InvalidArgumentError(
                f"tensor {name}: share_() moves storages of torch, not a {type_name(tensor)}: make it with "
                "tessera.zeros()"
            )
        yield name, tensor


def _parameters_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The shard of a parameter that FSDP2 has gathered: FSDP frees the gathered one."""
    sharded = fsdp_parameters(model)
    for prefix, module in model.named_modules():
        refuse_script(module, prefix)
        for attribute, tensor in module._parameters.items():
            if tensor is not None:
                fsdp = sharded.get((id(module), attribute))
                yield f"{prefix}.{attribute}".lstrip("."), tensor if fsdp is None else fsdp.sharded_param
