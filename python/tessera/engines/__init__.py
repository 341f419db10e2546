"""Live weights in engines that serve or train: maps that are learned from their own loaders.

It needs torch. Nothing here imports an engine.
"""

from __future__ import annotations

from ._learn import LearnedMap, Piece, Slice, learn_map, on_meta
from ._live import Agree, Change, LiveWeights, Plan, Serving, one_rank
from ._updates import EngineUpdate, RankStatus, Verdict
from ._vote import StoreVote

__all__ = [
    "Agree",
    "Change",
    "EngineUpdate",
    "LearnedMap",
    "LiveWeights",
    "Piece",
    "Plan",
    "RankStatus",
    "Serving",
    "Slice",
    "StoreVote",
    "Verdict",
    "learn_map",
    "on_meta",
    "one_rank",
]
