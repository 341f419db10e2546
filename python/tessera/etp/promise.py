"""The comparison that stands behind allow_optimizer(): one step of one parameter, on rows and on the whole."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from .._errors import InvalidArgumentError
from .batch import Updates
from .handed_rows import require_plain_state
from .tensor import LogicalTensor, is_sharded
from .weight import Weight

_kept: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_OF_UPDATE = 1e-3  # of the largest element of an update: rounding of rows and of the whole may differ
_OF_VALUES = 4  # roundings of the largest element


class Promise:
    """The promise that a step of an optimiser treats every element by itself, before it has been looked at."""

    def __init__(self, step: Callable[..., Any], optimizer: torch.optim.Optimizer) -> None:
        self._step = step
        self._optimizer = optimizer

    @classmethod
    def of(cls, step: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Promise | None:
        """Return the promise of an optimiser; None: it has been kept before."""
        return None if optimizer in _kept else cls(step, optimizer)

    def keep(self, updates: Updates, arguments: tuple[Any, ...]) -> None:
        """Throw unless the step of the smallest parameter that has a gradient is the same, up to rounding, on copies of
        its rows and of the whole; nothing of the optimiser's is written. Collective, before the first write.

        Args:
            updates: The weights that the optimiser may write.
            arguments: Those of the step: none, or a closure.
        """
        if self._optimizer in _kept:
            return
        weights = [weight for _, weights in updates for weight in weights if weight.parameter.grad is not None]
        weight = min(weights, key=lambda each: each.shape.numel(), default=None)
        if weight is None:
            return
        if weight.group.size > 1:
            self._compare(weight, arguments)
        _kept.add(self._optimizer)

    def _compare(self, weight: Weight, arguments: tuple[Any, ...]) -> None:
        kind = type(self._optimizer).__name__
        parameter, cut = weight.parameter, weight.store.spec.cut
        group = next(
            group for group in self._optimizer.param_groups if any(each is parameter for each in group["params"])
        )
        state = self._optimizer.state.get(parameter, {})
        wholes = {key: _whole(value) for key, value in state.items()}
        gradient, before = parameter.grad.whole(), _whole(parameter)
        whole, states = self._stepped(arguments, group, before, gradient, wholes)
        rows, rows_states = self._stepped(
            arguments,
            group,
            cut(before),
            cut(gradient),
            {key: cut(value) if is_sharded(state[key]) else value for key, value in wholes.items()},
        )
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                require_plain_state(weight, key, value)
        pairs = {"the parameter": (rows, whole, before)}
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                pairs[f"the state {key!r}"] = (rows_states[key], value, wholes.get(key, torch.zeros_like(value)))
        names = [name for name, (own, all_of_it, old) in pairs.items() if not _same(own, all_of_it, old, cut)]
        told = weight.model.core.exchange(f"the first step of {kind}", ", ".join(names).encode())
        differs = next((answer.decode() for answer in told if answer), None)
        if differs is not None:
            raise InvalidArgumentError(
                f"allow_optimizer({kind}) promises that its step treats every element by itself, and a step of "
                f"{weight.name} on the whole gives other values than one on rows, of {differs}: leave "
                "allow_optimizer() out, with which it is right, but slower; nothing was written"
            )

    def _stepped(
        self,
        arguments: tuple[Any, ...],
        group: dict[str, Any],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return a copy of a parameter after a step, and its state."""
        stepped = torch.nn.Parameter(parameter.detach().clone(memory_format=torch.contiguous_format))
        stepped.grad = gradient.detach().clone(memory_format=torch.contiguous_format)
        probe: Any = object.__new__(type(self._optimizer))
        for name, value in vars(self._optimizer).items():
            probe.__dict__[name] = type(value)(value) if type(value) in (dict, list, set) else value
        probe.param_groups = [{**group, "params": [stepped]}]
        probe.state = defaultdict(dict)
        if state:
            copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            probe.state[stepped] = copies
        self._step(probe, *arguments)
        return stepped.detach(), probe.state[stepped]


def _whole(value: Any) -> Any:
    with torch.no_grad():
        return value.whole().detach() if isinstance(value, LogicalTensor) else value


def _same(rows: torch.Tensor, whole: torch.Tensor, before: torch.Tensor, cut: Callable[..., torch.Tensor]) -> bool:
    """Tell whether rows are those of the whole, up to rounding."""
    expected = cut(whole)
    if rows.shape != expected.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(rows, expected)
    rounding = torch.finfo(whole.dtype).eps * _OF_VALUES * float(whole.abs().max())
    bound = _OF_UPDATE * float((whole - before).abs().max()) + rounding
    return bool(torch.allclose(rows, expected, rtol=0.0, atol=bound, equal_nan=True))
