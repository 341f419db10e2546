"""Patterns of names that match nothing, which are refused: a mistyped one would leave out, rename or quantise nothing.

A rank cannot tell alone: of a pipeline's stages, each has other names. So every rank reports its patterns, and which
match a name there; a pattern that matches on no rank is refused on all of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from .._arguments import pattern
from .._errors import InvalidArgumentError

# Matches, by option and pattern: None if it matches a name of this rank; else the names here that are nearest to it.
Reported = Mapping[str, Mapping[str, list[str] | None]]

_SHOWN = 3  # names in an error
_COMPARED = 512  # names, at most, with a mistyped pattern: the layers of a model count once


class OptionalRules(dict[str, Any]):
    """Rules by pattern that may match nothing."""


class OptionalNames(list[Any]):
    """Patterns that may match nothing."""


def optional(patterns: Any) -> Any:
    """Marks patterns for register() as ones that may match nothing, such as rules that several models share.

    Args:
        patterns: For wire= and map=: {regular expression of names: ...}. For only= and ignore=: a list of regular
            expressions.

    Returns:
        An equal dict, or a list. Anything else, such as a function or a format for all tensors, comes back as it is.
    """
    if isinstance(patterns, Mapping):
        return OptionalRules(patterns)
    return OptionalNames(patterns) if isinstance(patterns, list | tuple) else patterns


def report(what: str, patterns: Any, names: Collection[str], ignored: Collection[str] = ()) -> Reported:
    """This rank's part of what require_matches() compares, for one option.

    Args:
        what: The option: only, ignore, map or wire.
        patterns: What it was given. A function, a format for all tensors and optional() have no patterns to match.
        names: The names that it is about.
        ignored: Names that the other options leave out. A pattern that matches one of these is no mistake.
    """
    if isinstance(patterns, OptionalRules | OptionalNames) or patterns is None or callable(patterns):
        return {}
    if isinstance(patterns, str):
        patterns = () if what == "wire" else [patterns]
    reported: dict[str, list[str] | None] = {}
    for given in patterns:
        known = pattern(what, given)
        text = known.pattern
        is_name = text in names and (what == "map" or known.fullmatch(text))  # a map's key may be a name as it is
        matches = is_name or any(known.fullmatch(name) for some in (names, ignored) for name in some)
        reported[text] = None if matches else nearest(text, names)
    return {what: reported} if reported else {}


def require_matches(reports: Sequence[Reported]) -> None:
    """Raises InvalidArgumentError, which names all of them, for patterns that match a name on none of the ranks that
    were given them."""
    near: dict[tuple[str, str], list[str]] = {}
    matched = set()
    for of_rank in reports:
        for what, patterns in of_rank.items():
            for text, names in patterns.items():
                if names is None:
                    matched.add((what, text))
                else:
                    near.setdefault((what, text), []).extend(names)
    wrong = {key: names for key, names in near.items() if key not in matched}
    if not wrong:
        return
    shown = "; ".join(f"{what}: {text!r} ({_listed(text, names)})" for (what, text), names in list(wrong.items())[:8])
    more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
    raise InvalidArgumentError(
        f"patterns that match no name on any rank: {shown}{more}. A pattern matches whole names: '.*weight', not "
        "'weight'; tessera.maps.optional() marks those that may match nothing"
    )


def nearest(text: str, names: Iterable[str]) -> list[str]:
    """The names that are most like a pattern, the best first."""
    by_shape = {re.sub(r"\d+", "0", name): name for name in reversed(list(names))}
    return _best(text, list(by_shape.values())[::-1][:_COMPARED])


def _best(text: str, names: Iterable[str]) -> list[str]:
    words = re.sub(r"\\[dwsDWSb]|\\(?=.)|[\^$*+?{}\[\]|()]", "", text)
    return sorted(dict.fromkeys(names), key=_likeness(words), reverse=True)[:_SHOWN]


def _likeness(words: str) -> Callable[[str], tuple[float, float]]:
    """Returns a key: how much of `words` a name has, in one piece and in all; then how much else it has."""
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(words)

    def key(name: str) -> tuple[float, float]:
        matcher.set_seq1(name)
        sizes = [block.size for block in matcher.get_matching_blocks()]
        return float(sum(sizes) + max(sizes)), matcher.ratio()

    return key


def _listed(text: str, names: Sequence[str]) -> str:
    best = _best(text, names)
    return f"nearest: {', '.join(best)}" if best else "there are no names"


def read(value: Any) -> Reported:
    """Another rank's report: untrusted. Raises TypeError, ValueError or AttributeError."""
    for patterns in value.values():
        for names in patterns.values():
            if names is not None and not all(isinstance(name, str) for name in names):
                raise TypeError
    reported: Reported = value
    return reported
