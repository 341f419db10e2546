"""What autograd accumulates in the place of a gradient that the runtime accumulates."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _disabled_torch_function_impl


class Placeholder(torch.Tensor):
    """A tensor of a shape, without memory, which every operation returns as it is."""

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def like(tensor: torch.Tensor) -> Placeholder:
        """Return one with the facts of a tensor."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            Placeholder, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = next(each for each in args if isinstance(each, cls))
        return first if func._schema.is_mutable else cls.like(first)
