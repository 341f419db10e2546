"""Detects torch tensors that have moved: checked at every transfer, in a fraction of a microsecond each.

Registered tensors seldom move. So once Source.locate() has found each in place, the next transfers ask the tensors
themselves through DLPack's C exchange API (https://dmlc.github.io/dlpack/latest/c_api.html), if torch has it.
Tensors that have changed are located again, and then refused or registered at their new place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import _core
from .torch import bump, exchange_api, is_watchable, storage_getter

if TYPE_CHECKING:
    import torch

# Returns a source's current tensor: torch's, or None if it has gone.
Current: TypeAlias = Callable[[], Any]


class Watch:
    """Some tensors of torch, in the order of their sources."""

    @staticmethod
    def over(sources: Sequence[Current]) -> Watch | None:
        """None if they cannot be watched: torch is too old, or one is not a plain tensor or has no version counter."""
        api = exchange_api()
        if api is None or not _core.TensorWatch.usable(api):
            return None
        tensors = [current() for current in sources]
        if not all(map(is_watchable, tensors)):
            return None
        try:
            return Watch(api, sources, tensors)
        except (RuntimeError, BufferError, TypeError):  # a dtype that DLPack does not know
            return None

    def __init__(self, api: object, sources: Sequence[Current], tensors: Sequence[torch.Tensor]) -> None:
        self._watch = _core.TensorWatch(api, storage_getter(), list(sources), list(tensors))

    def hold(self) -> tuple[list[Any], list[Any]] | None:
        """(objects that keep the memory of all of them in place, the argument of written()). None: one has changed."""
        return self._watch.hold()

    def written(self, counted: list[Any]) -> None:
        """Bumps their version counters."""
        bump(counted)
