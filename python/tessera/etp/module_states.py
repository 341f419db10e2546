"""state_dict() and load_state_dict() of modules with sharded parameters: all of them is saved, and what is loaded is
written by all ranks, or by none."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from .._errors import InvalidArgumentError, MismatchError
from .parameter import LogicalParameter
from .parts import WholePart, whole_part
from .state_dict import UncutState, rows_of
from .state_helpers import watch_helpers
from .telling import families_in, json_of, known, telling
from .weight import Weight

if TYPE_CHECKING:
    from .model import ShardedModel


def _sharded(module: torch.nn.Module, model: ShardedModel | None = None) -> dict[str, Weight]:
    return {
        name: parameter.etp
        for name, parameter in module._parameters.items()
        if isinstance(parameter, LogicalParameter) and (model is None or parameter.etp.model is model)
    }


def _save(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    watch_helpers()
    for name, weight in _sharded(module).items():
        saved = state.get(prefix + name)
        if saved is not None and saved is not weight.parameter and weight.tp_cut is not None:  # keep_vars=True
            state[prefix + name] = UncutState(weight, weight.local if weight.has_rows else None)


class _Update:
    """One update of all that a load_state_dict() writes, unless one is around it."""

    def __init__(self, model: ShardedModel) -> None:
        self._model, self._has_begun = model, False

    def begin(self, weights: Iterable[Weight]) -> None:
        self._has_begun = False  # one that has failed may have left it so
        if not self._model.updating:
            self._has_begun = True
            self._model.begin_update(weights, "load_state_dict()")

    def end(self) -> None:
        if self._has_begun:
            self._has_begun = False
            self._model.end_update()


def _require_same_entries(
    module: torch.nn.Module, model: ShardedModel, state: Mapping[str, Any], prefix: str, strict: bool
) -> None:
    """Throw if ranks do not load the same: sharded weights, each of which is a call of all of them, and, if `strict`,
    any names, as torch would refuse some on one rank only. Collective."""
    if model.size == 1:
        return
    own = {
        name: _shape_in(state, prefix + name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if strict or (isinstance(parameter, LogicalParameter) and parameter.etp.model is model)
    }
    if strict:
        names = sorted(str(name) for name in state if str(name).startswith(prefix))
        own.update((name.removeprefix(prefix), _shape_in(state, name)) for name in names)
    subject = "what load_state_dict() is given"
    told = json.dumps(own).encode()
    digests = model.core.exchange(subject, hashlib.blake2b(told, digest_size=16).digest())
    if all(digest == digests[0] for digest in digests):
        return
    answers = json_of(
        model.core.exchange(subject, told),
        subject,
        lambda told: all(each is None or all(type(size) is int for size in each) for each in told.values()),
    )
    for rank, other in enumerate(answers):
        for name in {**answers[0], **other}:
            entries = answers[0].get(name), other.get(name)
            if entries[0] != entries[1]:
                words = ["no tensor " + name if each is None else f"{name} of shape {tuple(each)}" for each in entries]
                raise known(
                    MismatchError(
                        f"load_state_dict(): the state of rank 0 has {words[0]}, and that of rank {rank} has "
                        f"{words[1]}: give all ranks the same; nothing was written"
                    )
                )


def _shape_in(state: Mapping[str, Any], name: str) -> list[int] | None:
    """Return the shape of an entry; None: there is no tensor."""
    shape = getattr(state.get(name), "shape", None)
    return None if shape is None else list(shape)


def _require_no_replacement(
    module: torch.nn.Module, state_dict: Any = None, strict: bool = True, assign: bool = False, **_: Any
) -> None:
    """Throw if load_state_dict() is to replace a sharded parameter, before it has replaced another one."""
    if assign and isinstance(state_dict, Mapping):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if isinstance(parameter, LogicalParameter) and name in state_dict:
                raise _replaces(parameter.etp)


def _replaces(weight: Weight) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{weight.name} is sharded, and load_state_dict(assign=True) would replace its memory: load without assign=, "
        "or before shard_module_()"
    )


@functools.cache
def _follow_loads() -> None:
    """Have a load_state_dict() of a model that fails on one rank end those of the others. Once a process."""
    load = torch.nn.Module.load_state_dict

    @functools.wraps(load)
    def load_state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        sharded = [each for each in module.parameters() if isinstance(each, LogicalParameter)]
        if not sharded:
            return load(module, *args, **kwargs)
        with telling("load_state_dict()", families_in(sharded)), contextlib.ExitStack() as loading:
            for model in sorted({each.etp.model for each in sharded}, key=lambda model: model.number):
                loading.enter_context(model.recovery.behind())
            _require_no_replacement(module, *args, **kwargs)
            return load(module, *args, **kwargs)

    torch.nn.Module.load_state_dict = load_state_dict  # type: ignore[assignment, method-assign]


def watch_loading(root: torch.nn.Module, model: ShardedModel) -> list[RemovableHandle]:
    """Make one update of a load_state_dict() of a whole model."""
    update = _Update(model)

    def load(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, _: Any, strict: bool, *__: Any) -> None:
        _require_same_entries(module, model, state, prefix, strict)
        update.begin(model.weights)

    return [
        root.register_load_state_dict_pre_hook(load),  # type: ignore[no-untyped-call]
        root.register_load_state_dict_post_hook(lambda *_: update.end()),  # type: ignore[no-untyped-call]
    ]


def watch_states(module: torch.nn.Module, model: ShardedModel) -> list[RemovableHandle]:
    """Watch one module, and its parameters of that model. Loading it is an update. Twice is as good as once."""
    _follow_loads()
    update = _Update(model)
    loading: list[Weight] = []

    def load(module: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        weights = _sharded(module, model)
        if not weights:
            return
        entries = {name: state[prefix + name] for name in weights if prefix + name in state}
        for name in entries:  # which a hook of the program may have renamed since the whole state was looked at
            if metadata.get("assign_to_params_buffers", False):
                raise _replaces(weights[name])
        update.begin(weights.values())
        for name, tensor in entries.items():
            state[prefix + name] = rows_of(tensor, weights[name])
            loading.append(weights[name])

    def loaded(*_: Any) -> None:
        model.damage.mend(loading)
        loading.clear()
        update.end()

    return [
        module.register_state_dict_post_hook(_save),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(load),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(loaded),  # type: ignore[no-untyped-call]
    ]


def _parts(module: torch.nn.Module) -> dict[str, WholePart]:
    found = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, LogicalParameter):
            part = whole_part(name, parameter)
            if part is not None:
                found[name] = part
    return found


def _save_parts(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, part in _parts(module).items():
        saved = state.get(prefix + name)
        if saved is not None and saved is not module._parameters[name]:  # keep_vars=True
            state[prefix + name] = UncutState(part, saved)


def _load_parts(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, part in _parts(module).items():
        if prefix + name in state:
            state[prefix + name] = rows_of(state[prefix + name], part)


def watch_parts(module: torch.nn.Module) -> None:
    """Save and load parameters of a module that only a tp_group has cut, by their logical shape."""
    module.register_state_dict_post_hook(_save_parts)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_load_parts)  # type: ignore[no-untyped-call]


def _tied(module: torch.nn.Module, name: str, parameter: Any) -> None:
    if isinstance(parameter, LogicalParameter):
        parameter.etp.model.watch.add_tied(module)
    elif hasattr(parameter, "etp_cut") and _save_parts not in module._state_dict_hooks.values():
        watch_parts(module)


_hooked: list[RemovableHandle] = []


def watch_ties() -> None:
    """Watch modules of any kind that get a sharded parameter by an assignment. Once a process."""
    if not _hooked:
        _follow_loads()
        _hooked.append(register_module_parameter_registration_hook(_tied))
