"""What a trainer is told of updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Ranks = Sequence[Mapping[str, Any]]
"""What each rank of an engine says."""


@dataclass(frozen=True)
class EngineUpdate:
    """What came of an update in one server.

    Attributes:
        ok: Whether all its ranks serve the new version. If not, all serve the one before; or the server is left paused,
            which `error` then says, as a copy into place has failed for good. The next send() ends it.
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
