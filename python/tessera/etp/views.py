"""Logical tensors of what is sharded, and updates by other writers than optimisers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from .._arguments import seconds
from .._errors import InvalidArgumentError
from .batch import Batch, Updates
from .inline import Whole
from .model import ShardedModel
from .norms import plain
from .parameter import LogicalParameter
from .refusals import require_module
from .state_dict import UncutState
from .store import Store
from .telling import families_in, telling
from .tensor import LogicalTensor, is_sharded
from .weight import Weight

_UPDATE = "etp.update()"


def model_of(model: torch.nn.Module) -> ShardedModel | None:
    """Of the first sharded parameter; None if there is none."""
    require_module(model)
    for parameter in model.parameters():
        if isinstance(parameter, LogicalParameter):
            found = parameter.etp.model
            assert isinstance(found, ShardedModel)
            return found
    return None


def models_of(model: torch.nn.Module) -> list[ShardedModel]:
    """Of all its sharded parameters, in an order that all ranks share: constructed layers have one of their own."""
    require_module(model)
    found = {parameter.etp.model for parameter in model.parameters() if isinstance(parameter, LogicalParameter)}
    return sorted((each for each in found if isinstance(each, ShardedModel)), key=lambda each: each.number)


def places_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, LogicalParameter]]:
    """Which modules have which sharded parameters, by which names."""
    require_module(model)
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, LogicalParameter)
    ]


@contextmanager
def update(model: torch.nn.Module, timeout: float | None = None) -> Iterator[None]:
    """Within it, this rank's rows of the model's parameters may be written: a moving average, a hand-written step.

    Collective: ranks have finished reading the weights when it is entered, and get the new ones when it is left.
    Optimisers and load_state_dict() need it not.

    Args:
        timeout: Seconds to wait for the other ranks, of which one may be reading the weights. None: as init_group() was
            told, and half an hour if it was told nothing.
    """
    with telling(_UPDATE, families_in([model])), ExitStack() as updates:
        longest = None if timeout is None else seconds("timeout", timeout)
        own: Updates = []
        for each in models_of(model):
            weights = [weight for weight in _weights_of(model) if weight.model is each]
            if each.batch is not None and each.batch.name != _UPDATE:  # of a step
                each.batch.begin(weights)
                continue
            each.watch.look(thorough=True)
            each.require_no_update()
            own.append((each, weights))
        if own:
            updates.enter_context(Batch(_UPDATE, own, longest).open())
        yield


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a sharded tensor, as a plain tensor over the same memory; others as they are."""
    if isinstance(tensor, UncutState):
        return tensor.local
    if isinstance(tensor, LogicalParameter):
        tensor.etp.require_rows()
    if is_sharded(tensor):
        if tensor.rows is None:
            raise InvalidArgumentError(
                f"{tensor.store} is a view that does not have all rows: take etp.local() of what it is a view of"
            )
        return tensor.rows.detach()
    return plain(tensor)


def from_local(rows: torch.Tensor, like: torch.Tensor) -> LogicalTensor:
    """Return a sharded tensor of this rank's rows, cut as `like` is. Ranks answer for what is in them.

    Args:
        rows: A plain tensor of the shape of etp.local(like), whose memory the result has.
        like: A sharded parameter, gradient or state.
    """
    if not is_sharded(like) or like.spec is None:
        raise InvalidArgumentError(
            f"from_local: like= is a {type(like).__name__} that is not sharded: give a parameter"
        )
    spec, store = like.spec, like.store
    wanted = local(like).shape
    if type(rows) is not torch.Tensor or rows.shape != wanted:
        found = f"rows of {tuple(rows.shape)}" if isinstance(rows, torch.Tensor) else f"a {type(rows).__name__}"
        raise InvalidArgumentError(f"from_local: {found}: this rank has {tuple(wanted)} of {store}")
    return LogicalTensor.of(Store(store.model, spec, rows.detach(), rows.dtype, held=store.held))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a sharded tensor as a plain tensor of its own, in full precision: the gather, which is
    differentiable. Others are returned as they are. A parameter is pulled, and needs no other rank, unless it has a
    format; of others, and within an update, it is collective.
    """
    if isinstance(tensor, UncutState):
        return tensor.whole()
    if not isinstance(tensor, LogicalTensor):
        return tensor
    if not tensor.store.asks_nobody():
        with telling(f"etp.whole() of {tensor.store}", [tensor.store.model.member.family]):
            return Whole.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]
    return Whole.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


def _weights_of(model: torch.nn.Module) -> list[Weight]:
    return [each.etp for each in model.parameters() if isinstance(each, LogicalParameter)]
