"""Sharded weights as ordinary inputs of autograd: the reduction of a gradient is a node of the backward, collective,
and can be differentiated again. Ranks run the same backward, with weights in one order."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Weight(Protocol):
    """What the nodes need of a weight."""

    shape: torch.Size

    def whole(self, expects_backward: bool) -> tuple[torch.Tensor, int]: ...
    def reduce(self, gradient: torch.Tensor) -> torch.Tensor: ...
    def spread(self, rows: torch.Tensor) -> torch.Tensor: ...
    @property
    def scale(self) -> float: ...


class Stand(torch.autograd.Function):
    """A tensor of the whole weight's shape and without memory, one for all uses of a forward: autograd sums their
    gradients here, as it would at the parameter, before they are reduced."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, weight: Weight) -> torch.Tensor:
        ctx.weight = weight
        return torch.zeros((), dtype=parameter.dtype).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _Reduce.apply(gradient, ctx.weight), None  # type: ignore[no-untyped-call]


class GatherInline(torch.autograd.Function):
    """The whole weight, of what stands for it."""

    @staticmethod
    def forward(ctx: Any, stand: torch.Tensor, weight: Weight, found: list[int]) -> torch.Tensor:
        full, version = weight.whole(True)
        found.append(version)
        return full

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None, None


class _Reduce(torch.autograd.Function):
    """This rank's rows of the scaled sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, weight: Weight) -> torch.Tensor:
        ctx.weight = weight
        return weight.reduce(gradient.to_dense() if gradient.is_sparse else gradient)

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor) -> tuple[Any, ...]:
        return _Spread.apply(rows, ctx.weight) * ctx.weight.scale, None  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    """All ranks' rows of a tensor that goes with the weight."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: Weight) -> torch.Tensor:
        ctx.weight = weight
        return weight.spread(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _Reduce.apply(gradient, ctx.weight) / ctx.weight.scale, None  # type: ignore[no-untyped-call]
