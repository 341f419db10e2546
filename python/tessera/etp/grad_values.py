"""torch.autograd.grad() of parameters that every rank has whole: the gradient of all ranks, as that of a sharded weight
with mode="inline". It can be differentiated again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .digests import bytes_of
from .replicated import Replicated, replicated_of
from .uses import refuse_transforms

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
        has = bytes(found[place] is not None for place, _ in listed)
        answers = model.core.exchange(f"torch.autograd.grad() of {names}"[:_LABEL], has)
        used = [pair for index, pair in enumerate(listed) if any(answer[index] for answer in answers)]
        given = [_dense(found[place], replicated.parameter) for place, replicated in used]
        sums = _Sum.apply(model, *given) if used else ()  # type: ignore[no-untyped-call]
        for (place, replicated), value in zip(used, sums, strict=True):
            found[place] = replicated.hooked(value)
    return tuple(found)


_LABEL = 200  # characters


def _dense(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    if gradient is None:  # other ranks have used it
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
    core = model.core
    sent = torch.cat([bytes_of(each) for each in gradients])
    received = torch.empty((core.size, sent.numel()), dtype=torch.uint8)
    core.gather_bytes("gradients of whole parameters", sent.data_ptr(), [sent.numel()] * core.size, received.data_ptr())
    sizes = [each.numel() * each.element_size() for each in gradients]
    found = []
    for gradient, parts in zip(gradients, torch.split(received, sizes, dim=1), strict=True):
        ranks = parts.clone(memory_format=torch.contiguous_format).view(gradient.dtype)
        wide = ranks if gradient.dtype in (torch.float32, torch.float64) else ranks.float()
        total = wide[0]
        for rank in range(1, core.size):  # in the order of ranks
            total = total + wide[rank]
        found.append((total * model.scale).to(gradient.dtype).view(gradient.shape))
    return tuple(found)
