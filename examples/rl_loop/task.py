"""What is learnt, a text, and how a sample of the model is scored."""

import functools
import pathlib
import re
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "weight_sync"))
from text import pairs

LENGTH = 64  # tokens of a sample, and of a window of the text
SAMPLES = 8  # of every version
PROMPT = "The "  # what a sample begins with
WORD = r"[A-Za-z]{2,}"


@functools.cache
def text() -> str:
    """Sentences of Python's own documentation, one a line."""
    sentences = "\n".join(sentence for pair in pairs() for sentence in pair)
    return sentences.encode("ascii", "ignore").decode()


@functools.cache
def words() -> frozenset[str]:
    return frozenset(re.findall(WORD, text()))


def encode(characters: str) -> torch.Tensor:
    return torch.tensor(list(characters.encode("ascii")))


def decode(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode("ascii")


def score(written: str) -> float:
    """The share of its characters that belong to words of the text; a word counts once, so repeating it gains nothing.
    Sentences of the text itself get about 0.7."""
    found = set(re.findall(WORD, written)) & words()
    return sum(map(len, found)) / len(written)
