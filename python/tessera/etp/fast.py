"""Autograd functions of operations with a sharded weight: torch's own operators on the gathered weight, in forward and
in backward, so that bits are those of the unsharded model.

The weight is no input of these functions (a model's anchor is): its gradient goes to the ranks that own its rows and
becomes .grad when the ranks meet. The graph keeps the weight's version, never the gathered weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .phase import Phase
from .uses import expects_backward, refuse_twice
from .weight import Weight


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
        ctx.use = (weight, version, dtype, as_stored, x.dim() == 2 or x.is_contiguous())
        if trains:
            ctx.save_for_backward(x)
        return multiply(x, full if full.dtype is dtype else full.to(dtype), bias, as_stored)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        weight: Weight
        weight, version, dtype, as_stored, flattens = ctx.use
        refuse_twice(weight)
        weight.model.enter_backward()
        x = None
        wants_x, wants_bias, trains, *_ = ctx.needs_input_grad
        if trains:
            (x,) = ctx.saved_tensors
            x = _flat(x)
        flat = _flat(gradient)
        dgrad = None
        if wants_x:
            full, _ = weight.gather(Phase.BACKWARD, version=version)
            dgrad = _dgrad(flat, full if full.dtype is dtype else full.to(dtype), x, as_stored)
            del full
            if gradient.dim() != 2:
                dgrad = dgrad.reshape(*gradient.shape[:-1], dgrad.shape[-1])
        if x is not None and weight.wanted():
            buffer, into = weight.room()
            first, second = (x, flat) if as_stored else (flat, x)
            if into.dtype is dtype and not is_in_mode():
                torch.mm(first.t(), second, out=into)
            else:
                into.copy_(first.t().mm(second))
            weight.produce(buffer)
        bias = (flat if flattens else gradient) if wants_bias else None  # autograd sums it
        return dgrad, bias, None, None, None, None


def is_in_mode() -> bool:
    """Tell whether a mode of the dispatcher is to see the operations that plain torch calls."""
    return torch._C._len_torch_dispatch_stack() > 0


def multiply(x: torch.Tensor, full: torch.Tensor, bias: torch.Tensor | None, as_stored: bool) -> torch.Tensor:
    """As nn.Linear and transformers' Conv1D do where the weight is an input of autograd. The result is no view, which
    an autograd function must not return to those that write it in place: a product is written into its memory."""
    if is_in_mode():
        return _multiply_in_mode(x, full if as_stored else full.t(), bias)
    if as_stored:
        out = x.new_empty((*x.shape[:-1], full.shape[1]))
        flat, rows = x.view(-1, x.shape[-1]), out.view(-1, full.shape[1])
        torch.mm(flat, full, out=rows) if bias is None else torch.addmm(bias, flat, full, out=rows)
        return out
    if x.dim() == 3 and bias is not None and x.is_contiguous():
        out = x.new_empty((*x.shape[:-1], full.shape[0]))
        torch.addmm(bias, x.view(-1, x.shape[-1]), full.t(), out=out.view(-1, full.shape[0]))
        return out
    if x.dim() < 3 or x.is_contiguous():
        return F.linear(x, full, bias)
    out = x.new_empty((*x.shape[:-1], full.shape[0]))
    torch.mm(x.reshape(-1, x.shape[-1]), full.t(), out=out.view(-1, full.shape[0]))
    return out if bias is None else out.add_(bias)


def _multiply_in_mode(x: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same by the operations that torch calls where gradients are recorded."""
    if x.dim() < 3:
        return F.linear(x, factor.t(), bias)
    flat, shape = _flat(x), (*x.shape[:-1], factor.shape[1])
    if bias is not None and x.is_contiguous():
        return torch.addmm(bias, flat, factor).view(shape).clone()
    out = flat.mm(factor).view(shape).clone()
    return out if bias is None else out.add_(bias)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _dgrad(flat: torch.Tensor, full: torch.Tensor, x: torch.Tensor | None, as_stored: bool) -> torch.Tensor:
    if x is not None and not x.is_contiguous() and x.stride() == (1, x.shape[0]):  # so is autograd's product
        return (full if as_stored else full.t()).mm(flat.t()).t()
    return flat.mm(full.t() if as_stored else full)


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
        if not weight.wanted():
            return None, None, None, None, None
        (indices,) = ctx.saved_tensors
        buffer, into = weight.room()
        _embedding_gradient(gradient, indices, ctx.padding, ctx.by_frequency, into)
        weight.produce(buffer)
        return None, None, None, None, None


def _embedding_gradient(
    gradient: torch.Tensor, indices: torch.Tensor, padding: int, by_frequency: bool, into: torch.Tensor
) -> None:
    """As autograd's, with its bits."""
    if gradient.dtype is not torch.float32 or into.dtype is not torch.float32 or padding >= 0 or by_frequency:
        # index_add_ rounds bf16 and f16 otherwise.
        rows = into.shape[0]
        into.copy_(torch.ops.aten.embedding_dense_backward(gradient, indices, rows, padding, by_frequency))
        return
    # The same additions in the same order, without a second matrix.
    into.zero_().index_add_(0, indices.reshape(-1), gradient.reshape(-1, into.shape[1]))


apply_linear_function = applied(Linear)
apply_embedding_function = applied(Embedding)
