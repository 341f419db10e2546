"""What models hold and do: figures of the runtime."""

from __future__ import annotations

import torch

from .. import _core
from .._errors import NotFoundError
from ._model import ShardedModel, models_of_this_process
from ._views import model_of


def report(model: torch.nn.Module | None = None) -> _core.EtpReport:
    """What a model holds on this rank now, to the byte, and what happened since it was sharded.

    Args:
        model: None: the one that was sharded last.
    """
    return _chosen(model).runtime.report()


def forecast(model: torch.nn.Module | None = None) -> _core.EtpForecast:
    """Bytes that this rank will hold at its peak, before the first step."""
    return _chosen(model).runtime.forecast()


def explain(model: torch.nn.Module | None = None, step: int = -1) -> str:
    """Which gathers of a step were waited for, why, and the smallest change that would hide them; a line each."""
    return _chosen(model).runtime.explain(step)


def _chosen(model: torch.nn.Module | None) -> ShardedModel:
    found = next(reversed(models_of_this_process()), None) if model is None else model_of(model)
    if found is None:
        raise NotFoundError("no model is sharded here: shard_module_() first")
    return found
