"""Tensors of torch as a batch registers them: plain ones, DTensors, and parameters and buffers of modules."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from .. import _core
from .._errors import Error, InvalidArgumentError, UnimplementedError
from .foreign import type_name
from .layouts import is_dtensor, readings
from .location import OUTSIDE, Location, Source, element_type, refusal, sound_strides

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


# --- where a tensor lies


def plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or what it waits for, with elements in host memory; a refusal that says what it is otherwise."""
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
            f"tensor {name}: it is on {tensor.device}; this build moves host memory alone: register a copy on the CPU"
        )
    if tensor.is_conj():
        raise refusal(name, "it is a conjugate view, whose memory holds other values: resolve_conj() it")
    if tensor.is_neg():
        raise refusal(name, "it is a negative view, whose memory holds other values: resolve_neg() it")
    return tensor


# Subclasses whose __torch_function__ hands on to torch's, so that they are the plain tensors that they lie in.
_PLAIN_SUBCLASSES = frozenset({"vllm.model_executor.parameter.BasevLLMParameter"})


def _require_known(name: str, tensor: torch.Tensor, *known: type) -> None:
    """Refuses a subclass that means something of its own by its elements, which may also lie anywhere: what is done
    with it goes through its methods, and not those of the types that are `known`. One with further attributes is what
    its base is."""
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
    """The plain tensor that this rank holds of a DTensor, or of any other: itself."""
    if not is_dtensor(tensor):
        return plain(name, tensor)
    import torch
    from torch.distributed.tensor import DTensor

    _require_known(name, tensor, DTensor, torch.Tensor)
    return plain(name, tensor._local_tensor)


def torch_location(name: str, tensor: torch.Tensor, known: Readings | None = None) -> Location:
    """Where `tensor` lies. `known` are the readings() of a DTensor, if they are."""
    local = local_tensor(name, tensor)
    shape, strides = tuple(local.shape), tuple(local.stride())
    dtype = element_type(name, local.dtype)
    layout, other_layout, global_shape, rank = None, None, None, None
    if is_dtensor(tensor):
        layout, other_layout = known or _readings(name, tensor)
        global_shape, rank = tuple(tensor.shape), _rank_in_mesh(tensor)
    if dtype == "f4":  # two elements a byte along the last dim
        shape, strides, global_shape = _unpacked(name, shape, strides, global_shape, layout)
    address = local.data_ptr() if local.numel() else 0
    return Location(
        address,
        dtype,
        shape,
        sound_strides(name, shape, strides),
        layout,
        global_shape,
        rank,
        other_layout,
        local.untyped_storage(),
    )


def _readings(name: str, tensor: DTensor) -> Readings:
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
    """Of torch's pairs of 4-bit elements: the same in elements."""
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


# --- what is registered


