"""Logical tensors of what is sharded, and updates by other writers than optimisers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from .._errors import InvalidArgumentError
from ._model import ShardedModel, models_of_this_process
from ._modules import Sharded, unsharded_class
from ._norms import ShardedGradient, plain
from ._parameter import ShardedParameter, Weight


def model_of(model: torch.nn.Module) -> ShardedModel | None:
    """Of the first sharded parameter; None if there is none."""
    for parameter in model.parameters():
        if type(parameter) is ShardedParameter:
            found = parameter.etp.model
            assert isinstance(found, ShardedModel)
            return found
    return None


@contextmanager
def update(model: torch.nn.Module) -> Iterator[None]:
    """Within it, this rank's rows of the model's parameters may be written: a moving average, a hand-written step.

    Collective: ranks have finished reading the weights when it is entered, and get the new ones when it is left.
    Optimisers and load_state_dict() need it not.
    """
    sharded = model_of(model)
    if sharded is None:
        yield
        return
    sharded.begin_update(_weights_of(model))
    try:
        yield
    finally:
        sharded.end_update()


def wait_async_comms() -> None:
    """Adds every gradient that any rank has produced, of all models of this process. Collective.

    The end of a backward does it: it is for ranks that had none, while others had.
    """
    for model in models_of_this_process():
        model.drain()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded parameter or its gradient, as a plain tensor over the same memory."""
    if type(tensor) is ShardedParameter:
        return tensor.detach()
    return plain(tensor)


def logical(tensor: torch.Tensor, like: ShardedParameter | None = None) -> torch.Tensor:
    """All rows of a sharded parameter or of its gradient, as a tensor of its own, in full precision. Collective.

    Args:
        tensor: One of them; or, with `like`, what goes with a parameter row by row, such as an optimiser's state. Other
            tensors are returned as they are.
    """
    weight: Weight | None = None
    if like is not None:
        weight = like.etp
    elif type(tensor) is ShardedParameter:
        weight = tensor.etp
    elif type(tensor) is ShardedGradient:
        weight = tensor.etp  # type: ignore[assignment]
    if weight is None:
        return tensor
    rows = local(tensor).detach().contiguous()
    if rows.dim() < 1 or rows.shape[0] != weight.rows[1] - weight.rows[0]:
        return tensor  # a step count
    full = torch.empty((weight.shape[0], *rows.shape[1:]), dtype=rows.dtype)
    row_bytes = rows.element_size() * (rows.numel() // max(rows.shape[0], 1) or weight.shape[1])
    weight.group.core.gather_bytes(
        f"the rows of {weight.name}",
        rows.data_ptr(),
        [
            max(0, min((r + 1) * weight.shard_rows, weight.shape[0]) - min(r * weight.shard_rows, weight.shape[0]))
            * row_bytes
            for r in range(weight.group.size)
        ],
        full.data_ptr(),
    )
    return full


@contextmanager
def summon(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Within it, the model has full weights, to be read: state_dict(), save_pretrained(), a copy. Collective.

    It needs memory for the whole model. A weight that has been written is an error when it is left: use etp.update().
    """
    held: list[tuple[torch.nn.Module, ShardedParameter]] = []
    full: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        parameter = module._parameters.get("weight") if isinstance(module, Sharded) else None
        if type(parameter) is ShardedParameter:
            number = parameter.etp.number
            if number not in full:
                full[number] = torch.nn.Parameter(logical(parameter), requires_grad=False)
            held.append((module, parameter))
    kinds = [type(module) for module, _ in held]
    sharded = model_of(model)
    with nullcontext() if sharded is None else sharded.unwatched():
        for module, parameter in held:
            module._parameters["weight"] = full[parameter.etp.number]
            module.__class__ = unsharded_class(type(module))
        try:
            yield model
        finally:
            for (module, parameter), kind in zip(held, kinds, strict=True):
                module.__class__ = kind
                module._parameters["weight"] = parameter
    for _, parameter in held:
        if full[parameter.etp.number]._version != 0:
            raise InvalidArgumentError(
                f"{parameter.etp.name} was written within summon(), which gives weights to be read: write this rank's "
                "rows within etp.update(model)"
            )


def _weights_of(model: torch.nn.Module) -> list[Weight]:
    return [each.etp for each in model.parameters() if type(each) is ShardedParameter]
