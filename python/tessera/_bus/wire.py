"""Wire formats as a registration requests them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from .. import _core
from .._arguments import pattern, text
from .._errors import InvalidArgumentError
from .patterns import OptionalRules

# One format for all tensors that it fits; or by name on the bus, as a regular expression that matches all of it: the
# first match counts, and None means not quantised.
Wire: TypeAlias = str | Mapping[str, str | None]


def compile_wire(given: Wire | None) -> Callable[[str], str | None]:
    """Returns a function from a name on the bus to a format. Raises InvalidArgumentError, which lists the known formats
    for an unknown one."""
    if given is None:
        return lambda name: None
    if isinstance(given, str):
        for_all = _format("wire", given)
        return lambda name: for_all
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"wire {given!r}: give the name of a format, or {{regular expression of names: format, or None}}"
        )
    rules = [
        (pattern("wire: key", key), None if wire is None else _format(f"wire: {key!r}", wire))
        for key, wire in given.items()
    ]
    return lambda name: next((wire for known, wire in rules if known.fullmatch(name)), None)


def wire_by_position(given: str | Sequence[str | None] | None, count: int) -> Wire | None:
    """For tensors whose names are 0 to count - 1: one format for all, or one for each. Raises InvalidArgumentError."""
    if given is None:
        return None
    if isinstance(given, str):
        return given
    if not isinstance(given, Sequence):
        raise InvalidArgumentError(f"wire {given!r}: give the name of a format, or a list with one for each tensor")
    if len(given) != count:
        raise InvalidArgumentError(f"wire: {len(given)} formats for {count} tensors: give one for each, or one for all")
    return OptionalRules((str(position), wire) for position, wire in enumerate(given))  # each pair has some of them


def _format(where: str, wire: Any) -> str:
    if not isinstance(wire, str):
        raise InvalidArgumentError(f"{where} becomes {wire!r}: give the name of a format, or None")
    try:
        return _core.wire_format(text(where, wire))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error}, or None") from None
