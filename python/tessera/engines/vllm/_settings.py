"""Names, and what the environment says."""

from __future__ import annotations

import os

from ..._errors import InvalidArgumentError

BACKEND = "tessera"
NAMED_BY = "--model-loader-extra-config"
"""Where a server that loads from a trainer is given its name."""


def keeps_linears() -> bool:
    """Whether linears of a CPU stay as they are loaded."""
    return _flag("TESSERA_VLLM_CPU_IN_PLACE")


def copies_always() -> bool:
    """Whether what is installed in place is copied, even where pages could be exchanged."""
    return _flag("TESSERA_VLLM_COPY")


def _flag(name: str) -> bool:
    value = os.environ.get(name) or "0"
    if value not in ("0", "1"):
        raise InvalidArgumentError(f"{name} is {value!r}: give 0 or 1")
    return value == "1"
