"""Which parameters of a model are sharded, and as what: pure functions of names, shapes and arguments."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from .._arguments import choice, elements, pattern, text
from .._errors import InvalidArgumentError
from .digests import is_plain_tensor
from .making import is_plain
from .tensor import LogicalTensor
from .weight import can_shard

Filter = Callable[[str, torch.nn.Parameter], bool]
Pattern = str | re.Pattern[str]
Place = tuple[torch.nn.Module, str]
Named = Sequence[tuple[str, torch.nn.Parameter]]


class Chosen(NamedTuple):
    """How a weight is sharded."""

    format: str
    native: bool
    planes_only: bool  # native, and without a master


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which parameters are sharded, and how: arguments of shard_module_()."""

    ranks: int
    filter: Filter | None
    min_elements: int
    rules: list[tuple[re.Pattern[str], str]]
    natives: list[re.Pattern[str]]
    masters: str

    @staticmethod
    def of(
        ranks: int,
        filter: Filter | None,
        min_elements: int,
        formats: Mapping[Pattern, str],
        native: Iterable[Pattern],
        masters: str,
    ) -> Choice:
        """Check the arguments of shard_module_()."""
        if not isinstance(formats, Mapping):
            raise InvalidArgumentError(
                f"formats {reprlib.repr(formats)}: give a dict of regular expressions for names, and formats: "
                "{'.*': 'nvfp4'}"
            )
        rules = [(pattern("formats", key), text("formats", format)) for key, format in formats.items()]
        natives = [pattern("native", key) for key in elements("native", native, "a list of regular expressions")]
        return Choice(ranks, filter, min_elements, rules, natives, choice("masters", masters, ("all", "trained")))

    def rule_of(self, name: str) -> int | None:
        """Return the place of the format that a weight gets; None: it travels as it is."""
        return next((i for i, (rule, _) in enumerate(self.rules) if rule.fullmatch(name)), None)

    def of_parameter(self, name: str, parameter: torch.nn.Parameter) -> Chosen | None:
        """Return how a parameter is sharded; None: it stays whole."""
        if self.why_whole(name, parameter):
            return None
        rule = self.rule_of(name)
        format = "" if rule is None else self.rules[rule][1]
        if self.ranks == 1 and not format:
            return None
        is_native = any(each.fullmatch(name) for each in self.natives)
        if is_native and is_plain(format):
            raise InvalidArgumentError(
                f"native: {name} travels as {format or 'it is'}, and a native shard is quantised: give it a format "
                "such as 'nvfp4' in formats=, or no pattern in native="
            )
        return Chosen(format, is_native, is_native and self.masters == "trained" and not parameter.requires_grad)

    def why_whole(self, name: str, parameter: torch.nn.Parameter) -> str:
        """Say why a parameter cannot be, or is not to be, sharded; empty: it can."""
        kind = type(parameter)
        if kind is not torch.nn.Parameter and not issubclass(kind, LogicalTensor):
            return f"of class {kind.__name__}"  # whose methods see whole values
        if not is_plain_tensor(parameter):
            return f"of class {type(parameter.data).__name__}"
        if parameter.dim() < 2:
            return "of less than two dims"
        if not can_shard(parameter.dtype):
            return f"of {parameter.dtype}"
        if parameter.numel() < max(self.min_elements, 1):
            return f"of less than min_elements={self.min_elements}"
        if parameter.device.type not in ("cpu", "meta"):
            return f"on {parameter.device}"
        if self.filter is not None and not self.filter(name, parameter):
            return "left out by filter="
        return ""

    def of_model(self, named: Named) -> dict[str, Chosen]:
        """Return every weight that is to be sharded, by name. Throws if a pattern chooses nothing."""
        chosen: dict[str, Chosen] = {}
        for name, parameter in named:
            how = self.of_parameter(name, parameter)
            if how is not None:
                chosen[name] = how
        used = {self.rule_of(name) for name in chosen}
        for i, (rule, format) in enumerate(self.rules):
            if i not in used:
                raise InvalidArgumentError(
                    f"formats: {rule.pattern!r} ({format}) gives no weight its format: weights are "
                    f"{_some(name for name, _ in named)}; patterns are for whole names"
                )
        for each in self.natives:
            if not any(each.fullmatch(name) for name in chosen):
                raise InvalidArgumentError(
                    f"native: {each.pattern!r} names no weight that is sharded: weights are {_some(chosen)}; patterns "
                    "are for whole names"
                )
        if self.masters == "trained" and not any(each.planes_only for each in chosen.values()):
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
