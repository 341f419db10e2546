"""What models hold and do: figures of the runtime."""

from __future__ import annotations

import torch

from .._core import Report
from .._errors import NotFoundError
from ._model import ShardedModel, models_of_this_process
from ._views import model_of


def report(model: torch.nn.Module | None = None) -> Report:
    """What a model holds on this rank now, to the byte, and what happened since it was sharded.

    Args:
        model: None: the one that was sharded last.
    """
    return sharded_model(model).runtime.report()


def explain(model: torch.nn.Module | None = None, step: int = -1) -> str:
    """Which gathers of a step were waited for, why, and the smallest change that would hide them; a line each."""
    return sharded_model(model).runtime.explain(step)


def sharded_model(model: torch.nn.Module | None) -> ShardedModel:
    """None: the one that was sharded last."""
    found = next(reversed(models_of_this_process()), None) if model is None else model_of(model)
    if found is None:
        raise NotFoundError("no model is sharded here: shard_module_() first")
    return found
