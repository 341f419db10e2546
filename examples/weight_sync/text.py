"""Real text that every Python has: pairs of adjacent sentences of its own reference documentation."""

import itertools
import platform
import re
from collections.abc import Mapping
from pydoc_data.topics import topics

LENGTHS = range(20, 201)  # characters of a sentence
ENOUGH = 200  # pairs


def pairs(text: Mapping[str, str] = topics) -> list[tuple[str, str]]:
    """The second follows the first in one paragraph of one topic. No sentence is in two pairs, however often the text
    repeats it: among the pairs of any batch it is nowhere its own negative. The same in every process of one Python.

    RuntimeError if there are too few.
    """
    found: list[tuple[str, str]] = []
    taken: set[str] = set()
    for topic in text.values():
        for paragraph in topic.split("\n\n"):
            for pair in itertools.pairwise(_sentences(paragraph)):
                if pair[0] != pair[1] and taken.isdisjoint(pair) and all(map(_fits, pair)):
                    found.append(pair)
                    taken.update(pair)
    if len(found) < ENOUGH:
        raise RuntimeError(
            f"pydoc_data.topics of Python {platform.python_version()} has {len(found)} pairs of adjacent sentences, "
            f"and {ENOUGH} are wanted: take another Python, or another text in {__file__}"
        )
    return found


def _sentences(paragraph: str) -> list[str]:
    """None of tables, lists, code and headings."""
    if not re.match(r"[A-Z]\S* [a-z\"]", paragraph) or re.search(r"\n   |\n\*\*|\n==|::=", paragraph):
        return []
    words = " ".join(re.sub(r"(?<=\w-)\n", "", paragraph).split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", words)


def _fits(sentence: str) -> bool:
    return len(sentence) in LENGTHS and sentence[-1] in ".!?"  # a colon leads to what is left out
