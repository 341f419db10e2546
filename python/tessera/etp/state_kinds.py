"""Kinds of optimisers, by what their states hold: another kind's state is refused when it is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from .._errors import InvalidArgumentError

# What torch's own keep of each parameter, and what some of their options add.
_KEYS: dict[str, tuple[str, str]] = {
    "ASGD": ("step eta mu ax", ""),
    "Adadelta": ("step square_avg acc_delta", ""),
    "Adafactor": ("step", "row_var col_var variance"),
    "Adagrad": ("step sum", ""),
    "Adam": ("step exp_avg exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("step exp_avg exp_avg_sq", "max_exp_avg_sq"),
    "Adamax": ("step exp_avg exp_inf", ""),
    "Muon": ("momentum_buffer", ""),
    "NAdam": ("step mu_product exp_avg exp_avg_sq", ""),
    "RAdam": ("step exp_avg exp_avg_sq", ""),
    "RMSprop": ("step square_avg", "momentum_buffer grad_avg"),
    "Rprop": ("step prev step_size", ""),
    "SGD": ("", "momentum_buffer"),
    "SparseAdam": ("step exp_avg exp_avg_sq", ""),
}
_KNOWN = frozenset(key for each in _KEYS.values() for text in each for key in text.split())  # programs add others
_CLASS_OPTIONS = ("decoupled_weight_decay",)  # make another class of one


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of torch's class whose step it makes; empty: another one's."""
    if not _is_torchs(getattr(type(optimizer).step, "__module__", "")):
        return ""
    return next((each.__name__ for each in type(optimizer).__mro__ if _is_torchs(each.__module__)), "")


def _is_torchs(module: str) -> bool:
    """Tell whether a module is torch.optim or one of its own: some classes say one, some the other."""
    return f"{module}.".startswith("torch.optim.")


def shapes_are_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether each of its states that has dims has an element for each of the parameter's."""
    return kind_of(optimizer) not in ("", "Adafactor", "LBFGS", "Muon")


def require_kind(optimizer: torch.optim.Optimizer, keys: Iterable[tuple[str, Collection[str]]], where: str) -> None:
    """Throw if a state is another kind's.

    Args:
        keys: Of each parameter that has a state, its name and what the state holds.
        where: In messages: what the state is of.
    """
    kind = kind_of(optimizer)
    if kind not in _KEYS:
        return
    needed, optional = (set(each.split()) for each in _KEYS[kind])
    for name, found in keys:
        present = set(found)
        if not present:
            continue
        missing, strange = sorted(needed - present), sorted((present & _KNOWN) - needed - optional)
        if missing or strange:
            parts = [f"lacks {', '.join(missing)}" if missing else "", f"has {', '.join(strange)}" if strange else ""]
            raise InvalidArgumentError(
                f"{where}: it is the state of another kind of optimiser than {type(optimizer).__name__}: that of "
                f"{name} {' and '.join(filter(None, parts))}: load it into an optimiser of the class that saved it; "
                "nothing was loaded"
            )


def require_options(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], where: str) -> None:
    """Throw if the options of its groups are another kind's."""
    for number, group in enumerate(groups):
        missing = _missing(optimizer, group)
        if missing:
            raise InvalidArgumentError(
                f"{where}: it is the state of another kind of optimiser than {type(optimizer).__name__}: "
                f"param_groups[{number}] lacks {', '.join(missing)}: load it into an optimiser of the class that saved "
                "it; nothing was loaded"
            )
        for option in _CLASS_OPTIONS:
            own = optimizer.defaults.get(option)
            if option in group and own is not None and bool(group[option]) is not bool(own) and kind_of(optimizer):
                raise InvalidArgumentError(
                    f"{where}: {option} is {group[option]} in its param_groups[{number}], and {own} of this "
                    f"{type(optimizer).__name__}: Adam and AdamW are two kinds of optimisers: make the one that was "
                    "saved; nothing was loaded"
                )


def _missing(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Return options that nobody would give the group: a class sets those that it has got later by itself, and torch
    adds some to the defaults of an optimiser that is loaded, which only groups that are added later have."""
    own = set.intersection(*[set(each) for each in optimizer.param_groups])
    missing = [option for option in optimizer.defaults if option not in group and option in own]
    if not missing:
        return []
    probe = object.__new__(type(optimizer))
    probe.defaults = dict(optimizer.defaults)
    given = dict(group, params=[])
    try:
        probe.__setstate__({"state": {}, "param_groups": [given]})
    except Exception:  # it needs more of the optimiser than a probe has
        return []
    return [option for option in missing if option not in given]
