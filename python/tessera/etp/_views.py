"""Logical tensors of what is sharded, and updates by other writers than optimisers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from .._errors import InvalidArgumentError
from ._autograd.modules import put, unsharded_class
from ._model import ShardedModel
from ._optim.norms import ShardedGradient, plain
from ._weights.parameter import ShardedParameter
from ._weights.rows import gather_rows
from ._weights.weight import Weight, keep_part


def model_of(model: torch.nn.Module) -> ShardedModel | None:
    """Of the first sharded parameter; None if there is none."""
    for parameter in model.parameters():
        if isinstance(parameter, ShardedParameter):
            found = parameter.etp.model
            assert isinstance(found, ShardedModel)
            return found
    return None


def models_of(model: torch.nn.Module) -> list[ShardedModel]:
    """Of all its sharded parameters, in an order that all ranks share: constructed layers have one of their own."""
    found = {parameter.etp.model for parameter in model.parameters() if isinstance(parameter, ShardedParameter)}
    return sorted((each for each in found if isinstance(each, ShardedModel)), key=lambda each: each.number)


def places_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, ShardedParameter]]:
    """Which modules have which sharded parameters, by which names."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, ShardedParameter)
    ]


@contextmanager
def update(model: torch.nn.Module) -> Iterator[None]:
    """Within it, this rank's rows of the model's parameters may be written: a moving average, a hand-written step.

    Collective: ranks have finished reading the weights when it is entered, and get the new ones when it is left.
    Optimisers and load_state_dict() need it not.
    """
    with ExitStack() as updates:
        for each in models_of(model):
            each.begin_update([weight for weight in _weights_of(model) if weight.model is each])
            updates.callback(each.end_update)
        yield


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded parameter or its gradient, as a plain tensor over the same memory."""
    if isinstance(tensor, ShardedParameter):
        tensor.etp.require_rows()
        return tensor.etp.local
    return plain(tensor)


def logical(tensor: torch.Tensor, like: ShardedParameter | None = None) -> torch.Tensor:
    """All rows of a sharded parameter or of its gradient, as a tensor of its own, in full precision; of a parameter
    without a master, the values that uses of it see. Collective.

    Args:
        tensor: One of them; or, with `like`, what goes with a parameter row by row, such as an optimiser's state. Other
            tensors are returned as they are.
    """
    weight: Weight | None = None
    if like is not None:
        weight = like.etp
    elif isinstance(tensor, ShardedParameter):
        weight = tensor.etp
    elif type(tensor) is ShardedGradient:
        weight = tensor.etp  # type: ignore[assignment]
    if weight is None:
        return tensor
    rows = (tensor.etp.values() if isinstance(tensor, ShardedParameter) else plain(tensor)).detach()
    begin, end = weight.rows
    if rows.shape[: len(weight.lead) + 1] != (*weight.lead, end - begin):
        return tensor  # a step count
    full = gather_rows(weight.group.core, weight, rows)
    return full.view(weight.shape) if full.shape == (*weight.lead, *weight.matrix) else full


@contextmanager
def summon(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Within it, the model has full weights, to be read: state_dict(), save_pretrained(), a copy. Collective.

    It needs memory for the whole model. A weight that has been written is an error when it is left: use etp.update().
    """
    held = places_of(model)
    full: dict[Weight, torch.nn.Parameter] = {}
    for _, _, parameter in held:
        if parameter.etp not in full:
            full[parameter.etp] = torch.nn.Parameter(logical(parameter), requires_grad=False)
            keep_part(parameter, full[parameter.etp])
    kinds = [type(module) for module, _, _ in held]
    with ExitStack() as unwatched:
        for each in models_of(model):
            unwatched.enter_context(each.unwatched())
        for module, name, parameter in held:
            put(module, name, full[parameter.etp])
            module.__class__ = unsharded_class(type(module))
        try:
            yield model
        finally:
            for (module, name, parameter), kind in zip(held, kinds, strict=True):
                module.__class__ = kind
                put(module, name, parameter)
    for _, _, parameter in held:
        if full[parameter.etp]._version != 0:
            raise InvalidArgumentError(
                f"{parameter.etp.name} was written within summon(), which gives weights to be read: write this rank's "
                "rows within etp.update(model)"
            )


def _weights_of(model: torch.nn.Module) -> list[Weight]:
    return [each.etp for each in model.parameters() if isinstance(each, ShardedParameter)]
