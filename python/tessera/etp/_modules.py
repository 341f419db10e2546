"""Modules whose weight is sharded: the classes that shard_module_() gives to modules of a model, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._errors import InvalidArgumentError
from ._functions import Embedding, Linear, multiply
from ._parameter import ShardedParameter, Weight


class Sharded(torch.nn.Module):
    """What they have in common. Their `weight` is a ShardedParameter."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        parameter = self._parameters["weight"]
        if isinstance(parameter, ShardedParameter):
            with torch.no_grad():
                applied = fn(parameter)
            if applied.dtype != parameter.dtype or applied.device != parameter.device:
                raise InvalidArgumentError(
                    f"{parameter.etp.name} is sharded and cannot become {applied.dtype} on {applied.device}: convert "
                    "the model before shard_module_(), or after unshard_()"
                )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        parameter = self._parameters["weight"]
        key = f"{prefix}weight"
        given = state_dict.get(key)
        if not isinstance(parameter, ShardedParameter) or given is None:
            super()._load_from_state_dict(state_dict, prefix, *rest)
            return
        weight = parameter.etp
        if given.shape == weight.shape and given.shape != parameter.shape:
            state_dict[key] = given[weight.rows[0] : weight.rows[1]]
        alone = not weight.model.updating
        if alone:
            weight.model.begin_update([weight])
        try:
            super()._load_from_state_dict(state_dict, prefix, *rest)
        finally:
            state_dict[key] = given
            if alone:
                weight.model.end_update()


class ShardedLinear(Sharded, torch.nn.Linear):
    """nn.Linear of a sharded weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters["weight"]
        if type(parameter) is not ShardedParameter:
            return super().forward(input)
        return apply_linear(input, parameter, self._parameters["bias"], False)


class ShardedEmbedding(Sharded, torch.nn.Embedding):
    """nn.Embedding of a sharded weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters["weight"]
        if type(parameter) is not ShardedParameter:
            return super().forward(input)
        return apply_embedding(input, parameter, self.padding_idx, self.scale_grad_by_freq)


class ShardedConv1D(Sharded):
    """The forward of transformers' Conv1D, whose weight is [inputs, outputs]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters["weight"]
        if type(parameter) is not ShardedParameter:
            return super().forward(x)  # type: ignore[no-any-return]
        return apply_linear(x, parameter, self._parameters["bias"], True)


ShardedLinear.unsharded = torch.nn.Linear  # type: ignore[attr-defined]
ShardedEmbedding.unsharded = torch.nn.Embedding  # type: ignore[attr-defined]
_kinds: dict[type, type] = {torch.nn.Linear: ShardedLinear, torch.nn.Embedding: ShardedEmbedding}


def sharded_class(module: torch.nn.Module) -> type | None:
    """For modules of exactly the classes whose forward is known; a subclass may use its weight in another way."""
    kind = type(module)
    if kind not in _kinds and (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        _kinds[kind] = type("ShardedConv1D", (ShardedConv1D, kind), {"unsharded": kind, "__module__": __name__})
    return _kinds.get(kind)


def unsharded_class(kind: type) -> type:
    """What shard_module_() made the class from."""
    original: type = kind.unsharded  # type: ignore[attr-defined]
    return original


def apply_linear(
    x: torch.Tensor, parameter: ShardedParameter, bias: torch.Tensor | None, as_stored: bool
) -> torch.Tensor:
    """x @ W.T + bias, or x @ W + bias if `as_stored`; differentiable."""
    weight = parameter.etp
    kind = x.device.type
    given = x.dtype
    if torch.is_autocast_enabled(kind) and given != torch.float64:
        dtype = given = torch.get_autocast_dtype(kind)
    else:
        dtype = weight.compute if weight.compute != weight.dtype else given
    if x.dtype != dtype:
        x = x.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    trains = parameter.requires_grad
    if torch.is_grad_enabled() and (trains or x.requires_grad or (bias is not None and bias.requires_grad)):
        anchor = weight.model.anchor if trains else None
        out = Linear.apply(x, bias, anchor, weight, dtype, as_stored)  # type: ignore[no-untyped-call]
    else:
        full, _ = weight.gather(weight.model.phase())
        out = multiply(x, full if full.dtype is dtype else full.to(dtype), bias, as_stored)
    return out if out.dtype == given else out.to(given)  # type: ignore[no-any-return]


def apply_embedding(
    indices: torch.Tensor, parameter: ShardedParameter, padding: int | None, by_frequency: bool
) -> torch.Tensor:
    """Rows of W; differentiable."""
    weight: Weight = parameter.etp
    padding = -1 if padding is None else padding
    if torch.is_grad_enabled() and parameter.requires_grad:
        anchor = weight.model.anchor
        out = Embedding.apply(indices, anchor, weight, padding, by_frequency)  # type: ignore[no-untyped-call]
    else:
        full, _ = weight.gather(weight.model.phase())
        out = torch.embedding(full, indices, padding, by_frequency, False)
    return out if out.dtype == weight.dtype else out.to(weight.dtype)  # type: ignore[no-any-return]
