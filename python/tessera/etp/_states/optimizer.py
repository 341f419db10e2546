"""States of optimisers that hold sharded parameters, as states of the unsharded model."""

from __future__ import annotations

from typing import Any

import torch

from ..._errors import InvalidArgumentError
from .._optim.optimizers import numbered
from ..tensor import LogicalTensor, is_sharded
from .chunks import whole_shape
from .logical import UncutState, held_of, rows_of
from .parts import WholePart

State = dict[str, Any]


def optimizer_state_dict(optimizer: torch.optim.Optimizer, *, full: bool = False, init: bool = False) -> State:
    """The optimiser's state_dict(), with logical tensors for what goes with sharded parameters row by row.

    Keys, step counts and what belongs to whole parameters are those of optimizer.state_dict() (which has this rank's
    rows as they are: for the same rank of the same number of ranks). torch.distributed.checkpoint saves and loads it.

    Args:
        full: Whole tensors in their place: for torch.save(), and for optimisers of the unsharded model. Collective; all
            ranks get all of it.
        init: Makes what the optimiser's first step would make, so that there is something to load into; as torch does
            it, by a step without gradients and with a learning rate of 0. Collective.
    """
    if init:
        _make_state(optimizer)
    found: State = optimizer.state_dict()
    state = {}
    for number, parameter in numbered(optimizer):
        if number in found["state"]:
            state[number] = {key: _logical(value, parameter, full) for key, value in found["state"][number].items()}
    return {**found, "state": state}


def load_optimizer_state_dict(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Loads what optimizer_state_dict() gave, on any number of ranks, or the state_dict() of an optimiser of the
    unsharded model: its parameters have the same order. Collective.
    """
    parameters = dict(numbered(optimizer))
    rows = {
        number: {key: _rows(value, parameters.get(number), f"state {number} {key!r}") for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": rows})


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


def _rows(value: Any, parameter: torch.Tensor | None, what: str) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value  # a step count
    weight = None if parameter is None else held_of("a parameter", parameter)
    if weight is None:
        return value.whole() if isinstance(value, UncutState | LogicalTensor) else value
    if value.shape not in (weight.shape, whole_shape(weight)):
        raise InvalidArgumentError(
            f"{what} of {weight.name} is {tuple(value.shape)}, and the weight {tuple(whole_shape(weight))}: load what "
            "optimizer.state_dict() or etp.optimizer_state_dict() gave, or whole tensors"
        )
    found = rows_of(value, weight)
    if isinstance(weight, WholePart):
        return found.clone()
    if is_sharded(found) and found.rows is not None and weight.store.spec.is_like(found.spec):
        return weight.rows_as_value(found.rows.clone())
    if isinstance(found, LogicalTensor):
        found = found.whole()
    return weight.rows_as_value(weight.cut(found).clone())


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
