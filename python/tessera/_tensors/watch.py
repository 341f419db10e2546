"""Whether torch's tensors lie where they did: asked at every transfer, in a fraction of a microsecond each.

What a batch has registered is seldom moved. So once Source.locate() has found each where it was, the next transfers ask
the tensors themselves through DLPack's C exchange API (https://dmlc.github.io/dlpack/latest/c_api.html), where torch
has that. Whatever has changed is located again, and refused or registered by what that says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import _core

if TYPE_CHECKING:
    import torch

# A source's tensor as it is now: torch's, or None if it has gone.
Current: TypeAlias = Callable[[], Any]


class Watch:
    """Some tensors of torch, in the order of their sources."""

    @staticmethod
    def over(sources: Sequence[Current]) -> Watch | None:
        """None if they cannot be watched: torch is too old, or a tensor is no plain one or has no version counter."""
        import torch

        api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        if api is None or not _core.TensorWatch.usable(api):
            return None
        tensors = [current() for current in sources]
        for tensor in tensors:
            if type(_local(tensor)) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_inference():
                return None
        try:
            return Watch(api, sources, tensors)
        except (RuntimeError, BufferError, TypeError):  # of a dtype that DLPack does not know
            return None

    def __init__(self, api: object, sources: Sequence[Current], tensors: Sequence[torch.Tensor]) -> None:
        import torch

        storage_of: Callable[[Any], Any] = torch.Tensor.untyped_storage
        self._watch = _core.TensorWatch(api, storage_of, list(sources), list(tensors))
        self._bump: Callable[[Any], None] = torch.autograd.graph.increment_version

    def hold(self) -> tuple[list[Any], list[Any]] | None:
        """(what keeps the memory of all of them where it is, what written() is to be told). None: one has changed."""
        return self._watch.hold()

    def written(self, counted: list[Any]) -> None:
        """Bumps their version counters."""
        self._bump(counted)


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)
