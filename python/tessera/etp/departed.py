"""Weights that have left their model, for as long as somebody has them.

A program may hold the parameter of a head that it has replaced, train it on, and put it back. The runtime may free a
weight's rows only where no rank will use it again, and objects die at other times on other ranks. So each rank tells
the runtime what has died here, and that frees what all ranks have told.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .weight import Weight


class Departed:
    """Those of one model. It keeps none of them alive, but those whose gradients the runtime adds now.

    Attributes:
        had_any: Some weight has left: the same on all ranks.
    """

    def __init__(self) -> None:
        self.had_any = False
        self._numbers: dict[weakref.ref[Weight], list[int]] = {}  # the runtime's
        self._dead: list[int] = []
        self._receiving: dict[int, Weight] = {}

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def add(self, weight: Weight) -> None:
        """Note that a weight is in no module of its model any longer."""
        self.had_any = True
        self._numbers[weakref.ref(weight, self._note_death)] = list(weight.numbers)

    def discard(self, weight: Weight) -> None:
        """Note that a weight has come back."""
        self._numbers.pop(weakref.ref(weight), None)

    def alive(self) -> list[Weight]:
        """Return those that somebody has, in the order in which they left."""
        return [weight for weight in (reference() for reference in list(self._numbers)) if weight is not None]

    def take_dead(self) -> list[int]:
        """Return the runtime's numbers of those that have died, once."""
        dead, self._dead = self._dead, []
        return dead

    def receive(self, weight: Weight, receives: bool) -> None:
        """Keep a weight alive while the runtime adds to memory of it."""
        if receives:
            self._receiving[weight.number] = weight
        else:
            self._receiving.pop(weight.number, None)

    def _note_death(self, reference: weakref.ref[Weight]) -> None:
        """Note a death, in whichever thread it comes."""
        self._dead += self._numbers.pop(reference, ())
