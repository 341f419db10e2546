"""What the graph of a use has in a weight's place: a scalar of its model, through which autograd passes in a backward.

torch asks tensors that are given to backward(inputs=) what to do. Older torch (2.6) does not: there the scalar also
leads to the parameters, so that the backward reaches the uses of those that are given, and no others. No gradient flows
there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

TOLD_OF_INPUTS = "has_torch_function" in inspect.unwrap(torch.autograd.backward).__code__.co_names


class _Way(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Any, ...]:
        return (None,) * len(ctx.needs_input_grad)


def led_to(anchor: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """For one use of weights of the model that has the anchor."""
    led: torch.Tensor = _Way.apply(anchor, *parameters)  # type: ignore[no-untyped-call]
    return led


def is_reached(parameter: torch.Tensor) -> bool:
    """Whether the backward that is under way goes to a parameter that the graph leads to."""
    with DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    return torch._C._will_engine_execute_node(node)
