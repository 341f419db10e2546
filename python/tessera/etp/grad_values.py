"""Gradients of parameters that every rank has whole, added over the ranks outside of the runtime: those that
torch.autograd.grad() gives, which can be differentiated again, as with mode="inline", and those of dtypes that the
runtime does not add (float64, complex)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._errors import MismatchError
from .digests import bytes_of
from .replicated import Replicated, replicated_of
from .tracers import refuse_transforms

if TYPE_CHECKING:
    from .model import ShardedModel


def reduced_values(inputs: Iterable[Any], values: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of inputs of torch.autograd.grad(), those of whole parameters reduced over the ranks.
    Collective, if there are such."""
    found = list(values)
    by_model: dict[ShardedModel, list[tuple[int, Replicated]]] = {}
    for place, each in enumerate(inputs):
        replicated = replicated_of(each)
        if replicated is not None and replicated.model.size > 1:
            by_model.setdefault(replicated.model, []).append((place, replicated))
    for model in sorted(by_model, key=lambda model: model.number):
        listed = by_model[model]
        refuse_transforms(listed[0][1].name)
        names = ", ".join(replicated.name for _, replicated in listed)
        gradients = [found[place] for place, _ in listed]
        sums = _summed(model, f"torch.autograd.grad() of {names}", [each for _, each in listed], gradients)
        for (place, replicated), value in zip(listed, sums, strict=True):
            found[place] = None if value is None else replicated.hooked(value)
    return tuple(found)


def add_beside_runtime(model: ShardedModel) -> None:
    """Add this backward's gradients of parameters whose dtype the runtime does not add. Collective, if there are
    such."""
    listed = [each for each in model.replicated if each.is_beside_runtime]
    if listed:
        sums = _summed(model, "gradients beside the runtime", listed, [each.fresh_gradient for each in listed])
        for replicated, total in zip(listed, sums, strict=True):
            replicated.take_sum(total)


def _summed(
    model: ShardedModel, what: str, listed: Sequence[Replicated], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the scaled sums of all ranks' gradients; None: no rank has one. Collective."""
    has = bytes(each is not None for each in gradients)
    answers = model.member.core.exchange(what[:_LABEL], has)
    if any(len(answer) != len(has) for answer in answers):
        raise MismatchError(f"{what}: ranks have {sorted({len(answer) for answer in answers})} such gradients")
    used = [place for place in range(len(listed)) if any(answer[place] for answer in answers)]
    found: list[torch.Tensor | None] = [None] * len(listed)
    if used:
        given = [_dense(gradients[place], listed[place].parameter) for place in used]
        sums = _Sum.apply(model, *given)  # type: ignore[no-untyped-call]
        for place, total in zip(used, sums, strict=True):
            found[place] = total
    return found


_LABEL = 200  # characters


def _dense(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    if gradient is None:  # other ranks have one
        return torch.zeros_like(parameter)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


class _Sum(torch.autograd.Function):
    """The scaled sums of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, model: ShardedModel, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.model = model
        return _sums(model, gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # A gradient of a sum is itself added up, over what each rank has.
        return None, *_Sum.apply(ctx.model, *gradients)  # type: ignore[no-untyped-call]


def _sums(model: ShardedModel, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    core = model.member.core
    sent = torch.cat([bytes_of(each) for each in gradients])
    received = torch.empty((core.size, sent.numel()), dtype=torch.uint8)
    core.gather_bytes("gradients of whole parameters", sent.data_ptr(), [sent.numel()] * core.size, received.data_ptr())
    sizes = [each.numel() * each.element_size() for each in gradients]
    found = []
    for gradient, parts in zip(gradients, torch.split(received, sizes, dim=1), strict=True):
        ranks = parts.clone(memory_format=torch.contiguous_format).view(gradient.dtype)
        wide = ranks.float() if gradient.element_size() == 2 else ranks
        total = wide[0]
        for rank in range(1, core.size):  # in the order of ranks
            total = total + wide[rank]
        found.append((total * model.scale).to(gradient.dtype).view(gradient.shape))
    return tuple(found)
