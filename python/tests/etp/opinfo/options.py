"""What a run asks, as one value that a command line or a test makes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The settings of a run. Two runs of equal settings ask the same questions."""

    adapter: str = "tessera"
    fault: str = ""  # the name of one of faults.FAULTS, planted on every rank
    ranks: int = 2
    operations: int = 0  # how many are drawn by the seed; 0: all
    only: str = ""  # a regular expression that an operation's name matches
    modes: str = ""  # likewise for names of modes
    seed: int = 0
    samples: int = 2  # how many of an operation
    differ: bool = False  # plain float arguments and generators differ between ranks
    numbers: bool = False  # Python floats differ between ranks
    grad: bool = False  # gradients are compared; cotangents differ between ranks
    alarm: float = 10.0  # seconds after which a call hangs
    chunk: int = 20  # operations that ranks answer before others are forked

    def seed_of(self, rank: int) -> int:
        """Return the seed of a rank's generator."""
        return self.seed + 1 + (rank if self.differ else 0)

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)
