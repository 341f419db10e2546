"""Live weights in engines that serve or train: maps that are learned from their own loaders.

It needs torch. Nothing here imports an engine.
"""

from __future__ import annotations

from ._learn import LearnedMap, Piece, Slice, learn_map, on_meta
from ._live import Agree, Change, LiveWeights, Plan, Serving, Verdict, one_rank
from ._vote import StoreVote

__all__ = [
    "Agree",
    "Change",
    "LearnedMap",
    "LiveWeights",
    "Piece",
    "Plan",
    "Serving",
    "Slice",
    "StoreVote",
    "Verdict",
    "learn_map",
    "on_meta",
    "one_rank",
]
