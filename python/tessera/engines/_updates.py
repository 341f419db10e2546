"""What a trainer is told of updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ANOTHER_FAILED = "another rank failed"
"""What a rank says that is well, and goes back with one that is not."""
_MOST_NAMED = 4
Ranks = Sequence[Mapping[str, Any]]
"""What each rank of an engine says."""


@dataclass(frozen=True)
class EngineUpdate:
    """What came of an update in one server.

    Attributes:
        ok: Whether all its ranks serve the new version. If not, all serve the one before; or the server is left paused,
            which `error` then says, as a copy into place has failed for good, or as its ranks do not say what they
            hold. The next send() that works ends it.
        version: The version that it serves; None if it does not say.
        error: Why not.
        pause: Seconds in which no request ran.
        run: Trainer.run of the trainer that sent this version: after a restart it may be an earlier one.
        ranks: What each rank said.
    """

    ok: bool
    version: int | None
    error: str = ""
    pause: float = 0.0
    run: str = ""
    ranks: Ranks = field(default=(), repr=False)


def told(errors: Iterable[tuple[int, str]]) -> str:
    """What ranks say, of pairs (rank, error): of those that know why, if there are some. Empty for none."""
    said = [f"rank {rank}: {error}" for rank, error in errors]
    known = [each for each in said if not each.endswith(ANOTHER_FAILED)] or said[:1]
    return "; ".join(known[:_MOST_NAMED])


def mixed(error: str, left: str = "the server is left paused") -> str:
    """The same of an engine whose ranks hold weights of two versions. `left`: what that means for it."""
    return f"{error or 'ranks differ'}; weights of two versions are mixed, and {left}"
