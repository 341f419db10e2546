"""Refusals of tracers and transforms, which record a program and would not follow a sharded parameter."""

from __future__ import annotations

import torch

from .._errors import UnimplementedError


def refuse_transforms(name: str) -> None:
    """Throw in a transform of torch.func, which cannot pass through a gather, and in a tracer."""
    if torch._C._are_functorch_transforms_active():
        raise UnimplementedError(
            f"{name} is sharded, and transforms of torch.func cannot pass through it: use torch.autograd, or transform "
            "the model after etp.unshard_()"
        )
    refuse_tracers(name)


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Return what transforms of torch.func have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def refuse_tracers(name: str) -> None:
    """Throw where a gathered weight would become a constant of a graph, which no later step changes."""
    traces = torch._C._get_tracing_state() is not None
    if traces or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        tracer = "torch.jit.trace()" if traces else "make_fx()"
        raise UnimplementedError(
            f"{name} is sharded, and {tracer} would keep its present values as a constant: trace the model within "
            "etp.summon(model)"
        )
