"""torch's DistributedDataParallel and fully_shard() of a sharded model, which average what is whole on every rank.

Their ranks must be those that sharded gradients are reduced over. DistributedDataParallel asks the module that it is
given which parameters to leave alone. It is told for the time of its constructor, whichever module that is: Trainer and
accelerate wrap models by themselves, and adapters are put around a sharded model, or into it, before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator
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

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # DistributedDataParallel asks its module for it


_roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # what shard_module_() has been given


_averaged: set[tuple[int, int]] = set()  # ids and addresses of parameters that DistributedDataParallel averages


def is_averaged(parameter: torch.Tensor) -> bool:
    """Tell whether DistributedDataParallel averages the gradient of a parameter."""
    return (id(parameter), parameter.data_ptr()) in _averaged


def note_root(module: torch.nn.Module) -> None:
    """Note that shard_module_() has been given a module, and so knows what is whole in it."""
    _roots.add(module)


def _sharded_names(module: torch.nn.Module) -> set[str]:
    """Return the names by which DistributedDataParallel knows sharded parameters."""
    names: set[str] = set()
    seen = _in_roots(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, LogicalParameter) and _is_of_a_sharded_model(parameter, seen):
            names.update((name, f".{name}") if "." not in name else (name,))  # it writes names of the root's own so
            names.add(f"{COMPILED}{name}")
    return names


def _in_roots(module: torch.nn.Module) -> set[int]:
    """Return ids of the parameters in modules, among those of `module`, that shard_module_() has been given."""
    return {id(parameter) for each in module.modules() if each in _roots for parameter in each.parameters()}


def _is_of_a_sharded_model(parameter: LogicalParameter, seen: set[int]) -> bool:
    """Tell whether shard_module_() knows it, and so what is whole beside it. `seen`: of _in_roots()."""
    model: Any = parameter.etp.model
    return not model.of_layers or id(parameter) in seen or any(not each.of_layers for each in model.companions)


@contextlib.contextmanager
def _presented(module: torch.nn.Module) -> Iterator[None]:
    """Present a module as DistributedDataParallel can take it: without its sharded parameters, which it would broadcast
    and average. If it trains no others, there is a parameter that no forward uses, as it refuses to have none."""
    names = _sharded_names(module)
    if not names:
        yield
        return
    own = module.__dict__
    before = own.get(_IGNORED)
    own[_IGNORED] = sorted(names.union(before or ()))
    if not any(each.requires_grad for name, each in module.named_parameters() if name not in own[_IGNORED]):
        unused = torch.nn.Parameter(torch.zeros(1))
        named_parameters = module.named_parameters
        own["named_parameters"] = lambda *args, **kwargs: itertools.chain(
            named_parameters(*args, **kwargs), [("unused", unused)]
        )
    try:
        yield
    finally:
        own.pop("named_parameters", None)
        if before is None:
            del own[_IGNORED]
        else:
            own[_IGNORED] = before


def _wraps(wrapper: torch.nn.Module, name: str, module: Any) -> None:
    """Called when any module gets a part."""
    if name != "module" or not isinstance(wrapper, DistributedDataParallel) or not isinstance(module, torch.nn.Module):
        return
    _averaged.update((id(each), each.data_ptr()) for each in module.parameters() if type(each) is torch.nn.Parameter)
    found: dict[int, ShardedModel] = {}
    seen = _in_roots(module)
    for _, parameter in module.named_parameters(remove_duplicate=False):
        if not isinstance(parameter, LogicalParameter):
            continue
        weight = parameter.etp
        if not _is_of_a_sharded_model(parameter, seen):
            raise InvalidArgumentError(
                f"DistributedDataParallel would broadcast and average rows of {weight.name}, a weight of a layer that "
                "was constructed sharded: give the model to shard_module_() first, which leaves such layers as they are"
            )
        assert isinstance(weight.model, ShardedModel)
        found[weight.model.number] = weight.model
    for number in sorted(found):
        _leave_replicated(found[number], wrapper)


def _leave_replicated(model: ShardedModel, wrapper: DistributedDataParallel) -> None:
    theirs = torch.distributed.get_process_group_ranks(wrapper.process_group)
    require_same_ranks(model, theirs, "DistributedDataParallel")
    model.leave_replicated()


def _watch_constructor() -> None:
    construct: Any = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def __init__(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        module = args[0] if args else kwargs.get("module")
        with _presented(module) if isinstance(module, torch.nn.Module) else contextlib.nullcontext():
            construct(wrapper, *args, **kwargs)

    DistributedDataParallel.__init__ = __init__  # type: ignore[assignment, method-assign]


_hooked: list[Any] = []


def watch_wrappers() -> None:
    """Once a process."""
    if not _hooked:
        _watch_constructor()
        _hooked.append(register_module_module_registration_hook(_wraps))
