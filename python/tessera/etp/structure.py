"""Changes of a sharded model's modules: parameters that come, go, take another's place, or become tied.

torch calls hooks when a module is given a parameter, buffer or module: they count (`changes`). Forwards and steps
compare the count with that of the last look at the model, which costs nothing. `del` and `_parameters[name] = x` call
no hook, so a forward of the root compares known places by identity, too. What a look finds is adopted by all ranks
together (`adopt.py`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .modules import has_group
from .parameter import LogicalParameter
from .tensor import LogicalTensor
from .weight import Weight

_Tensor: Any = torch.Tensor
_HOOKS = (_Tensor._backward_hooks, _Tensor._post_accumulate_grad_hooks)


class Changes:
    """Counts what modules of this process have been given."""

    def __init__(self) -> None:
        self.count = 0
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Begin to count. Once a process."""
        if not self._handles:
            self._handles = [
                register_module_parameter_registration_hook(self._parameter),
                register_module_module_registration_hook(self._module),
                register_module_buffer_registration_hook(self._buffer),
            ]

    def _module(self, module: torch.nn.Module, name: str, child: Any) -> None:
        if module._modules.get(name) is not child:
            self.count += 1

    def _parameter(self, module: torch.nn.Module, name: str, parameter: Any) -> None:
        if module._parameters.get(name) is not parameter:
            self.count += 1
        if isinstance(parameter, LogicalTensor) and not isinstance(parameter, LogicalParameter):
            become_parameter(parameter)

    def _buffer(self, module: torch.nn.Module, name: str, buffer: Any) -> Any:
        """Have a buffer be plain: a forward of one rank alone may read it."""
        if name not in module._buffers:
            self.count += 1
        if not isinstance(buffer, LogicalTensor):
            return None
        with torch.no_grad():
            return buffer.whole().detach().clone()


changes = Changes()


def become_parameter(tensor: LogicalTensor) -> None:
    """Have a sharded tensor that a program has made a parameter of (`nn.Parameter(p.data)`) be one, in place: that of
    its weight, if it has the weight's memory; else a plain one with all its values, which is adopted like others."""
    with torch.no_grad():
        weight = tensor.store.weight
        if isinstance(weight, Weight) and not tensor.chain:
            made: torch.Tensor = LogicalParameter.of_weight(weight, tensor.requires_grad)
        else:
            made = torch.nn.Parameter(tensor.whole().detach().clone(), tensor.requires_grad)
            if isinstance(weight, Weight):  # which is to have left the model when this is adopted
                made.etp_cut_of = weakref.ref(weight)  # type: ignore[attr-defined]
        gradient = tensor.grad  # this rank's: nobody has added it over the ranks
        if gradient is not None:
            made.grad = gradient.whole() if isinstance(gradient, LogicalTensor) else gradient
    swap(tensor, made)


def become_parameters(root: torch.nn.Module) -> None:
    """Have sharded tensors that a program has made parameters of modules be parameters of the package: torch calls no
    hook for `module._parameters[key] = nn.Parameter(p.data)`."""
    for module in root.modules():
        if not is_script(module):
            for parameter in module._parameters.values():
                if isinstance(parameter, LogicalTensor) and not isinstance(parameter, LogicalParameter):
                    become_parameter(parameter)


def can_swap(tensor: torch.Tensor) -> bool:
    """Tell whether no graph and nothing of C++ holds a tensor that is to become another one in place."""
    if isinstance(tensor, LogicalTensor):
        tensor.store.forget_alias(tensor)
    with DisableTorchFunctionSubclass():
        uses: int = tensor._use_count()  # type: ignore[attr-defined]
        return uses == 1 and tensor.is_leaf and not weakref.getweakrefs(tensor)


def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Have two tensors take over what the other one is: whoever holds one holds the other's contents."""
    for each in (tensor, other):
        if isinstance(each, LogicalTensor):
            each.store.forget_alias(each)
    with DisableTorchFunctionSubclass():
        hooks = [(each.__get__(tensor), each.__get__(other)) for each in _HOOKS]
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
        for each, (own, others) in zip(_HOOKS, hooks, strict=True):  # which it leaves where they are
            each.__set__(tensor, others)
            each.__set__(other, own)


def leave_hooks(tensor: torch.Tensor) -> None:
    """Take from a tensor the hooks that autograd calls for what it was before it was swapped with another one."""
    with DisableTorchFunctionSubclass():
        _HOOKS[0].__set__(tensor, None)


class Place(NamedTuple):
    """Where a module has a parameter."""

    name: str  # in the model
    module: torch.nn.Module
    key: str  # in the module
    parameter: torch.Tensor


def places_in(root: torch.nn.Module) -> Iterator[Place]:
    """Yield where a model has which parameters, without those of constructed layers, which have a runtime of their
    own, and those that fully_shard() manages."""
    managed: set[int] = set()
    for prefix, module in root.named_modules():
        if id(module) in managed or any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            managed.update(id(child) for child in module.children())
            plain = False
        else:
            plain = not has_group(module)
        for key, parameter in module._parameters.items():
            if parameter is None or type(parameter).__name__ == "DTensor":
                continue
            if plain or isinstance(parameter, LogicalParameter):
                yield Place(f"{prefix}.{key}" if prefix else key, module, key, parameter)


class Structure:
    """What a model had when its ranks last looked at it."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._seen = changes.count
        self.places = list(places_in(root))
        self.known = {id(place.parameter): place for place in reversed(self.places)}
        # torch.utils.swap_tensors() makes a parameter another one, which is the same object.
        self._held = [
            (vars(place.module), place.key, place.parameter, _kind_of(place.parameter))  # which keep no module alive
            for place in self.places
            if not is_script(place.module)
        ]
        self._kinds = {key: _kind_of(place.parameter) for key, place in self.known.items()}
        self._parts = [
            (vars(module), name, child)
            for module in root.modules()
            if not is_script(module)
            for name, child in module._modules.items()
        ]

    @property
    def is_current(self) -> bool:
        """Whether no module of this process has been given anything since."""
        return self._seen == changes.count

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have the next look take these as new, whatever stands."""
        self._seen = -1
        for parameter in parameters:
            self.known.pop(id(parameter), None)

    def swapped(self) -> list[Place]:
        """Return where there are sharded parameters that have become others in place, or plain ones."""
        found = [(place, self._kinds[key]) for key, place in self.known.items()]
        return [place for place, kind in found if isinstance(kind, Weight) and _kind_of(place.parameter) is not kind]

    def stands(self) -> bool:
        """Tell whether every known place has what it had."""
        for attributes, key, parameter, kind in self._held:
            if attributes["_parameters"].get(key) is not parameter or _kind_of(parameter) is not kind:
                return False
        return all(attributes["_modules"].get(name) is child for attributes, name, child in self._parts)


def _kind_of(parameter: torch.Tensor) -> Any:
    """Return the weight of a sharded parameter, and the class of another one."""
    return parameter.store.weight if isinstance(parameter, LogicalParameter) else type(parameter)


def is_script(module: torch.nn.Module) -> bool:
    """Tell whether a module is TorchScript's, whose code sees no sharded weight."""
    return isinstance(module, torch.jit.ScriptModule)


def in_functional_call() -> bool:
    """Tell whether torch.func.functional_call() has put tensors in the places of parameters for now."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
