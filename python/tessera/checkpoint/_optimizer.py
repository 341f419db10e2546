"""The state of an optimiser: tensors `<parameter>.<key>`, and plain values, which are JSON in the index's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .._errors import InvalidArgumentError, MismatchError
from .._tensors.layouts import is_dtensor
from .._tensors.location import element_type
from .._tensors.torch import torch_dtype
from ..etp.optim import numbered
from ..etp.parameter import LogicalParameter
from ..etp.state_kinds import kind_of, require_kind, require_options
from ..etp.tensor import is_sharded
from ..etp.views import local as etp_local
from ._parts import Model, Part, part_of


class States(NamedTuple):
    parts: list[Part]
    state: dict[str, dict[str, Any]]  # by parameter: "tensors": keys of tensors, "values": plain ones by key
    groups: list[dict[str, Any]]  # "params": names, "options"

    def plain(self) -> dict[str, Any]:
        return {"state": self.state, "param_groups": self.groups}


def names_of(optimizer: torch.optim.Optimizer, model: Model) -> list[str]:
    """Of its parameters, as state_dict() numbers them."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(f"optimizer {optimizer!r}: give a torch optimiser, or None")
    names = []
    for number, parameter in numbered(optimizer):
        name = model.parameters.get(id(parameter))
        if name is None:
            raise InvalidArgumentError(
                f"optimizer: its parameter {number}, of shape {tuple(parameter.shape)}, is none of the model's: give "
                "the model whose parameters it was made with"
            )
        names.append(name)
    return names


def states_of(optimizer: torch.optim.Optimizer, model: Model) -> States:
    names = names_of(optimizer, model)
    found = optimizer.state_dict()
    parts: list[Part] = []
    state: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        entry: dict[str, Any] = {"tensors": [], "values": {}}
        for key, value in found["state"].get(number, {}).items():
            what = f"optimizer: the state {key!r} of {name}"
            if not isinstance(key, str):
                raise InvalidArgumentError(f"{what}: its key is no str")
            if isinstance(value, torch.Tensor):
                entry["tensors"].append(key)
                parts.append(_part(f"{name}.{key}", value, model.parts[name], model.tensors[name]))
            else:
                entry["values"][key] = encoded(value, what)
        if entry["tensors"] or entry["values"]:
            state[name] = entry
    groups = []
    for group in found["param_groups"]:
        options = {
            key: encoded(value, f"optimizer: the option {key!r}") for key, value in group.items() if key != "params"
        }
        groups.append({"params": [names[number] for number in group["params"]], "options": options})
    return States(parts, state, groups)


def _part(name: str, value: torch.Tensor, of: Part, parameter: torch.Tensor) -> Part:
    """What has an element for each of the parameter's is cut as the parameter."""
    if is_sharded(value):
        if isinstance(parameter, LogicalParameter) and value.shape == parameter.shape and not value.chain:
            rows = etp_local(value).view(of.memory.shape)
            return of._replace(name=name, dtype=element_type(name, rows.dtype), memory=rows, weight=None)
        value = value.whole()
    local, alike = value.detach(), True
    if is_dtensor(value):
        alike = is_dtensor(parameter) and value._spec.placements == parameter._spec.placements
        local = value._local_tensor
    if alike and local.shape == of.memory.shape:
        plain = local.as_subclass(torch.Tensor)
        return of._replace(name=name, dtype=element_type(name, plain.dtype), memory=plain, weight=None)
    return part_of(name, value)


