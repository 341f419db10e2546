"""What cannot be sharded, refused by name."""

from __future__ import annotations

import torch
from torch.nn.utils.parametrize import is_parametrized

from .._errors import InvalidArgumentError

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


def require_shardable(model: torch.nn.Module) -> None:
    """Throws for parameters and modules that shard_module_() cannot take, with the way out."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        wrapper = next((each for each in _WRAPPERS if each in kinds), None)
        if wrapper is not None:
            raise InvalidArgumentError(
                f"shard_module_: {name or 'the model'} is a {wrapper}: shard the model first, then wrap it"
            )
        if is_parametrized(module):
            raise InvalidArgumentError(
                f"shard_module_: {name or 'the model'} is parametrised: remove_parametrizations() first"
            )
        if isinstance(module, torch.nn.Embedding) and (module.sparse or module.max_norm is not None):
            raise InvalidArgumentError(
                f"shard_module_: {name or 'the model'} is an Embedding with sparse=True or max_norm, which writes or "
                "differentiates its weight in other ways: turn them off"
            )
    for name, parameter in model.named_parameters():
        what = _kind(parameter)
        if what is not None:
            raise InvalidArgumentError(f"shard_module_: {name} is {what}")


def _kind(parameter: torch.nn.Parameter) -> str | None:
    if torch.nn.parameter.is_lazy(parameter):
        return "not initialised yet: run the lazy module once before"
    if type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "DTensor":
        return "a DTensor: ETP shards plain parameters, before or instead of other parallelism"
    if parameter.is_meta:
        return "on the meta device and has no values: materialise the model first"
    if parameter.is_quantized:
        return "quantised by torch: dequantise it, and use formats= for what travels"
    if parameter.layout is not torch.strided:
        return f"{parameter.layout}: only strided tensors can be sharded"
    if parameter.device.type != "cpu":
        return f"on {parameter.device}: this version shards models in host memory"
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"of {parameter.dtype}: gradients of float32, bfloat16 and float16 can be reduced"
    return None
