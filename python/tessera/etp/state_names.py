"""Names of parameters, by which states of optimisers go from one program to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .parameter import LogicalParameter
from .tensor import LogicalTensor


def note_names(model: torch.nn.Module) -> None:
    """Remember what the model that is sharded calls its parameters. On themselves: a parameter with a weak reference
    cannot become another one in place (torch.utils.swap_tensors)."""
    for name, parameter in model.named_parameters():
        parameter.__dict__["etp_name"] = name


def forget_name(parameter: torch.Tensor) -> None:
    """Leave no name on a copy of a parameter, which is of no model."""
    parameter.__dict__.pop("etp_name", None)


def numbered_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters as state_dict() numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_of(optimizer: torch.optim.Optimizer) -> list[str | None]:
    """Return the name of each parameter, as state_dict() numbers them: the optimiser's own, else the model's."""
    found: list[str | None] = []
    for group in optimizer.param_groups:
        own = group.get("param_names") or [None] * len(group["params"])
        found += [_name_of(parameter) if name is None else name for parameter, name in zip(group["params"], own)]  # noqa: B905
    return _unique(found)


def _name_of(parameter: torch.Tensor) -> str | None:
    """Return what the model calls it. A layer that was constructed sharded knows its own part of the name only."""
    name: str | None = parameter.__dict__.get("etp_name")
    if name is None and isinstance(parameter, LogicalParameter) and not parameter.etp.model.of_layers:
        return parameter.etp.name
    return name


def saved_names_of(state: dict[str, Any], groups: Sequence[dict[str, Any]]) -> list[str | None]:
    """Return the name of each parameter of a state, in its order: those that the optimiser was made with, keys that
    are names, and those of weights whose rows it holds."""
    found: list[str | None] = []
    for group in groups:
        own = group.get("param_names")
        for place, key in enumerate(group["params"]):
            name = own[place] if own is not None and len(own) == len(group["params"]) else None
            if name is None:
                name = key if isinstance(key, str) else _of_values(state.get(key))
            found.append(name)
    return _unique(found)


def _of_values(entry: Any) -> str | None:
    values = entry.values() if isinstance(entry, dict) else ()
    tensor = next((value for value in values if isinstance(value, LogicalTensor) and value.etp is not None), None)
    if tensor is None:
        return None
    parameter = getattr(tensor.etp, "parameter", None)
    return tensor.etp.name if parameter is None else _name_of(parameter)


def _unique(names: Iterable[str | None]) -> list[str | None]:
    """Return names that say which parameter is meant; layers that were constructed apart may have the same ones."""
    listed = list(names)
    return [None if name is None or listed.count(name) > 1 else name for name in listed]


def keys_of(optimizer: torch.optim.Optimizer) -> list[str | int]:
    """Return what etp.optimizer_state_dict() calls each parameter: its name, or its number if not all have one."""
    names = names_of(optimizer)
    known = [name for name in names if name is not None]
    return [*known] if len(known) == len(names) else [*range(len(names))]