def merged(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks, whose parameters may be others (pipeline stages)."""
    state: dict[str, Any] = {}
    for each in told:
        for name, entry in each["state"].items():
            if state.setdefault(name, entry) != entry:
                raise MismatchError(f"optimizer: the state of {name} has other keys or values on another rank")
    groups: list[dict[str, Any]] = [{"params": [], "options": group["options"]} for group in told[0]["param_groups"]]
    for each in told:
        if [group["options"] for group in each["param_groups"]] != [group["options"] for group in groups]:
            raise MismatchError("optimizer: its param_groups have other options on another rank")
        for group, more in zip(groups, each["param_groups"], strict=True):
            group["params"] = list(dict.fromkeys([*group["params"], *more["params"]]))
    return {"state": state, "param_groups": groups}


# --- plain values as JSON


def encoded(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [encoded(each, what) for each in value]}
    if isinstance(value, list):
        return [encoded(each, what) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encoded(each, what) for key, each in value.items()}}
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        return {"scalar": encoded(value.item(), what), "dtype": element_type(what, value.dtype)}
    raise InvalidArgumentError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: tensors, numbers, texts, and lists, "
        "tuples and dicts of them are possible"
    )


def decoded(value: Any) -> Any:
    """Raises ValueError for what encoded() does not give."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"float": str(text)} if text in ("inf", "-inf", "nan"):
            return float(text)
        case {"tuple": list(each)}:
            return tuple(map(decoded, each))
        case {"dict": dict(entries)}:
            return {key: decoded(each) for key, each in entries.items()}
        case {"scalar": scalar, "dtype": str(dtype)}:
            return torch.tensor(decoded(scalar), dtype=torch_dtype(dtype))
    raise ValueError(value)


# --- loading


class Saved(NamedTuple):
    """What an index has of an optimiser, checked."""

    tensors: dict[str, list[str]]  # keys by parameter
    values: dict[str, dict[str, Any]]
    groups: list[tuple[list[str], dict[str, Any]]]  # names and options
    kind: str = ""  # torch's class; empty: another one's


def saved_of(metadata: Mapping[str, Any], path: str) -> Saved:
    try:
        state, groups = metadata["state"], metadata["param_groups"]
        if not isinstance(groups, list):
            raise ValueError(groups)
        found = Saved(
            {name: [_text(key) for key in entry["tensors"]] for name, entry in state.items()},
            {name: {key: decoded(each) for key, each in entry["values"].items()} for name, entry in state.items()},
            [
                (
                    [_text(name) for name in group["params"]],
                    {key: decoded(each) for key, each in group["options"].items()},
                )
                for group in groups
            ],
            _text(metadata.get("kind", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        raise InvalidArgumentError(f"{path}: its metadata is no optimiser's that save() wrote") from None
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def require_groups(optimizer: torch.optim.Optimizer, names: list[str], saved: Saved, path: str) -> None:
    """That its groups hold the parameters of the saved ones; of a model's stage, those that it has."""
    own, at = [], 0
    for group in optimizer.param_groups:
        own.append(set(names[at : at + len(group["params"])]))
        at += len(group["params"])
    if len(own) != len(saved.groups):
        raise InvalidArgumentError(
            f"{path}: its optimiser has {len(saved.groups)} param_groups, and this one {len(own)}: make it with the "
            "same groups"
        )
    for number, (mine, (params, _)) in enumerate(zip(own, saved.groups, strict=True)):
        if not mine <= set(params):
            raise InvalidArgumentError(
                f"{path}: param_groups[{number}] has no {min(mine - set(params))}, which is in that of this optimiser: "
                "make it with the same groups"
            )


def require_optimizer(optimizer: torch.optim.Optimizer, saved: Saved, path: str) -> None:
    """Throw unless the saved state is one of this kind of optimiser."""
    own = kind_of(optimizer)
    if saved.kind and own and saved.kind != own:
        raise InvalidArgumentError(
            f"{path}: its optimiser is torch's {saved.kind}, and this one {type(optimizer).__name__}, whose state is "
            "another: make the optimiser that was saved; load(model, None, path) loads only the model"
        )
    keys = {name: {*saved.tensors[name], *saved.values.get(name, {})} for name in saved.tensors}
    require_kind(optimizer, keys.items(), path)
    require_options(optimizer, [options for _, options in saved.groups], path)


def state_tensor(key: str, dtype: str, shape: tuple[int, ...], of: Part, parameter: torch.Tensor) -> torch.Tensor:
    """Room for a state of this parameter: its type and cut where the shape is the parameter's, else the whole."""
    if shape != of.shape:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    if is_dtensor(parameter):
        return torch.empty_like(parameter, dtype=torch_dtype(dtype), requires_grad=False)
    return torch.empty(of.memory.shape, dtype=torch_dtype(dtype))
