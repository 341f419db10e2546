"""Live weights in engines that serve or train: maps that are learned from their own loaders.

It needs torch. Nothing here imports an engine.
"""

from __future__ import annotations

from ._learn import LearnedMap, Piece, Slice, learn_map, on_meta
from ._live import Agree, Change, LiveWeights, Plan, Verdict

__all__ = [
    "Agree",
    "Change",
    "LearnedMap",
    "LiveWeights",
    "Piece",
    "Plan",
    "Slice",
    "Verdict",
    "learn_map",
    "on_meta",
]
