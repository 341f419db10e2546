"""States of optimisers that hold sharded parameters, as states of the unsharded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._errors import InvalidArgumentError
from .optim import numbered
from .refusals import require_optimizer
from .state_dict import UncutState, held_of
from .state_loading import watch_loads
from .state_names import keys_of
from .telling import collective
from .tensor import LogicalTensor, is_sharded

State = dict[str, Any]


@collective("optimizer_state_dict()")
def optimizer_state_dict(optimizer: torch.optim.Optimizer, *, full: bool = False, init: bool = False) -> State:
    """The optimiser's state_dict(), with logical tensors for what goes with sharded parameters row by row.

    Keys are names of parameters, as torch's get_optimizer_state_dict() gives them: those that the optimiser was made
    with, or else the model's; numbers, if there are none. torch.distributed.checkpoint saves and loads it.

    Args:
        full: Whole tensors in their place: for torch.save(), and for optimisers of the unsharded model. All ranks that
            call it get all of it.
        init: Makes what the optimiser's first step would make, so that there is something to load into; as torch does
            it, by a step without gradients and with a learning rate of 0. Collective.
    """
    require_optimizer(optimizer)
    if init:
        _make_state(optimizer)
    found: State = optimizer.state_dict()
    keys, state = keys_of(optimizer), {}
    for number, parameter in numbered(optimizer):
        if number in found["state"]:
            entry = found["state"][number]
            state[keys[number]] = {key: _logical(value, parameter, full) for key, value in entry.items()}
    groups = [{**group, "params": [keys[number] for number in group["params"]]} for group in found["param_groups"]]
    return {**found, "state": state, "param_groups": groups}


@collective("load_optimizer_state_dict()")
def load_optimizer_state_dict(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Loads what optimizer_state_dict() gave, on any number of ranks, or the state_dict() of an optimiser of the
    unsharded model. Parameters are found by name where both sides have names, and else have the same order. Collective.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            f"load_optimizer_state_dict(): the state is {type(state).__name__}: give what optimizer_state_dict(), or "
            "optimizer.state_dict(), has given"
        )
    watch_loads()  # of layers that only a tp_group cuts
    optimizer.load_state_dict(state)


def _logical(value: Any, parameter: torch.Tensor, full: bool) -> Any:
    """Return a state as it is saved: uncut by tensor parallelism, or whole."""
    held = held_of("a parameter", parameter)
    if held is not None and held.tp_cut is not None:
        rows = value.rows if is_sharded(value) else value
        if isinstance(rows, torch.Tensor) and rows.dim() > 0 and rows.numel() == held.local.numel():
            value = UncutState(held, rows.view(held.local.shape))
    if full and isinstance(value, UncutState | LogicalTensor):
        with torch.no_grad():
            return value.whole().clone() if isinstance(value, LogicalTensor) else value.whole()
    return value


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    trained = [each for _, each in numbered(optimizer) if each.requires_grad]
    if all(parameter in optimizer.state for parameter in trained):
        return
    gradients = [parameter.grad for parameter in trained]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    try:
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
