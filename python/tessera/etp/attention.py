"""torch's modules that have a forward of their own without gradients (nn.MultiheadAttention, nn.TransformerEncoderLayer
and nn.TransformerEncoder in eval()), which they leave out for any subclass of Tensor and for any hook: it has other
bits, and other values where all is padding. Theirs are those of plain torch, on gathered weights."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from .compile import left_out
from .module_hook import Hook
from .modules import InPlaceOf, in_place_of, unsharded_class
from .tensor import LogicalTensor


class Attentive(torch.nn.Module, metaclass=InPlaceOf):
    """What they have in common."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training or torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return _forward_on_whole(self, args, kwargs)


@in_place_of(torch.nn.MultiheadAttention)
class ShardedMultiheadAttention(Attentive, torch.nn.MultiheadAttention):
    pass


@in_place_of(torch.nn.TransformerEncoderLayer)
class ShardedEncoderLayer(Attentive, torch.nn.TransformerEncoderLayer):
    pass


@in_place_of(torch.nn.TransformerEncoder)
class ShardedEncoder(Attentive, torch.nn.TransformerEncoder):
    """It makes a nested tensor of what a mask leaves. Else its layers gather their weights, one after another."""

    def forward(self, src: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        masks = kwargs.get("src_key_padding_mask", args[1] if len(args) > 1 else None) is not None
        if masks and self.enable_nested_tensor:
            return super().forward(src, *args, **kwargs)
        return torch.nn.TransformerEncoder.forward(self, src, *args, **kwargs)


_KINDS: dict[type, type] = {
    torch.nn.MultiheadAttention: ShardedMultiheadAttention,
    torch.nn.TransformerEncoderLayer: ShardedEncoderLayer,
    torch.nn.TransformerEncoder: ShardedEncoder,
}


def attentive_class(module: torch.nn.Module) -> type | None:
    """Return the class that a module with sharded weights gets; None: it keeps its own. A subclass may have another
    forward."""
    return _KINDS.get(unsharded_class(type(module)))


@left_out
def _forward_on_whole(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _on_whole(module).forward(*args, **kwargs)


def _on_whole(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module that is like another one, without hooks of ours, and whose weights are gathered: other threads
    see the other one."""
    kind = unsharded_class(type(module))
    made: torch.nn.Module = object.__new__(kind)
    made.__dict__.update(module.__dict__)
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = module.__dict__[name].items()
        made.__dict__[name] = OrderedDict((key, hook) for key, hook in hooks if not isinstance(hook, Hook))
    made.__dict__["_parameters"] = {
        name: each.whole(True) if isinstance(each, LogicalTensor) else each for name, each in module._parameters.items()
    }
    made.__dict__["_modules"] = {
        name: None if child is None else _on_whole(child) for name, child in module._modules.items()
    }
    return made
