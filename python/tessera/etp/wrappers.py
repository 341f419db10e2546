"""torch's DistributedDataParallel and fully_shard() of a sharded model, which average what is whole on every rank.

Their ranks must be those that sharded gradients are reduced over.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from .._errors import InvalidArgumentError
from .compile import COMPILED
from .model import ShardedModel
from .parameter import LogicalParameter
from .refusals import require_same_ranks

_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"  # DistributedDataParallel asks its module for it


def leave_out_of_ddp(model: torch.nn.Module) -> None:
    """Its constructor then does not broadcast what rank 0 has of sharded parameters."""
    names = set(getattr(model, _LEFT_OUT, ()))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, LogicalParameter):
            names.update((name, f".{name}") if "." not in name else (name,))  # it writes names of the root's own so
            names.add(f"{COMPILED}{name}")
    setattr(model, _LEFT_OUT, sorted(names))


def put_back_into_ddp(model: torch.nn.Module) -> None:
    """Of weights that are whole again. Other names that the user has given stay."""
    whole = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = [
        name for name in getattr(model, _LEFT_OUT, ()) if name.removeprefix(COMPILED).removeprefix(".") not in whole
    ]
    setattr(model, _LEFT_OUT, names)


def _wraps(wrapper: torch.nn.Module, name: str, module: Any) -> None:
    """Called when any module gets a part."""
    if name != "module" or not isinstance(wrapper, DistributedDataParallel) or not isinstance(module, torch.nn.Module):
        return
    found: dict[int, ShardedModel] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        if not isinstance(parameter, LogicalParameter):
            continue
        weight = parameter.etp
        if path not in wrapper.parameters_to_ignore:
            raise InvalidArgumentError(
                f"DistributedDataParallel would broadcast and average rows of {weight.name}, which is sharded: wrap "
                "the module that was given to shard_module_(), not one that has it as a part; shard_module_() of "
                "layers that were constructed sharded leaves them as they are"
            )
        assert isinstance(weight.model, ShardedModel)
        found[weight.model.number] = weight.model
    for number in sorted(found):
        _leave_replicated(found[number], wrapper)


def _leave_replicated(model: ShardedModel, wrapper: DistributedDataParallel) -> None:
    theirs = torch.distributed.get_process_group_ranks(wrapper.process_group)
    require_same_ranks(model, theirs, "DistributedDataParallel")
    model.leave_replicated()


_hooked: list[Any] = []


def watch_wrappers() -> None:
    """Once a process."""
    if not _hooked:
        _hooked.append(register_module_module_registration_hook(_wraps))
