"""What models hold and do: figures of the runtime."""

from __future__ import annotations

from typing import Any

import torch

from .. import _core
from .._errors import NotFoundError
from .model import ShardedModel, models_of_this_process
from .views import model_of


class Report:
    """What a model holds on this rank now, in bytes, and what happened since it was sharded: the runtime's figures
    (docs/guide/etp-memory.md), and

    Attributes:
        state_bytes: This rank's rows of optimisers' states, in shared memory. A state that its optimiser has let go
            counts no more, though its memory is freed by the next update only.
    """

    def __init__(self, runtime: _core.Report, state_bytes: int) -> None:
        self._runtime = runtime
        self.state_bytes = state_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._runtime), "state_bytes"})

    def __repr__(self) -> str:
        return repr(self._runtime)

    def __str__(self) -> str:
        return str(self._runtime)


def report(model: torch.nn.Module | None = None) -> Report:
    """What a model holds on this rank now, to the byte, and what happened since it was sharded.

    Args:
        model: None: the one that was sharded last.
    """
    sharded = sharded_model(model)
    return Report(sharded.runtime.report(), 0 if sharded.states is None else sharded.states.bytes)


def explain(model: torch.nn.Module | None = None, step: int = -1) -> str:
    """Which gathers of a step were waited for, why, and the smallest change that would hide them; a line each."""
    return sharded_model(model).runtime.explain(step)


def sharded_model(model: torch.nn.Module | None) -> ShardedModel:
    """None: the one that was sharded last."""
    found = next(reversed(models_of_this_process()), None) if model is None else model_of(model)
    if found is None:
        raise NotFoundError("no model is sharded here: shard_module_() first")
    return found
