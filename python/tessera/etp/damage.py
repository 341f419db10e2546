"""Weights that are written in part: whoever uses them is refused by name until they are loaded."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from .._errors import InvalidArgumentError

WAY_OUT = (
    "Load a state of model and optimiser before they are used again (load_state_dict(), tessera.checkpoint): on all "
    "ranks a part is written"
)


class Damage:
    """The damaged weights of one model, each with how that came."""

    def __init__(self) -> None:
        self._reasons: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def add(self, weights: Iterable[Any], why: str) -> None:
        """Refuse their uses until they are loaded. Those that are damaged already keep their first reason."""
        self._reasons |= {weight: why for weight in weights if weight not in self._reasons}

    def mend(self, weights: Iterable[Any]) -> None:
        """Weights have been loaded."""
        for weight in weights:
            self._reasons.pop(weight, None)

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def refuse(self) -> None:
        """Throw if there is any that a module has."""
        for weight in list(self._reasons):
            if not weight.departed:
                self.refuse_use(weight)

    def refuse_use(self, weight: Any) -> None:
        """Throw if this one is damaged."""
        why = self._reasons.get(weight)
        if why is not None:
            raise InvalidArgumentError(f"{weight.name} is damaged: {why}. {WAY_OUT}")

    @property
    def reasons(self) -> Mapping[Any, str]:
        return self._reasons
