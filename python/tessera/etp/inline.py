"""Sharded weights as ordinary inputs of autograd: the reduction of a gradient is a part of the backward, collective,
and can be differentiated again. Ranks run the same backward, with weights in one order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .tensor import LogicalTensor, is_sharded

if TYPE_CHECKING:
    from .weight import Weight


class Reduce(torch.autograd.Function):
    """The scaled sum of all ranks' gradients of a whole weight: a logical tensor."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, weight: Weight) -> torch.Tensor:
        ctx.weight = weight
        return weight.reduce(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # A gradient of a sum is itself added up, over what each rank has.
        return Whole.apply(Reduce.apply(gradient, ctx.weight)), None  # type: ignore[no-untyped-call]


class Whole(torch.autograd.Function):
    """The gather of a sharded tensor; of a factor of a product, what its format makes of it."""

    @staticmethod
    def forward(ctx: Any, tensor: LogicalTensor, product: bool = False) -> torch.Tensor:
        found = tensor.whole(product)
        return found.clone() if is_sharded(tensor) else found.view_as(found)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