def _counters(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors without storage that have the version counters of `tensor`: to be bumped, while its storage may go."""
    import torch

    if tensor.is_inference():
        return []  # it has none
    # Not by way of DTensor's dispatch: it would think for milliseconds about what placements a detach() gives.
    as_plain = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python))
    with torch.no_grad(), torch.inference_mode(False), as_plain:
        alias = tensor.detach()
        alias.data = torch.empty(0, dtype=tensor.dtype)
    # Autograd looks at the counter of the DTensor where it saved that, at the local tensor's behind to_local().
    return [alias, *_counters(tensor._local_tensor)] if is_dtensor(tensor) else [alias]


class TorchTensor:
    """A tensor out of a dict. Its storage is held weakly: it may be freed or resized between transfers, which is an
    error at the next one. (That the dict's owner has put another tensor in its place cannot be seen from here.)"""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._name = name
        self._location = replace(torch_location(name, tensor), memory=None)
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
                f"tensor {self._name}: its memory was freed; keep the tensor, or register the module that owns it"
            )
        if storage.nbytes() != self._bytes:
            raise InvalidArgumentError(
                f"tensor {self._name}: its storage was resized from {self._bytes} to {storage.nbytes()} bytes since it "
                "was registered; register it again"
            )
        moved = storage.data_ptr() - self._data if self._location.address else 0  # share_() moves storages
        return replace(self._location, address=self._location.address + moved, memory=storage)

    def require_writeable(self) -> None:
        pass

    def written(self) -> None:
        import torch

        torch.autograd.graph.increment_version(self._counters)


class ModuleTree:
    """The modules of a model, seen from its root: one on the way to a tensor may be replaced, as the tensor may.

    A Watch asks each tensor at every transfer, in a fraction of a microsecond, which is less than it takes to walk to
    its module. So one of the tensors looks at all modules, for all of them.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._tensors = 0
        self._located = 0  # the tensor that was located last
        self._guard: int | None = None  # the first whose current() was asked for since
        self._look()

    def add(self) -> int:
        """The number of a further tensor."""
        self._tensors += 1
        return self._tensors

    def find(self, path: Sequence[str]) -> torch.nn.Module | None:
        """The module at `path` now."""
        found: torch.nn.Module | None = self._root
        for name in path:
            found = found._modules.get(name) if found is not None else None
        return found

    def fsdp(self, module: torch.nn.Module, attribute: str) -> Any:
        """What torch's FSDP2 keeps of that parameter, if it does."""
        return self._sharded.get((id(module), attribute))

    def locating(self, tensor: int) -> None:
        """To be called before its module is looked up; of all tensors, one after the other in the order of numbers."""
        if tensor <= self._located and self._children != self._seen:
            self._look()
        self._located, self._guard = tensor, None

    def watched(self, tensor: int, get: Callable[[], torch.Tensor | None]) -> Callable[[], torch.Tensor | None]:
        """`get`; of the first tensor that asks since all were located, one that gives None if a module was replaced."""
        if self._guard is None:
            self._guard = tensor
        if tensor != self._guard:
            return get
        children, seen = self._children, self._seen

        def get_if_modules_are_there() -> torch.Tensor | None:
            return get() if children == seen else None

        return get_if_modules_are_there

    def _look(self) -> None:
        modules = [module for module in self._root.modules() if module._modules]
        self._children: list[dict[str, torch.nn.Module | None]] = [module._modules for module in modules]
        self._seen = [dict(each) for each in self._children]
        inside = {type(module) for of_one in self._seen for module in of_one.values() if module is not None}
        if any(kind.__eq__ is not object.__eq__ for kind in inside):
            self._seen = []  # another module may equal the one that was there: they are looked up each time
        self._sharded = fsdp_parameters(self._root)


class ModuleTensor:
    """A parameter or buffer of a module, looked up again each time: either may have been replaced."""

    def __init__(self, name: str, tree: ModuleTree, path: Sequence[str], attribute: str, *, buffer: bool) -> None:
        """path: Of the module in the tree."""
        self._name = name
        self._tree = tree
        self._number = tree.add()
        self._path = path
        self._attribute = attribute
        self._kind = "_buffers" if buffer else "_parameters"
        self._known: tuple[Any, Readings] | None = None  # the DTensorSpec seen last, and what it says
        self._look_up()

    @property
    def current(self) -> Callable[[], torch.Tensor | None]:
        return self._tree.watched(self._number, partial(self._tensors.get, self._attribute))

    def _look_up(self) -> None:
        module = self._tree.find(self._path)
        if module is None:
            raise InvalidArgumentError(
                f"tensor {self._name}: the model has no module {'.'.join(self._path)} any more: close the batch and "
                "register it again"
            )
        self._module = module
        self._tensors: dict[str, torch.Tensor | None] = getattr(module, self._kind)

    def _current(self) -> torch.Tensor:
        tensor = self._tensors.get(self._attribute)
        if tensor is None:
            raise InvalidArgumentError(f"tensor {self._name}: the module has no {self._attribute} any more")
        return tensor

    def locate(self) -> Location:
        self._tree.locating(self._number)
        self._look_up()
        fsdp = self._tree.fsdp(self._module, self._attribute)
        if fsdp is not None and fsdp.sharded_state.name != "SHARDED":
            raise InvalidArgumentError(
                f"tensor {self._name}: FSDP has gathered it, and will free what is there now: call reshard() on the "
                "FSDP module first, or send after the optimiser's step"
            )
        tensor = self._current()
        if not is_dtensor(tensor):
            return torch_location(self._name, tensor)
        if self._known is None or self._known[0] is not tensor._spec:
            self._known = (tensor._spec, _readings(self._name, tensor))
        return torch_location(self._name, tensor, self._known[1])

    def require_writeable(self) -> None:
        pass

    def written(self) -> None:
        import torch

        tensor: Any = self._current()
        if not tensor.is_inference():
            torch.autograd.graph.increment_version([tensor, tensor._local_tensor] if is_dtensor(tensor) else tensor)


# --- modules

# Modules that torch.compile and activation checkpointing put around others: no part of a parameter's name.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def walk_module(model: torch.nn.Module, keep: Callable[[str], bool]) -> Iterator[tuple[str, Source, torch.Tensor]]:
    """The names of model.state_dict() (without those of wrappers): parameters and persistent buffers; tied ones under
    each of their names."""
    tree = ModuleTree(model)
    for prefix, module in model.named_modules(remove_duplicate=False):
        path = prefix.split(".") if prefix else []
        # Some models list their modules in a way of their own.
        place = (tree, path) if tree.find(path) is module else (ModuleTree(module), [])
        dot = "".join(f"{part}." for part in prefix.split(".") if part and part not in _WRAPPERS)
        _refuse_flat(module, prefix)
        buffers = {
            name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        for is_buffer, tensors in ((False, module._parameters), (True, buffers)):
            for attribute, tensor in tensors.items():
                if tensor is not None and keep(name := f"{dot}{attribute}"):
                    yield name, ModuleTensor(name, *place, attribute, buffer=is_buffer), tensor


def fsdp_parameters(model: torch.nn.Module) -> dict[tuple[int, str], Any]:
    """(module's id, attribute) -> what FSDP2 keeps of that parameter, which says whether it is gathered now."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    found: dict[tuple[int, str], Any] = {}
    if kind is None:
        return found
    for module in model.modules():
        if not isinstance(module, kind):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in (each for group in groups if group is not None for each in group.fsdp_params):
            at = parameter._module_info
            found[id(at.module), at.param_name] = parameter
            for shared, attribute in zip(at.shared_modules, at.shared_param_names, strict=True):
                found[id(shared), attribute] = parameter
    return found


def _refuse_flat(module: torch.nn.Module, prefix: str) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        raise InvalidArgumentError(
            f"module {prefix or '(the model)'}: FullyShardedDataParallel keeps flat parameters without a layout: shard "
            "with fully_shard() instead, or register the DTensors of its sharded state_dict()"
        )
