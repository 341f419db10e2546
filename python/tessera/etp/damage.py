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
        self._unpublished: weakref.WeakSet[Any] = weakref.WeakSet()  # of these

    def add(self, weights: Iterable[Any], why: str, until_published: bool = False) -> None:
        """Refuse their uses until they are loaded, or published. Those that are damaged already keep their first
        reason."""
        added = {weight: why for weight in weights if weight not in self._reasons}
        self._reasons |= added
        if until_published:
            self._unpublished.update(added)

    def mend_published(self, weights: Iterable[Any]) -> None:
        """Weights have been published: all of their values are finite."""
        if self._unpublished:
            self.mend([weight for weight in weights if weight in self._unpublished])

    def mend(self, weights: Iterable[Any]) -> None:
        """Weights have been loaded."""
        for weight in weights:
            self._reasons.pop(weight, None)
            self._unpublished.discard(weight)

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
