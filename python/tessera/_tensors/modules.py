"""torch modules: their parameters and buffers as sources of a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .._errors import InvalidArgumentError
from .location import Location, Source, brings_source
from .torch import Locator, written

if TYPE_CHECKING:
    import torch


class ModuleTree:
    """The modules of a model, seen from its root. A module on the way to a tensor may be replaced, like the tensor
    itself. A Watch checks each tensor at every transfer in a fraction of a microsecond, which is less than walking to
    its module takes. So one of the tensors checks all modules for all of them."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._tensors = 0
        self._located = 0  # the tensor that was last located
        self._guard: int | None = None  # the first one whose current() was called since
        self._look()

    def add(self) -> int:
        """Adds a tensor; returns its number."""
        self._tensors += 1
        return self._tensors

    def find(self, path: Sequence[str]) -> torch.nn.Module | None:
        """The current module at `path`."""
        found: torch.nn.Module | None = self._root
        for name in path:
            found = found._modules.get(name) if found is not None else None
        return found

    def fsdp(self, module: torch.nn.Module, attribute: str) -> Any:
        """FSDP2's object for that parameter, if there is one."""
        return self._sharded.get((id(module), attribute))

    def locating(self, tensor: int) -> None:
        """Call it before its module is looked up; for all tensors one after another, in the order of numbers."""
        if tensor <= self._located and self._children != self._seen:
            self._look()
        self._located, self._guard = tensor, None

    def watched(self, tensor: int, get: Callable[[], torch.Tensor | None]) -> Callable[[], torch.Tensor | None]:
        """`get`; for the first tensor that asks since all were located, a function that returns None if a module was
        replaced."""
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
            self._seen = []  # another module may equal the one that was there: look them up each time
        self._sharded = fsdp_parameters(self._root)


class ModuleTensor:
    """A parameter or buffer of a module, looked up again each time: either may have been replaced."""

    def __init__(self, name: str, tree: ModuleTree, path: Sequence[str], attribute: str, *, buffer: bool) -> None:
        """path: The module's path in the tree."""
        self._name = name
        self._tree = tree
        self._number = tree.add()
        self._path = path
        self._attribute = attribute
        self._kind = "_buffers" if buffer else "_parameters"
        self._locator = Locator(name)
        self._look_up()

    @property
    def current(self) -> Callable[[], torch.Tensor | None] | None:
        if brings_source(self._tensors.get(self._attribute)):
            return None
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
        if brings_source(tensor):
            return tensor.__tessera_source__(self._name).locate()
        return self._locator.locate(tensor)

    def require_writeable(self) -> None:
        pass

    def begin_write(self) -> None:
        tensor = self._current()
        if brings_source(tensor):
            tensor.__tessera_source__(self._name).begin_write()

    def written(self) -> None:
        written(self._current())


# Modules that torch.compile and activation checkpointing wrap around others: not part of a parameter's name.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def walk_module(model: torch.nn.Module, keep: Callable[[str], bool]) -> Iterator[tuple[str, Source, torch.Tensor]]:
    """The names of model.state_dict() (without those of wrappers): parameters and persistent buffers; tied ones under
    each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        refuse_script(module, prefix)
    tree = ModuleTree(model)
    for prefix, module in model.named_modules(remove_duplicate=False):
        path = prefix.split(".") if prefix else []
        # Some models list their modules in their own way.
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
    """(module's id, attribute) -> FSDP2's object for that parameter, which tells whether it is gathered now."""
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


def refuse_script(module: torch.nn.Module, prefix: str) -> None:
    """Refuses TorchScript, whose modules are not torch's own behind their methods."""
    jit = sys.modules.get("torch.jit")
    if jit is not None and isinstance(module, jit.ScriptModule):
        raise InvalidArgumentError(
            f"module {prefix or '(the model)'}: a ScriptModule keeps its parameters where they cannot be looked up: "
            "register its state_dict(), or the module from which it was made"
        )


def _refuse_flat(module: torch.nn.Module, prefix: str) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        raise InvalidArgumentError(
            f"module {prefix or '(the model)'}: FullyShardedDataParallel keeps flat parameters without a layout: shard "
            "with fully_shard() instead, or register the DTensors of its sharded state_dict()"
        )
