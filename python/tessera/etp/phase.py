"""When a weight is used."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The part of a step that a use of a weight belongs to; the values are the runtime's names."""

    FORWARD = "fwd"
    BACKWARD = "bwd"
    RECOMPUTE = "recompute"  # a forward within a backward, such as a checkpoint's
