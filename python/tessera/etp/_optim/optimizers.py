"""Optimisers: each step of one that holds sharded parameters is an update, by hooks that see every optimiser."""

from __future__ import annotations

import functools
import hashlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..._errors import InvalidArgumentError, MismatchError
from .._compile import left_out, suspend
from .._refusals import require_same_ranks
from .._weights.matrix import Model
from .._weights.parameter import LogicalParameter
from .._weights.replicated import is_replicated
from .._weights.weight import Weight
from ..store import agree, digest_of, refuse_difference
from ..tensor import LogicalTensor, is_sharded

# Their steps treat every element by itself, so that rows of a weight are updated as in the whole one.
_ELEMENTWISE = {
    f"torch.optim.{name}"
    for name in (
        "adadelta",
        "adagrad",
        "adam",
        "adamax",
        "adamw",
        "asgd",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
    )
}
_allowed: set[type[torch.optim.Optimizer]] = set()


def numbered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """The parameters as state_dict() numbers them."""
    return enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])


Updates = list[tuple[Model, list[Weight]]]
_expected: dict[int, Updates] = {}  # by optimiser: what its step, whose hooks are being called, will write


def allow_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    """Says that an optimiser's step treats every element by itself, so that it may hold sharded parameters. torch's own
    are known."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InvalidArgumentError(f"allow_optimizer({kind!r}): give a class of optimisers")
    _allowed.add(kind)


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    return kind in _allowed or getattr(kind.step, "__module__", "") in _ELEMENTWISE


def updates_of(optimizer: torch.optim.Optimizer) -> Updates:
    """The weights that it may write, by model, in an order that all ranks share."""
    found: dict[int, tuple[Model, list[Weight]]] = {}
    with DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, LogicalParameter):
                    if not parameter.requires_grad and parameter.grad is None:
                        continue
                    weight = parameter.etp
                    found.setdefault(weight.model.number, (weight.model, []))[1].append(weight)
                elif parameter.grad is None and "sharded_as" in parameter.__dict__:
                    raise InvalidArgumentError(
                        f"{type(optimizer).__name__} was made before shard_module_() and holds {parameter.sharded_as} "
                        "as it was, which no model uses now: make optimisers after shard_module_()"
                    )
    return [found[number] for number in sorted(found)]


_looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _look_at(optimizer: torch.optim.Optimizer, models: list[Model]) -> None:
    """Before its first step: what else it holds has been averaged over the same ranks."""
    _looked_at.add(optimizer)
    meshes = {
        tuple(parameter.device_mesh.mesh.flatten().tolist())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter).__name__ == "DTensor"
    }
    for mesh in sorted(meshes):
        for model in models:
            require_same_ranks(model, mesh, "fully_shard()")
    _warn_of_others(optimizer, models)


def _warn_of_others(optimizer: torch.optim.Optimizer, models: list[Model]) -> None:
    """Of parameters beside layers that were constructed sharded, which shard_module_() has not seen. The user may add
    their gradients by other means."""
    if not all(model.of_layers for model in models) or all(model.core.size == 1 for model in models):
        return
    others = [
        parameter
        for _, parameter in numbered(optimizer)
        if type(parameter) is torch.nn.Parameter and parameter.grad is not None and not is_replicated(parameter)
    ]
    if others:
        warnings.warn(
            f"{type(optimizer).__name__} holds {len(others)} parameters, the first of shape {tuple(others[0].shape)}, "
            f"that every rank has whole beside {models[0].weights[0].name} and others: nobody adds their gradients "
            "over the ranks; give the model to etp.shard_module_(), or add them yourself",
            stacklevel=4,
        )


@left_out
def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    updates = updates_of(optimizer)
    if not updates:
        return
    kind = type(optimizer)
    if not is_elementwise(kind):
        raise InvalidArgumentError(
            f"{kind.__name__} holds {updates[0][1][0].name}, which is sharded, and its step does not treat every "
            "element by itself: take an elementwise optimiser (AdamW, SGD, ...), leave the weight out of "
            "shard_module_() by filter=, or, if every element is updated by itself, call etp.allow_optimizer() with "
            "its class"
        )
    if optimizer not in _looked_at:
        _look_at(optimizer, [model for model, _ in updates])
    _enter_step(kind)
    _expected[id(optimizer)] = updates


def _enter_step(kind: type[torch.optim.Optimizer]) -> None:
    """Have the steps of a class, and of those that it derives from, hand rows over.

    torch decorates `step` of each class once, with a function that calls all hooks around it. It finds the step in a
    cell of its closure when it comes to it: there it is inside of all hooks, and a user's see logical tensors."""
    for each in kind.__mro__:
        step: Any = each.__dict__.get("step")
        if not getattr(step, "hooked", False) or getattr(step, "hands_over", False):
            continue
        cell = step.__closure__[step.__code__.co_freevars.index("func")]
        cell.cell_contents = _handing_over(cell.cell_contents)
        step.hands_over = True


