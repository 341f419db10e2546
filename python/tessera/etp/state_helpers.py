"""torch.distributed.checkpoint's helpers, get_model_state_dict() and its like, on sharded models.

They know DTensors, whose parts full_state_dict=True gathers, and take every other tensor for whole. A LogicalTensor is
whole to whoever reads it, but follows the training: what a helper is asked to gather becomes a plain tensor.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from .tensor import LogicalTensor

_HELPERS = "torch.distributed.checkpoint.state_dict"
_STEP = "_maybe_full_or_cpu_state_dict"  # the last step of a helper that gets a state


def watch_helpers() -> None:
    """Have the helpers gather logical tensors. Called where a state is asked for, as nobody imports them for a model
    that is not saved by them."""
    module = sys.modules.get(_HELPERS)
    torchs = getattr(module, _STEP, None)
    if module is None or torchs is None or getattr(torchs, "gathers_logical", False):
        return

    @functools.wraps(torchs)
    def gathered(state_dict: dict[str, Any], info: Any) -> Any:
        if info.full_state_dict:
            ranked = torch.distributed.is_available() and torch.distributed.is_initialized()
            keeps = not info.cpu_offload or not ranked or torch.distributed.get_rank() == 0
            with torch.no_grad():
                state_dict = _whole(state_dict, keeps, {})
        return torchs(state_dict, info)

    gathered.gathers_logical = True  # type: ignore[attr-defined]
    setattr(module, _STEP, gathered)


def _whole(value: Any, keeps: bool, made: dict[Any, torch.Tensor | None]) -> Any:
    """Return a state with plain tensors in the place of logical ones, one for tied ones. `keeps`: whether this rank
    gets them; else it takes part only in gathers that need it."""
    if isinstance(value, dict):
        return {key: _whole(each, keeps, made) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_whole(each, keeps, made) for each in value)
    if not isinstance(value, torch.Tensor) or not hasattr(value, "whole"):  # neither LogicalTensor nor UncutState
        return value
    key = value.store if isinstance(value, LogicalTensor) and not value.chain else id(value)
    if key not in made:
        alone = isinstance(value, LogicalTensor) and value.store.asks_nobody()
        whole = value.whole() if keeps or not alone else None
        made[key] = None if whole is None else whole.clone(memory_format=torch.preserve_format)
    return made[key]
