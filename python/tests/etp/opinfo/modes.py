"""The ways in which an operation is called."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Call(enum.Enum):
    """The variant of an operation."""

    FUNCTION = enum.auto()
    METHOD = enum.auto()
    OPERATOR = enum.auto()
    INPLACE = enum.auto()
    INPLACE_OPERATOR = enum.auto()


class Effect(enum.Enum):
    """What a mode writes."""

    NONE = enum.auto()
    ARGUMENT = enum.auto()  # the operation writes an argument: in place, or out=
    RESULT = enum.auto()  # the caller writes into the results, which arguments must show exactly if they share memory


@dataclass(frozen=True)
class Mode:
    name: str
    call: Call = Call.FUNCTION
    in_forward: bool = False  # within a forward of the module that has the parameters
    graph: bool = False
    effect: Effect = Effect.NONE
    inference: bool = False

    @property
    def writes(self) -> bool:
        return self.effect is not Effect.NONE


# Modes that write come last: the parameters are sharded again after each of them.
MODES = (
    Mode("forward", in_forward=True, graph=True),
    Mode("outside, grad", graph=True),
    Mode("method, forward", Call.METHOD, in_forward=True, graph=True),
    Mode("operator, forward", Call.OPERATOR, in_forward=True, graph=True),
    Mode("outside, no_grad"),
    Mode("outside, inference", inference=True),
    Mode("write into results", effect=Effect.RESULT),
    Mode("in place, outside", Call.INPLACE, effect=Effect.ARGUMENT),
    Mode("in place, forward", Call.INPLACE, in_forward=True, effect=Effect.ARGUMENT),
    Mode("operator in place", Call.INPLACE_OPERATOR, effect=Effect.ARGUMENT),
)
OUT = Mode("out=", effect=Effect.ARGUMENT)