def _handing_over(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that computes on this rank's rows."""

    @functools.wraps(step)
    def wrapper(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        updates = _expected.pop(id(optimizer), None)
        if updates is None:
            return step(optimizer, *args, **kwargs)
        handed = HandedOver(optimizer, updates)
        closure = kwargs.pop("closure", args[0] if args else None)
        go_on = suspend()
        try:
            if closure is None:
                handed.begin()
                return step(optimizer, *args, **kwargs)

            def evaluate() -> Any:
                """Compute gradients, which needs the weights: the update begins after it."""
                loss = closure()
                handed.begin()
                return loss

            return step(optimizer, evaluate, *args[1:], **kwargs)
        finally:
            handed.end()
            go_on()

    return left_out(wrapper)


class HandedOver:
    """What an optimiser holds of sharded parameters, as plain rows for the time of its step."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: Updates) -> None:
        self._optimizer = optimizer
        self._updates = updates
        self._begun: list[Model] = []
        self._lists: list[tuple[dict[str, Any], list[Any]]] = []  # groups, and their parameters
        self._states: list[tuple[Weight, dict[str, Any], dict[str, LogicalTensor]]] = []

    def begin(self) -> None:
        """Compare what the step depends on, begin the update, and hand rows over."""
        if self._begun:
            return
        for model, weights in self._updates:
            self._require_same(model, weights)
        for model, weights in self._updates:
            model.begin_update(weights)
            self._begun.append(model)
        with torch.no_grad():
            for _, weights in self._updates:
                for weight in weights:
                    self._hand_over(weight)
        for group in self._optimizer.param_groups:
            self._lists.append((group, group["params"]))
            group["params"] = [_rows_parameter(each) for each in group["params"]]

    def _require_same(self, model: Model, weights: list[Weight]) -> None:
        """Throw if ranks would make different steps: of another class, with other numbers, or gradients that they have
        not written alike. Collective."""
        if model.core.size == 1:
            return
        stamps = [(weight.store.stamp, 0 if weight.parameter.grad is None else weight.parameter.grad.store.stamp)
                  for weight in weights]  # fmt: skip
        told = repr((type(self._optimizer).__name__, *map(_settings, self._optimizer.param_groups), stamps)).encode()
        answers = model.core.exchange("an optimiser's step", hashlib.blake2b(told, digest_size=16).digest())
        other = next((rank for rank, answer in enumerate(answers) if answer != answers[0]), None)
        if other is not None:
            raise MismatchError(
                f"{type(self._optimizer).__name__}.step() of sharded {weights[0].name} and others: ranks 0 and {other} "
                "differ in a setting (lr, weight_decay, ...) or in what was written into parameters or gradients: give "
                "all ranks the same; no weight was written"
            )

    def _hand_over(self, weight: Weight) -> None:
        row, parameter = weight.row_parameter, weight.parameter
        gradient = parameter.grad
        row.grad = None if gradient is None else gradient.rows
        state = self._optimizer.state.get(parameter)
        logical: dict[str, LogicalTensor] = {}
        if state is not None:
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    found = _logical_state(weight, key, value)
                    if found is not None:
                        logical[key] = found
            for key, known in logical.items():
                state[key] = known.rows
            self._optimizer.state[row] = self._optimizer.state.pop(parameter)
        self._states.append((weight, {} if state is None else state, logical))

    def end(self) -> None:
        """Take rows back, and publish the weights."""
        for group, parameters in self._lists:
            group["params"] = parameters
        for weight, _, logical in self._states:
            row, parameter = weight.row_parameter, weight.parameter
            row.grad = None
            if row not in self._optimizer.state:
                continue
            state = self._optimizer.state.pop(row)
            for key, value in state.items():
                known = logical.get(key)
                if known is not None and known.rows is value:
                    state[key] = known
                elif isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == row.shape:
                    state[key] = weight.state_of(key, value)
            self._optimizer.state[parameter] = state
        written = [weight.parameter for weight, *_ in self._states]
        if written:
            with DisableTorchFunctionSubclass():
                torch.autograd.graph.increment_version(written)
        for model in self._begun:
            model.end_update()


def _settings(group: dict[str, Any]) -> list[Any]:
    return [
        (name, value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    ]


def _rows_parameter(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, LogicalParameter) or parameter.etp.store.rows is None:  # frozen, kept quantised only
        return parameter
    return parameter.etp.row_parameter


def _logical_state(weight: Weight, key: str, value: torch.Tensor) -> LogicalTensor | None:
    """Return a state as one that goes along with a weight; None: it does not."""
    spec = weight.store.spec
    if is_sharded(value):
        if value.rows is not None and not value.chain and spec.is_like(value.spec):
            return value
    elif value.shape != weight.shape:
        if value.shape == weight.row_parameter.shape:
            raise InvalidArgumentError(
                f"the state {key!r} of sharded {weight.name} is {tuple(value.shape)}, as this rank's rows are, and the "
                f"weight is {tuple(weight.shape)}: load whole tensors, or what optimizer.state_dict() gives"
            )
        return None
    whole = value.whole() if isinstance(value, LogicalTensor) else value
    what = f"the state {key!r} of sharded {weight.name}"
    if not agree(weight.store, what, digest_of([whole])):
        raise refuse_difference(what)
    return weight.state_of(key, spec.cut(whole).clone(memory_format=torch.contiguous_format))


_hooked: list[Callable[[], None]] = []


def watch_optimizers() -> None:
    """Once a process."""
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before).remove)
