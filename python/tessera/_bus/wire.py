"""Formats that tensors are quantised to on their way, as a registration asks for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from .. import _core
from .._errors import InvalidArgumentError

# By name on the bus, a regular expression of the whole of it, the first that matches; None: as it is.
Wire: TypeAlias = Mapping[str, str | None]


def compile_wire(given: Wire | None) -> Callable[[str], str | None]:
    """As a function from a name on the bus to a format. Raises InvalidArgumentError; for an unknown format it lists
    those there are."""
    if given is None:
        return lambda name: None
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"wire {given!r}: give {{regular expression of names: format, or None}}")
    rules = []
    for key, wire in given.items():
        try:
            pattern = re.compile(key)
        except (re.error, TypeError) as error:
            raise InvalidArgumentError(f"wire: key {key!r} is no regular expression: {error}") from None
        rules.append((pattern, None if wire is None else _format(key, wire)))
    return lambda name: next((wire for pattern, wire in rules if pattern.fullmatch(name)), None)


def wire_by_position(given: str | Sequence[str | None] | None, count: int) -> Wire | None:
    """Of tensors whose names are 0 to count - 1: one format for all, or one for each. Raises InvalidArgumentError."""
    if given is None:
        return None
    if isinstance(given, str):
        return {".*": given}
    if not isinstance(given, Sequence):
        raise InvalidArgumentError(f"wire {given!r}: give the name of a format, or a list with one for each tensor")
    if len(given) != count:
        raise InvalidArgumentError(f"wire: {len(given)} formats for {count} tensors: give one for each, or one for all")
    return {str(position): wire for position, wire in enumerate(given)}


def _format(key: str, wire: str) -> str:
    if not isinstance(wire, str):
        raise InvalidArgumentError(f"wire: {key!r} becomes {wire!r}: give the name of a format, or None")
    try:
        return _core.wire_format(wire)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"wire: {key!r}: {error}, or None") from None
