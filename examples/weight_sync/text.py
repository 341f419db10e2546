"""Real text that comes with every Python: pairs of adjacent sentences of its reference documentation."""

import itertools
import platform
import re
from collections.abc import Mapping
from pydoc_data.topics import topics

LENGTHS = range(20, 201)  # characters of a sentence
ENOUGH = 200  # pairs


def pairs(text: Mapping[str, str] = topics) -> list[tuple[str, str]]:
    """The second follows the first in one paragraph of one topic. No sentence is in two pairs, even if the text
    repeats it: so it is never its own negative in a batch. All processes of one Python get the same pairs.

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
    """Without tables, lists, code and headings."""
    if not re.match(r"[A-Z]\S* [a-z\"]", paragraph) or re.search(r"\n   |\n\*\*|\n==|::=", paragraph):
        return []
    words = " ".join(re.sub(r"(?<=\w-)\n", "", paragraph).split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", words)


def _fits(sentence: str) -> bool:
    return len(sentence) in LENGTHS and sentence[-1] in ".!?"  # a colon introduces something that is left out
