"""The comparison that stands behind allow_optimizer(): steps of single parameters, on rows and on the whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from .._errors import InvalidArgumentError
from .batch import Updates
from .handed_rows import require_plain_state
from .tensor import LogicalTensor, is_sharded
from .weight import Weight

_STEPS = 2  # whose states begin empty, and with what the step before has left
_OF_UPDATE = 1e-3  # of the largest element of an update: rounding of rows and of the whole may differ
_OF_VALUES = 4  # roundings of the largest element


class Promise:
    """The promise that the steps of an optimiser treat every element by itself.

    What a step does may depend on a parameter's shape (a matrix is factored, a bias is not; small ones are not
    quantised), dtype and options: of all parameters that share these, one is compared, in the first steps in which they
    have gradients."""

    def __init__(self) -> None:
        self._compared: dict[Hashable, int] = {}  # steps, by what may make a difference

    def keep(
        self, step: Callable[..., Any], optimizer: torch.optim.Optimizer, updates: Updates, arguments: tuple[Any, ...]
    ) -> None:
        """Throw unless the step of each kind of parameter is the same, up to rounding, on copies of its rows and of the
        whole; nothing of the optimiser's is written. Collective, before the first write.

        Args:
            step: The step of its class.
            optimizer: The one that has promised.
            updates: The weights that it may write.
            arguments: Those of the step: none, or a closure.
        """
        for model, weights in updates:
            chosen = self._chosen(optimizer, weights) if model.size > 1 else {}
            if not chosen:
                continue
            kind = type(optimizer).__name__
            found = [(weight.name, _differences(step, optimizer, weight, arguments)) for weight in chosen.values()]
            own = next((f"{name}\0{', '.join(names)}" for name, names in found if names), "")
            differs = next(
                (told for told in model.core.exchange(f"a first step of {kind}", own.encode()) if told), None
            )
            if differs is None:
                self._compared.update({kind: self._compared.get(kind, 0) + 1 for kind in chosen})
                continue
            name, what = differs.decode().split("\0")
            raise InvalidArgumentError(
                f"allow_optimizer({kind}) promises that its step treats every element by itself, and a step of {name} "
                f"on the whole gives other values than one on rows, of {what}: leave allow_optimizer() out, with which "
                "it is right, but slower; nothing was written"
            )

    def _chosen(self, optimizer: torch.optim.Optimizer, weights: list[Weight]) -> dict[Hashable, Weight]:
        """Return one weight of each kind that is to be compared in this step, by kind."""
        found: dict[Hashable, Weight] = {}
        for weight in weights:
            parameter = weight.parameter
            if parameter.grad is not None:
                number, _ = _group_of(optimizer, parameter)
                found.setdefault((number, weight.shape, parameter.dtype, parameter.grad.dtype), weight)
        return {kind: weight for kind, weight in found.items() if self._compared.get(kind, 0) < _STEPS}


def _group_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[int, dict[str, Any]]:
    groups = enumerate(optimizer.param_groups)
    return next((n, group) for n, group in groups if any(each is parameter for each in group["params"]))


def _differences(
    step: Callable[..., Any], optimizer: torch.optim.Optimizer, weight: Weight, arguments: tuple[Any, ...]
) -> list[str]:
    """Return what is not the same behind a step of copies of a weight's rows and of the whole. Collective."""
    parameter, cut = weight.parameter, weight.store.spec.cut
    _, group = _group_of(optimizer, parameter)
    state = optimizer.state.get(parameter, {})
    wholes = {key: _whole(value) for key, value in state.items()}
    own = {key: cut(value) if is_sharded(state[key]) else value for key, value in wholes.items()}
    gradient, before = parameter.grad.whole(), _whole(parameter)
    whole, states = _stepped(step, optimizer, arguments, group, before, gradient, wholes)
    rows, rows_states = _stepped(step, optimizer, arguments, group, cut(before), cut(gradient), own)
    for key, value in states.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            require_plain_state(weight, key, value)
    pairs = {"the parameter": (rows, whole, before)}
    for key, value in states.items():
        if isinstance(value, torch.Tensor) and value.shape == weight.shape:
            pairs[f"the state {key!r}"] = (rows_states[key], value, wholes.get(key, torch.zeros_like(value)))
    return [name for name, (of_rows, of_whole, old) in pairs.items() if not _same(of_rows, of_whole, old, cut)]


def _stepped(
    step: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    arguments: tuple[Any, ...],
    group: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a copy of a parameter after a step, and its state."""
    stepped = torch.nn.Parameter(parameter.detach().clone(memory_format=torch.contiguous_format))
    stepped.grad = gradient.detach().clone(memory_format=torch.contiguous_format)
    probe: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        probe.__dict__[name] = type(value)(value) if type(value) in (dict, list, set) else value
    probe.param_groups = [{**group, "params": [stepped]}]
    probe.state = defaultdict(dict)
    if state:
        copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        probe.state[stepped] = copies
    step(probe, *arguments)
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
