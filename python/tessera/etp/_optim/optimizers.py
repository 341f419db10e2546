"""Optimisers: each step of one that holds sharded parameters is an update, by hooks that see every optimiser."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_function_impl
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..._errors import InvalidArgumentError
from .._compile import left_out, suspend
from .._refusals import require_same_ranks
from .._weights.matrix import Model
from .._weights.parameter import ShardedParameter
from .._weights.replicated import is_replicated
from .._weights.weight import Weight
from .norms import ShardedGradient

# Their steps treat every element by itself, so that rows of a weight are updated as in the whole one.
_ELEMENTWISE = {
    f"torch.optim.{name}"
    for name in (
        "adadelta",
        "adagrad",
        "adam",
        "adamax",
        "adamw",
        "asgd",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
    )
}
_allowed: set[type[torch.optim.Optimizer]] = set()


class OwnRows(torch.Tensor):
    """This rank's rows in an optimiser's state_dict(): a tensor as any other, also in a file, but no whole one."""

    etp: Weight
    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    def __create_write_items__(self, fqn: str, object: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"{fqn} is this rank's rows of what goes with {self.etp.name}: give torch.distributed.checkpoint what "
            "etp.optimizer_state_dict() returns"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _mark_rows(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = dict(state_dict["state"])
    for number, parameter in numbered(optimizer):
        if isinstance(parameter, ShardedParameter) and number in state:
            state[number] = {key: _marked(value, parameter.etp) for key, value in state[number].items()}
    return {**state_dict, "state": state}


def _marked(value: Any, weight: Weight) -> Any:
    if not goes_with(value, weight.local.shape):
        return value
    rows: OwnRows = value.as_subclass(OwnRows)
    rows.etp = weight
    return rows


def numbered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """The parameters as state_dict() numbers them."""
    return enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])


def goes_with(value: Any, shape: torch.Size) -> bool:
    """Whether it has an element for each of a parameter, as all but counts do."""
    return isinstance(value, torch.Tensor) and value.shape == shape


Updates = list[tuple[Model, list[Weight]]]
_under_way: dict[int, tuple[Updates, list[tuple[torch.nn.Parameter, ShardedGradient]]]] = {}  # by optimiser
_suspended: dict[int, Callable[[], None]] = {}  # by optimiser: what lets torch.compile go on


def allow_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    """Says that an optimiser's step treats every element by itself, so that it may hold sharded parameters. torch's own
    are known."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InvalidArgumentError(f"allow_optimizer({kind!r}): give a class of optimisers")
    _allowed.add(kind)


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    return kind in _allowed or getattr(kind.step, "__module__", "") in _ELEMENTWISE


def updates_of(optimizer: torch.optim.Optimizer) -> Updates:
    """The weights that it may write, by model, in an order that all ranks share."""
    found: dict[int, tuple[Model, list[Weight]]] = {}
    with DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, ShardedParameter) and parameter.requires_grad:
                    weight = parameter.etp
                    found.setdefault(weight.model.number, (weight.model, []))[1].append(weight)
                elif parameter.grad is None and "sharded_as" in parameter.__dict__:
                    raise InvalidArgumentError(
                        f"{type(optimizer).__name__} was made before shard_module_() and holds {parameter.sharded_as} "
                        "as it was, which no model uses now: make optimisers after shard_module_()"
                    )
    return [found[number] for number in sorted(found)]


_looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _look_at(optimizer: torch.optim.Optimizer, models: list[Model]) -> None:
    """Before its first step: what else it holds has been averaged over the same ranks."""
    _looked_at.add(optimizer)
    optimizer.register_state_dict_post_hook(_mark_rows)
    meshes = {
        tuple(parameter.device_mesh.mesh.flatten().tolist())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter).__name__ == "DTensor"
    }
    for mesh in sorted(meshes):
        for model in models:
            require_same_ranks(model, mesh, "fully_shard()")
    _warn_of_others(optimizer, models)


def _warn_of_others(optimizer: torch.optim.Optimizer, models: list[Model]) -> None:
    """Of parameters beside layers that were constructed sharded, which shard_module_() has not seen. The user may add
    their gradients by other means."""
    if not all(model.of_layers for model in models) or all(model.core.size == 1 for model in models):
        return
    others = [
        parameter
        for _, parameter in numbered(optimizer)
        if type(parameter) is torch.nn.Parameter and parameter.grad is not None and not is_replicated(parameter)
    ]
    if others:
        warnings.warn(
            f"{type(optimizer).__name__} holds {len(others)} parameters, the first of shape {tuple(others[0].shape)}, "
            f"that every rank has whole beside {models[0].weights[0].name} and others: nobody adds their gradients "
            "over the ranks; give the model to etp.shard_module_(), or add them yourself",
            stacklevel=4,
        )


def _begin(optimizer: torch.optim.Optimizer, updates: Updates) -> None:
    for model, weights in updates:
        model.begin_update(weights)
    # Elementwise work needs no type that watches for norms.
    swapped = []
    with DisableTorchFunctionSubclass():
        for _, weights in updates:
            for weight in weights:
                parameter = weight.parameter
                gradient = parameter.grad
                if type(gradient) is ShardedGradient:
                    parameter.grad = gradient.rows
                    swapped.append((parameter, gradient))
    _under_way[id(optimizer)] = (updates, swapped)


@left_out
def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    updates = updates_of(optimizer)
    if not updates:
        return None
    kind = type(optimizer)
    if not is_elementwise(kind):
        raise InvalidArgumentError(
            f"{kind.__name__} holds {updates[0][1][0].name}, of which this rank has some rows, and its step needs "
            "whole weights: take an elementwise optimiser (AdamW, SGD, ...), leave the weight out of shard_module_() "
            "by filter=, or, if every element is updated by itself, call etp.allow_optimizer() with its class"
        )
    _suspended[id(optimizer)] = suspend()
    if optimizer not in _looked_at:
        _look_at(optimizer, [model for model, _ in updates])
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _begin(optimizer, updates)
        return None

    def evaluate() -> Any:
        """The closure computes gradients, which needs the weights: the update begins after it."""
        loss = closure()
        _begin(optimizer, updates)
        return loss

    return (*args[:1], evaluate, *args[2:]), {name: each for name, each in kwargs.items() if name != "closure"}


@left_out
def _after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    updates, swapped = _under_way.pop(id(optimizer), ([], []))
    with DisableTorchFunctionSubclass():
        for parameter, gradient in swapped:
            if parameter.grad is gradient.rows:
                parameter.grad = gradient
    for model, _weights in updates:
        model.end_update()
    _suspended.pop(id(optimizer), lambda: None)()


_hooked: list[Callable[[], None]] = []


def watch_optimizers() -> None:
    """Once a process."""
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before).remove)
        _hooked.append(register_optimizer_step_post_hook(_after).remove)
