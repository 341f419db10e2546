"""What cannot be sharded, refused by name."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from .._errors import InvalidArgumentError
from .telling import numbers_of

if TYPE_CHECKING:
    from .model import ShardedModel

# Dtypes of trained parameters: those that ranks have whole may be of any, sharded ones of some.
REDUCED = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128))
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


def require_module(value: Any) -> None:
    """Throw for what is no module."""
    if not isinstance(value, torch.nn.Module):
        raise InvalidArgumentError(f"give a torch.nn.Module as the model, not {type(value).__name__}")


def require_optimizer(value: Any) -> None:
    """Throw for what is no optimiser."""
    if not isinstance(value, torch.optim.Optimizer):
        raise InvalidArgumentError(f"give a torch.optim.Optimizer, not {type(value).__name__}")


def require_shardable(model: torch.nn.Module, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Throws for `named` parameters and modules that shard_module_() cannot take, with the way out."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        wrapper = next((each for each in _WRAPPERS if each in kinds), None)
        if wrapper is not None:
            raise InvalidArgumentError(
                f"shard_module_: {name or 'the model'} is a {wrapper}: shard the model first, then wrap it"
            )
        if isinstance(module, torch.nn.Embedding) and module.max_norm is not None:
            raise InvalidArgumentError(
                f"shard_module_: {name or 'the model'} is an Embedding with max_norm, which writes the rows that a "
                "rank's own tokens name: turn it off, and clamp rows after the step, on all ranks"
            )
    for name, parameter in named:
        what = kind_refused(parameter)
        if what is not None:
            raise InvalidArgumentError(f"shard_module_: {name} is {what}")


def refuse_older_graphs(parameter: torch.Tensor, name: str) -> None:
    """Have a backward fail that comes to what a sharded weight was before: its gradient would be the program's last
    sight of it."""
    if not parameter.requires_grad:
        return

    def refuse(_: torch.Tensor) -> None:
        raise InvalidArgumentError(
            f"a backward reaches {name} as it was before shard_module_(), by a graph that was made then: run the "
            "forward again"
        )

    parameter.register_hook(refuse)  # type: ignore[no-untyped-call]


def kind_refused(parameter: torch.Tensor) -> str | None:
    """Return why the gradient of a parameter could not be added over ranks, and what can be done; None: it can, or it
    is frozen, and needs none."""
    if torch.nn.parameter.is_lazy(parameter):
        return "not initialised yet: run the lazy module once before"
    if not parameter.requires_grad and type(parameter).__name__ != "DTensor":
        return None
    if type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "DTensor":
        return "a DTensor: ETP shards plain parameters, before or instead of other parallelism"
    if parameter.is_quantized:
        return "quantised by torch: dequantise it, and use formats= for what travels"
    if parameter.layout is not torch.strided:
        return f"{parameter.layout}: only strided tensors can be sharded"
    if parameter.device.type not in ("cpu", "meta"):
        return f"on {parameter.device}: this version shards models in host memory"
    if parameter.dtype not in REDUCED:
        return (
            f"of {parameter.dtype}: gradients of floating-point and complex numbers of 16 bits and more can be reduced"
        )
    return None


def require_same_ranks(model: ShardedModel, ranks: Iterable[int], wrapper: str) -> None:
    """Throws unless the wrapper averages over the ranks that the model's gradients are averaged over. Collective."""
    own = struct.pack("=q", torch.distributed.get_rank())
    ours = sorted(rank for (rank,) in numbers_of(model.core.exchange(wrapper, own), "=q", "its place in the job"))
    theirs = sorted(ranks)
    if ours != theirs:
        raise InvalidArgumentError(
            f"{wrapper} over ranks {theirs} of a model whose sharded gradients are reduced over ranks {ours}: wrap it "
            "over just these; data parallelism over more ranks is shard_module_(dp=)"
        )
    if model.size > 1 and model.scale == 1:
        raise InvalidArgumentError(
            f"{wrapper} averages gradients, and this model was sharded with reduction='sum': shard it with "
            "reduction='mean', or leave the wrapper out"
        )


def refuse_fully_shard(name: str) -> None:
    """Throws within fully_shard(), which cuts each parameter that it takes with torch.chunk(). It would gather rows of
    different ranks as one weight."""
    caller = sys._getframe(3).f_globals.get("__name__", "")  # of __torch_function__
    if caller.startswith("torch.distributed.fsdp"):
        raise InvalidArgumentError(
            f"{name} is sharded, and fully_shard() would cut its rows once more: give it the sharded parameters as "
            "ignored_params="
        )
