"""Which parameters of a model are sharded, and as what: pure functions of names, shapes and arguments."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from .._arguments import choice, elements, pattern
from .._errors import InvalidArgumentError
from ._making import is_plain
from ._weights.weight import can_shard

Filter = Callable[[str, torch.nn.Parameter], bool]
Pattern = str | re.Pattern[str]
Place = tuple[torch.nn.Module, str]
Named = Sequence[tuple[str, torch.nn.Parameter]]


class Chosen(NamedTuple):
    """How a weight is sharded."""

    format: str
    native: bool
    planes_only: bool  # native, and without a master


def choose(
    named: Named,
    ranks: int,
    filter: Filter | None,
    min_elements: int,
    formats: Mapping[Pattern, str],
    native: Iterable[Pattern],
    masters: str,
) -> dict[str, Chosen]:
    """Every weight that is to be sharded, by name; the arguments are those of shard_module_()."""
    rules = [(pattern("formats", key), format) for key, format in formats.items()]
    natives = [pattern("native", key) for key in elements("native", native, "a list of regular expressions")]
    masters = choice("masters", masters, ("all", "trained"))
    used: set[int] = set()
    chosen: dict[str, Chosen] = {}
    for name, parameter in named:
        if parameter.dim() < 2 or not can_shard(parameter.dtype) or parameter.numel() < min_elements:
            continue
        if filter is not None and not filter(name, parameter):
            continue
        format = ""
        for i, (rule, candidate) in enumerate(rules):
            if rule.fullmatch(name):
                format = candidate
                used.add(i)
                break
        if ranks > 1 or format:
            is_native = any(each.fullmatch(name) for each in natives)
            if is_native and is_plain(format):
                raise InvalidArgumentError(
                    f"native: {name} travels as {format or 'it is'}, and a native shard is quantised: give it a format "
                    "such as 'nvfp4' in formats=, or no pattern in native="
                )
            planes_only = is_native and masters == "trained" and not parameter.requires_grad
            chosen[name] = Chosen(format, is_native, planes_only)
    for i, (rule, format) in enumerate(rules):
        if i not in used:
            raise InvalidArgumentError(
                f"formats: {rule.pattern!r} ({format}) gives no weight its format: weights are "
                f"{_some(name for name, _ in named)}; patterns are for whole names"
            )
    for each in natives:
        if not any(each.fullmatch(name) for name in chosen):
            raise InvalidArgumentError(
                f"native: {each.pattern!r} names no weight that is sharded: weights are {_some(chosen)}; patterns are "
                "for whole names"
            )
    if masters == "trained" and not any(each.planes_only for each in chosen.values()):
        raise InvalidArgumentError(
            "masters='trained': no native weight is frozen: name some in native=, and freeze them by "
            "requires_grad_(False) before shard_module_()"
        )
    return chosen


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} others" if len(found) > 3 else "")


class Shapes(NamedTuple):
    """What is a matrix and what a stack of experts."""

    places: dict[int, list[Place]]  # by parameter: which modules have it, and by which names
    stacks: Filter | None

    @staticmethod
    def of(model: torch.nn.Module, stacks: Filter | None) -> Shapes:
        places: dict[int, list[Place]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, name))
        return Shapes(places, stacks)

    def is_stack(self, name: str, full: torch.nn.Parameter, places: list[Place]) -> bool:
        if full.dim() != 3 or full.shape[0] < 2:
            return False
        if self.stacks is not None:
            return bool(self.stacks(name, full))
        return not any(_is_torchs(module) for module, _ in places)

    def require_matrices(self, named: Named, lists: Iterable[Collection[str]]) -> None:
        """Throws if a stack is in a list of experts."""
        wanted = set(itertools.chain.from_iterable(lists))
        for name, parameter in named:
            if name in wanted and self.is_stack(name, parameter, self.places[id(parameter)]):
                raise InvalidArgumentError(
                    f"experts: {name} is a stack of experts, which is a list by itself: leave it out, or say in "
                    "stacks= that it is none"
                )


def matrix_of(shape: torch.Size, places: list[Place]) -> torch.Size:
    """What is cut along dim 0: an output's weights are a row."""
    convolves = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module, _ in places)
    columns = math.prod(shape[1:]) if convolves else shape[-1]
    return torch.Size((math.prod(shape) // columns, columns))


def _is_torchs(module: torch.nn.Module) -> bool:
    """Whether torch says what its parameters are for."""
    contains = isinstance(module, (torch.nn.ParameterList, torch.nn.ParameterDict))
    return type(module).__module__.startswith("torch.nn.") and not contains
