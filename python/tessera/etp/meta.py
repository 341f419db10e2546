"""Models on the meta device: parameters are made whole, one module after another, and handed on before the next one's.
Values, and the state of the random numbers, are those of a model that is made in host memory in that order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C import DisableTorchFunctionSubclass

from .._errors import InvalidArgumentError
from .modules import Constructed
from .parameter import LogicalParameter

Init = Callable[[torch.nn.Module], object]
Take = Callable[[torch.nn.Parameter, torch.nn.Parameter], None]


def is_on_meta(model: torch.nn.Module) -> bool:
    """Any of its parameters or buffers."""
    return any(each.is_meta for each in (*model.parameters(), *model.buffers()))


def materialise(model: torch.nn.Module, init: Init | None, take: Take) -> None:
    """Fills what is on the meta device, module by module in the order of modules(), by `init` or each module's
    reset_parameters().

    Args:
        take: Called with each parameter and what takes its place: whole, or what a constructed layer made. It puts
            that, or rows of it, into all modules that have the parameter.
    """
    pending = [  # before one that is tied to another gets the other's parameter: it is filled, too, and draws numbers
        (name, module)
        for name, module in model.named_modules()
        if any(each.is_meta for each in (*module.parameters(False), *module.buffers(False)))
    ]
    for name, module in pending:
        if isinstance(module, Constructed):
            if is_on_meta(module):
                old = dict(module._parameters)
                module.reset_parameters()
                for place, each in old.items():
                    made = module._parameters[place]
                    if each is not None and made is not None and each.is_meta:
                        take(each, made)
        else:
            _materialise(name or "the model", module, init, take)


def _materialise(where: str, module: torch.nn.Module, init: Init | None, take: Take) -> None:
    reset = getattr(module, "reset_parameters", None)
    if init is None and reset is None:
        raise InvalidArgumentError(
            f"shard_module_: {where} ({type(module).__name__}) is on the meta device and has no reset_parameters(): "
            "give init=, which is called with each module and fills its parameters and buffers"
        )
    old = {name: each for name, each in module._parameters.items() if each is not None}
    for name, each in old.items():  # a parameter that has values is not to lose them: it is filled for the random state
        module._parameters[name] = torch.nn.Parameter(_without_values(each), each.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = _without_values(buffer)
    try:
        with torch.no_grad():
            init(module) if init is not None else reset()  # type: ignore[misc]
    finally:
        filled = dict(module._parameters)
        module._parameters.update(old)
    for name, value in (*filled.items(), *module._buffers.items()):
        if value is not None and (name not in old or old[name].is_meta) and _has_no_values(value):
            raise InvalidArgumentError(
                f"shard_module_: {where}.{name} is on the meta device and has no values after "
                f"{'init=' if init is not None else 'reset_parameters()'}: give an init= that fills it"
            )
    for name, each in old.items():
        made = filled[name]
        if each.is_meta and made is not None:
            take(each, made)


def _without_values(like: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        made = torch.empty_like(like, device="cpu")  # with its strides
    return made.fill_(torch.nan) if made.is_floating_point() else made


def _has_no_values(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, LogicalParameter):
        return False
    if tensor.is_meta:
        return True
    return tensor.is_floating_point() and tensor.numel() > 0 and bool(tensor.isnan().all())
