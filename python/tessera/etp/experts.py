"""Weights that are gathered, published and reduced as one list."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from .._arguments import elements
from .._errors import InvalidArgumentError
from .anchors import TOLD_OF_INPUTS, led_to
from .matrix import acquire_experts
from .phase import Phase
from .weight import Weight


class Experts:
    """A list that the runtime knows. Used by one thread at a time."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weights = weights
        self.numbers = [each.number for each in weights]
        self.model = weights[0].model
        self._taken: dict[int, tuple[torch.Tensor, int]] = {}  # of the last gather(), by weight, until it is used
        self._use: tuple[Phase, bool, int] | None = None  # that it was for

    def gather(
        self, phase: Phase, expects_backward: bool = False, versions: list[int] | None = None
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Full weights, and their versions."""
        return acquire_experts(self.model, self.weights[0].name, self.numbers, phase, expects_backward, versions)

    def anchor(self) -> torch.Tensor:
        """What the graph of a use has in the place of those that train."""
        if TOLD_OF_INPUTS:
            return self.model.anchor
        return led_to(self.model.anchor, [each.parameter for each in self.weights if not each.frozen])

    def one(self, number: int, phase: Phase, expects_backward: bool) -> tuple[torch.Tensor, int]:
        """A full weight for one use, and its version: the first use of one of them gathers all, and the others wait
        for theirs. One that is used once more, or in another phase, begins again."""
        use = (phase, expects_backward, self.model.micro_batch)
        if self._use != use or number not in self._taken:
            self.clear()
            full, versions = self.gather(phase, expects_backward)
            self._taken = dict(zip(self.numbers, zip(full, versions, strict=True), strict=True))
            self._use = use
        return self._taken.pop(number)

    def clear(self) -> None:
        """Releases what was gathered and is not used."""
        self._taken.clear()


def expert_lists(
    experts: Iterable[Sequence[str]], shapes: Mapping[str, torch.Size], sharded: Collection[str]
) -> list[list[str]]:
    """Names of weights that are gathered together. Throws for what cannot be one list.

    Args:
        shapes: Of all parameters, by name.
        sharded: Names of those that are going to be sharded.
    """
    lists, seen = [], set()
    for names in elements("experts", experts, "lists of names of weights"):
        listed = elements("experts", names, "lists of names of weights")
        for name in listed:
            if name not in shapes or (sharded and name not in sharded):
                raise InvalidArgumentError(
                    f"experts: {name!r} is no weight that is sharded: give names of model.named_parameters()"
                )
            if name in seen:
                raise InvalidArgumentError(f"experts: {name} is named twice: a weight is in one list, once")
            seen.add(name)
            if shapes[name] != shapes[listed[0]]:
                raise InvalidArgumentError(
                    f"experts: {listed[0]} is {tuple(shapes[listed[0]])} and {name} {tuple(shapes[name])}: those of a "
                    "list have one shape"
                )
        if len(listed) > 1:
            lists.append(listed)
    return lists


def gather_together(weights: Iterable[Weight], lists: Iterable[Sequence[str]]) -> None:
    """Makes the lists known to the runtime of these weights, before it is started."""
    named = {each.name: each for each in weights}
    for names in lists:
        together = Experts([named[name] for name in names])
        together.model.runtime.add_experts(together.numbers)
        for each in together.weights:
            each.together = together
