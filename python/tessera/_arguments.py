"""Checks of arguments: an error names the argument, its value, and what is possible."""

from __future__ import annotations

import math
import operator
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from ._errors import InvalidArgumentError

MAX_SECONDS = 30 * 24 * 3600  # as in the core
_LARGEST = (1 << 63) - 1


def text(what: str, value: Any) -> str:
    """A str that can be written as UTF-8."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{what} {_shown(value)}: give a str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            f"{what} {_shown(value)}: it has a lone surrogate, which is not a character"
        ) from None
    return value


def optional_text(what: str, value: Any) -> str:
    """The same, or None: empty."""
    return "" if value is None else text(what, value)


def whole(what: str, value: Any, lowest: int = -_LARGEST, highest: int = _LARGEST) -> int:
    """An int, or what Python converts to one, such as NumPy's integers."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{what} {_shown(value)}: give a whole number") from None
    if isinstance(value, bool) or not lowest <= number <= highest:
        raise InvalidArgumentError(f"{what} {_shown(value)}: give a whole number from {lowest} to {highest}")
    return number


def seconds(what: str, value: Any) -> float:
    """How long to wait. Every wait has a deadline: infinity is refused."""
    try:
        number = float(value) if hasattr(value, "__float__") or hasattr(value, "__index__") else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not 0 <= number <= MAX_SECONDS:
        ends = "every wait has a deadline: " if number == math.inf else ""
        raise InvalidArgumentError(f"{what} {_shown(value)}: {ends}give seconds, 0 to {MAX_SECONDS} (30 days)")
    return number


def positive(what: str, value: Any) -> float:
    """A finite number above 0."""
    try:
        number = float(value) if hasattr(value, "__float__") or hasattr(value, "__index__") else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise InvalidArgumentError(f"{what} {_shown(value)}: give a number above 0")
    return number


def flag(what: str, value: Any) -> bool:
    """A bool, or NumPy's."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise InvalidArgumentError(f"{what} {_shown(value)}: give True or False")
    return bool(value)


def choice(what: str, value: Any, possible: Sequence[str]) -> str:
    """One of several names."""
    if not isinstance(value, str) or value not in possible:
        raise InvalidArgumentError(f"{what} {_shown(value)}: {' and '.join(map(repr, possible))} are possible")
    return value


def sizes(what: str, value: Any, *, or_one: bool = False) -> tuple[int, ...]:
    """A shape: a sequence of sizes, or one number for a single dim."""
    try:
        found = tuple(map(operator.index, [value] if or_one and hasattr(value, "__index__") else value))
    except TypeError:
        raise InvalidArgumentError(f"{what} {_shown(value)}: give whole numbers") from None
    if not all(0 <= size <= _LARGEST for size in found):
        raise InvalidArgumentError(f"{what} {found}: sizes are 0 or more, and less than 2^63")
    return found


def pattern(what: str, value: Any) -> re.Pattern[str]:
    """A regular expression for whole names, compiled or not."""
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        return value
    try:
        return re.compile(text(what, value))
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidArgumentError(f"{what} {_shown(value)} is not a regular expression: {error}") from None


def function(what: str, value: Any) -> Any:
    """Something that can be called, or None."""
    if value is not None and not callable(value):
        raise InvalidArgumentError(f"{what} {_shown(value)}: give a function")
    return value


def real(what: str, value: Any) -> float:
    """A float, or what Python converts to one, such as a tensor of one element; no text."""
    try:
        return float(value) if hasattr(value, "__float__") or hasattr(value, "__index__") else float(None)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InvalidArgumentError(f"{what} {_shown(value)}: give a number") from None


def elements(what: str, value: Any, of: str) -> list[Any]:
    """An iterable that is not a text, as a list."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidArgumentError(f"{what} {_shown(value)}: give {of}")
    return list(value)


def _shown(value: Any) -> str:
    return reprlib.repr(value)
