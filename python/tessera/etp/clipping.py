"""Calls of torch.nn.utils.clip_grad_norm_(), as operations on gradients see them.

It takes their norms one after another, and multiplies them one after another. All ranks make the call; they need not
meet for each of these operations, but once.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .tensor import is_sharded

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}
_DEPTH = 16  # frames between it and an operation's rule


def is_gradient(tensor: Any) -> bool:
    """Tell whether a tensor has all rows of what goes with a weight, and is neither the weight itself nor a state, nor
    made of these."""
    return (
        is_sharded(tensor)
        and tensor.store.weight is None
        and not tensor.store.saved
        and (tensor.store.shared is not None or not tensor.store.asks_nobody())
        and tensor.rows is not None
        and tensor.rows.is_contiguous()
        and not tensor.chain
        and tensor.dtype in NAMES
        and tensor.etp is not None
        and not tensor.requires_grad
    )


def is_clipping() -> bool:
    """Tell whether this operation is a part of torch's clip_grad_norm_()."""
    frame, depth = sys._getframe(1), 0
    while frame is not None and depth < _DEPTH:
        if frame.f_code.co_name == "clip_grad_norm_" and frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
            return True
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return False
