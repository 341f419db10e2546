"""Autograd functions of operations with a sharded weight: torch's own operators on the gathered weight, in forward and
in backward, so that bits are those of the unsharded model.

The weight is no input of these functions (a model's anchor is): its gradient goes to the ranks that own its rows and
becomes .grad when the ranks meet. The graph keeps the weight's version, never the gathered weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ._generic import expects_backward, refuse_twice
from ._parameter import Weight


def applied(function: type[torch.autograd.Function]) -> Any:
    """Its apply() without what torch.func's transforms need, which costs as much as the rest of a small product."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class Linear(torch.autograd.Function):
    """x @ W.T + bias of W [F, K]; or x @ W + bias if `as_stored`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        anchor: torch.Tensor | None,
        weight: Weight,
        dtype: torch.dtype,
        as_stored: bool,
    ) -> torch.Tensor:
        trains = anchor is not None
        phase = weight.model.phase()
        full, version = weight.gather(phase, trains and expects_backward(phase))
        ctx.weight, ctx.version, ctx.trains, ctx.as_stored, ctx.dtype = weight, version, trains, as_stored, dtype
        ctx.flattens = x.dim() == 2 or x.is_contiguous()
        if trains:
            ctx.save_for_backward(x)
        return multiply(x, full if full.dtype is dtype else full.to(dtype), bias, as_stored)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        weight: Weight = ctx.weight
        refuse_twice(weight)
        weight.model.enter_backward()
        x = None
        if ctx.trains:
            (x,) = ctx.saved_tensors
            x = x.reshape(-1, x.shape[-1])
        flat = gradient.reshape(-1, gradient.shape[-1])
        dgrad = None
        if ctx.needs_input_grad[0]:
            full, _ = weight.gather("bwd", version=ctx.version)
            if full.dtype is not ctx.dtype:
                full = full.to(ctx.dtype)
            second = full if ctx.as_stored else full.t()
            dgrad = second.mm(flat.t()).t() if x is not None and _is_column_major(x) else flat.mm(second.t())
            dgrad = dgrad.reshape(*gradient.shape[:-1], second.shape[0])
            del full, second
        if x is not None:
            buffer, into = weight.room()
            first, second = (x, flat) if ctx.as_stored else (flat, x)
            if into.dtype == ctx.dtype:
                torch.mm(first.t(), second, out=into)
            else:
                into.copy_(first.t().mm(second))
            weight.produce(buffer)
        bias = (flat if ctx.flattens else gradient) if ctx.needs_input_grad[1] else None  # autograd sums it
        return dgrad, bias, None, None, None, None


def multiply(x: torch.Tensor, full: torch.Tensor, bias: torch.Tensor | None, as_stored: bool) -> torch.Tensor:
    """As nn.Linear and transformers' Conv1D do where the weight is an input of autograd."""
    if as_stored:
        flat = x.view(-1, x.shape[-1])
        product = flat.mm(full) if bias is None else torch.addmm(bias, flat, full)
        return product.view(*x.shape[:-1], full.shape[1])
    if x.dim() < 3 or x.is_contiguous():
        return F.linear(x, full, bias)
    product = x.reshape(-1, x.shape[-1]).mm(full.t()).view(*x.shape[:-1], full.shape[0])
    return product if bias is None else product.add_(bias)


def _is_column_major(x: torch.Tensor) -> bool:
    return x.stride(0) == 1 and x.stride(1) == x.shape[0]


class Embedding(torch.autograd.Function):
    """Rows of W [F, K] by index."""

    @staticmethod
    def forward(
        ctx: Any,
        indices: torch.Tensor,
        anchor: torch.Tensor,
        weight: Weight,
        padding: int,
        by_frequency: bool,
    ) -> torch.Tensor:
        phase = weight.model.phase()
        full, _ = weight.gather(phase, expects_backward(phase))
        ctx.weight, ctx.padding, ctx.by_frequency = weight, padding, by_frequency
        ctx.save_for_backward(indices)
        return torch.embedding(full, indices, padding, by_frequency, False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        weight: Weight = ctx.weight
        refuse_twice(weight)
        weight.model.enter_backward()
        (indices,) = ctx.saved_tensors
        buffer, into = weight.room()
        # index_add_ would add in another order in bf16 and f16.
        into.copy_(
            torch.ops.aten.embedding_dense_backward(gradient, indices, weight.matrix[0], ctx.padding, ctx.by_frequency)
        )
        weight.produce(buffer)
        return None, None, None, None, None


apply_linear_function = applied(Linear)
apply_embedding_function = applied(Embedding)
