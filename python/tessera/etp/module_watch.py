"""Hooks of the module of a sharded model, which follow its forwards, its states, and changes of its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from .attention import attentive_class
from .compile import leave_out_of_graphs
from .module_hook import Hook
from .module_states import watch_loading, watch_states
from .modules import Sharded, has_group, unsharded_class
from .parameter import LogicalParameter, is_sharded_parameter
from .structure import Structure, changes, in_functional_call
from .tensor import lasting
from .tracers import refuse_transforms, without_transforms

if TYPE_CHECKING:
    from .model import ShardedModel


class ModuleWatch:
    """Follows the module of a sharded model.

    Attributes:
        structure: The parameters that the module had at the last look. None: it is not watched.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model: Callable[[], ShardedModel | None] = weakref.ref(model)
        self._module: Callable[[], torch.nn.Module | None] = lambda: None
        self._handles: list[RemovableHandle] = []
        self._changed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules with attributes of ours
        self._looking = False
        self.structure: Structure | None = None

    @property
    def model(self) -> ShardedModel:
        model = self._model()
        assert model is not None  # it owns this
        return model

    @property
    def module(self) -> torch.nn.Module | None:
        """The root, while somebody has it."""
        return self._module()

    @property
    def is_needed(self) -> bool:
        """Tell whether somebody still has what is watched."""
        return self.module is not None

    def begin(self, module: torch.nn.Module) -> None:
        """Follows what is frozen, makes an update of load_state_dict(), and takes gradients of what is whole."""
        model = self.model
        self._module = weakref.ref(module)
        self._hook_root(model, module)
        for each in module.modules():
            self._hook_states(model, each)
            self._hook_forwards(model, each, is_root=each is module)
        for replicated in model.replicated:
            replicated.attach()
        if model.copier is not None:
            for each in module.modules():
                if _has_sharded(each):
                    self._change(model, each)
        self.structure = Structure(module)
        changes.watch()

    def _hook_root(self, model: ShardedModel, module: torch.nn.Module) -> None:
        def begin(root: torch.nn.Module, *_: Any) -> None:
            leave_out_of_graphs()
            if _has_sharded(root):  # all of them may be replaced by functional_call()
                refuse_transforms(model.weights[0].name if model.weights else type(root).__name__)
            model.enter_forward()
            self.look(thorough=True)
            if model.idle and model.threads.trains_here():
                model.follow_frozen()

        hook = Hook(type(module).__name__, begin)
        self._handles += [module.register_forward_pre_hook(hook), *watch_loading(module, model)]

    def _hook_states(self, model: ShardedModel, module: torch.nn.Module) -> None:
        """Watch the states of one that has weights of a model: also of another one, as they may be tied."""
        if has_group(module):  # it is watched
            return
        for each in dict.fromkeys(_models_in(module)):
            self._handles += watch_states(module, each)

    def _hook_forwards(self, model: ShardedModel, module: torch.nn.Module, is_root: bool) -> None:
        """Count the forwards of the root, and of others that have weights of the model."""
        if not is_root and (isinstance(module, Sharded) or model not in _models_in(module)):
            return

        def enter(*_: Any) -> None:
            model.enter_forward()
            model.threads.forwards += 1
            self.look()

        def leave(*_: Any) -> None:
            model.threads.forwards = max(0, model.threads.forwards - 1)

        name = type(module).__name__
        self._handles += [
            module.register_forward_pre_hook(Hook(name, enter)),
            module.register_forward_hook(Hook(name, leave), always_call=True),
        ]

    def _change(self, model: ShardedModel, module: torch.nn.Module) -> None:
        """Have a module copied by us, and its attention computed where fast paths reach."""
        assert model.copier is not None
        module.__dict__["__deepcopy__"] = model.copier(model, module)
        self._changed.add(module)
        kind = attentive_class(module)
        if kind is not None:
            module.__class__ = kind

    def add_tied(self, module: torch.nn.Module) -> None:
        """It has got one of the weights."""
        self._handles += watch_states(module, self.model)

    def look(self, thorough: bool = False) -> bool:
        """Adopt what has changed in the module since the last look, and tell whether something has. Collective, then.

        Args:
            thorough: Also compare known places: not every change is counted.
        """
        model, structure, module = self.model, self.structure, self.module
        if structure is None or (structure.is_current and not thorough):
            return False
        if model.adopt is None or module is None or self._looking or not model.idle:
            return False
        if not (model.threads.trains_here() or torch.is_grad_enabled()):  # another thread's forward, to be read
            return False
        if (structure.is_current and structure.stands()) or in_functional_call():
            return False
        self._looking = True
        try:
            with lasting():
                model.adopt(module)
        finally:
            self._looking = False
        return self.structure is not structure

    @property
    def has_changed(self) -> bool:
        """Tell whether torch has told of a change of some module since the last look."""
        return self.structure is not None and not self.structure.is_current

    def differs(self) -> bool:
        """Tell whether the module has something else than at the last look, also where torch has told of nothing."""
        return self.structure is not None and not (self.structure.is_current and self.structure.stands())

    def has_any_of(self, parameters: Container[int]) -> bool:
        """Tell whether the module has one of these parameters, by id."""
        return self.module is not None and any(id(each) in parameters for each in self.module.parameters())

    def has_unknown(self, part: torch.nn.Module) -> bool:
        """Tell whether a part of the module has parameters that the last look has not seen."""
        structure = self.structure
        if structure is None or structure.swapped():
            return True
        return any(id(each) not in structure.known for each in part.parameters())

    def look_if_changed(self) -> None:
        """Look if torch has told of a change; quick where it has not."""
        if self.has_changed:
            self.look()

    def take_note(self) -> None:
        """Take what the module has now as known."""
        if self.module is not None:
            self.structure = Structure(self.module)

    def end(self) -> None:
        """Leaves the module and its whole parameters as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for each in self._changed:
            each.__dict__.pop("__deepcopy__", None)
            if attentive_class(each) is type(each):
                each.__class__ = unsharded_class(type(each))
        self._changed.clear()
        self.structure = None
        for replicated in self.model.replicated:
            replicated.detach()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the module alone for a while. What changes there is found by the next look."""
        structure = self.structure
        self.end()
        try:
            yield
        finally:
            if self.module is not None:
                self.begin(self.module)
                self.structure = structure


def _has_sharded(module: torch.nn.Module) -> bool:
    return any(is_sharded_parameter(without_transforms(parameter)) for parameter in module.parameters())


def _models_in(module: torch.nn.Module) -> list[Any]:
    """Return the models of the weights that a module has itself."""
    return [parameter.etp.model for parameter in module._parameters.values() if isinstance(parameter, LogicalParameter)]
