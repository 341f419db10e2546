"""Sharding by names of parameters, and chains of weights, for models that are put together module by module."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .._errors import InvalidArgumentError
from ._group import Group
from ._shard import shard_module_
from ._views import model_of
from ._weights.parameter import ShardedParameter


def wrap_module_params_etp(module: torch.nn.Module, names: Iterable[str], group: Group) -> torch.nn.Module:
    """shard_module_() of these parameters, whatever their size; the others stay whole. Collective."""
    wanted = set(names)
    unknown = wanted - {name for name, _ in module.named_parameters()}
    if unknown:
        raise InvalidArgumentError(
            f"wrap_module_params_etp: {type(module).__name__} has no parameter {', '.join(sorted(unknown))}"
        )
    return shard_module_(module, group, filter=lambda name, _: name in wanted, min_elements=0)


def tag_etp_params_with_names(model: torch.nn.Module) -> None:
    """Names sharded parameters, in messages, as the model does: those of modules that were sharded before they became
    its parts."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ShardedParameter):
            parameter.etp.rename(name)


def classify_etp_chains(
    model: torch.nn.Module, scope: Iterable[str] = (), *, moe_shared_expert_overlap: bool = False
) -> None:
    """Says which weights belong to captured graphs, by the names that they were sharded by; docs/design/etp.md has the
    rules. A weight that is planned in another chain already is an error.

    Args:
        scope: "attn", "moe", "moe_router", "mamba".
        moe_shared_expert_overlap: Shared experts are computed beside the others, and not captured.
    """
    sharded = model_of(model)
    if sharded is not None:
        sharded.runtime.classify(set(scope), moe_shared_expert_overlap)
