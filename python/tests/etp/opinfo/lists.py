"""Operations on lists of tensors: foreach ones of torch's database, and others that no database has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from .database import Operation, Sample
from .modes import Call

SIZES = ((6, 4), (12, 3), (6,))


def list_operations(invocations: ModuleType) -> list[Operation]:
    """Return the operations of torch's foreach databases, and those that are in none."""
    kinds = ("unary", "binary", "pointwise", "reduce", "other")
    infos = [info for kind in kinds for info in getattr(invocations, f"foreach_{kind}_op_db")]
    return [*map(_from_foreach_info, infos), *_others()]


def _from_foreach_info(info: Any) -> Operation:
    variants = {Call.INPLACE: info.inplace_variant}
    if hasattr(torch, info.name):
        variants[Call.FUNCTION] = getattr(torch, info.name)
    known = {call: function for call, function in variants.items() if function is not None}
    return Operation(info.name, known, functools.partial(_foreach_samples, info), is_list=True)


def _foreach_samples(info: Any) -> Iterator[Sample]:
    for same_size in (True, False):
        samples = info.sample_inputs_func(info, "cpu", torch.float32, False, num_input_tensors=[6], same_size=same_size)
        for sample in samples:
            kwargs = {name: value for name, value in sample.kwargs.items() if name != "disable_fastpath"}
            yield Sample(list(sample.input), tuple(sample.args), kwargs)


def _tensors() -> list[torch.Tensor]:
    return [torch.randn(size) for size in SIZES]


def _positive() -> list[torch.Tensor]:
    return [torch.rand(size) + 0.5 for size in SIZES]


def _steps() -> list[torch.Tensor]:
    return [torch.tensor(3.0) for _ in SIZES]


def _powsum() -> Iterator[Sample]:
    yield Sample(_positive(), (2,))


def _pointwise_scalars() -> Iterator[Sample]:
    """Yield scalars that are a tensor, which foreach databases leave out."""
    yield Sample(_tensors(), (_tensors(), _positive(), torch.tensor([0.5, 2.0, 1.5])))


def _adam() -> Iterator[Sample]:
    for amsgrad in (False, True):
        maxima = _positive() if amsgrad else []
        kwargs = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8}
        kwargs |= {"amsgrad": amsgrad, "maximize": False}
        yield Sample(_tensors(), (_tensors(), _tensors(), _positive(), maxima, _steps()), kwargs)
        yield Sample(
            _tensors(), (_tensors(), _tensors(), _positive(), maxima, _steps()), {**kwargs, "lr": torch.tensor(0.1)}
        )


def _sgd() -> Iterator[Sample]:
    for momentum in (0.9, 0.0):
        kwargs: dict[str, Any] = {"weight_decay": 0.01, "momentum": momentum, "lr": 0.1, "dampening": 0.0}
        kwargs |= {"nesterov": momentum > 0, "maximize": False, "is_first_step": False}
        yield Sample(_tensors(), (_tensors(), _tensors() if momentum else []), kwargs)


def _adagrad() -> Iterator[Sample]:
    kwargs = {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
    yield Sample(_tensors(), (_tensors(), _positive(), _steps()), kwargs)


def _unscale() -> Iterator[Sample]:
    yield Sample(_tensors(), (torch.zeros(1), torch.tensor(0.25)))
    infinite = _tensors()
    infinite[0][1, 1] = torch.inf
    yield Sample(infinite, (torch.zeros(1), torch.tensor(0.25)))


def _written(name: str, make_samples: Callable[[], Iterator[Sample]]) -> Operation:
    """Return an operation that writes its first lists."""
    return Operation(name, {Call.INPLACE: getattr(torch, name)}, make_samples, is_list=True)


def _others() -> Iterator[Operation]:
    if hasattr(torch, "_foreach_powsum"):  # of torch 2.13, not of 2.9
        yield Operation("_foreach_powsum", {Call.FUNCTION: torch._foreach_powsum}, _powsum, is_list=True)
    for name in ("_foreach_addcmul", "_foreach_addcdiv"):
        variants = {Call.FUNCTION: getattr(torch, name), Call.INPLACE: getattr(torch, f"{name}_")}
        yield Operation(f"{name}.scalars", variants, _pointwise_scalars, is_list=True)
    yield _written("_fused_adam_", _adam)
    yield _written("_fused_adamw_", _adam)
    yield _written("_fused_sgd_", _sgd)
    yield _written("_fused_adagrad_", _adagrad)
    yield _written("_amp_foreach_non_finite_check_and_unscale_", _unscale)
