"""Rows of sharded parameters in the place of the parameters, for the time of an optimiser's step.

Elementwise steps compute on plain tensors, as fast as on an unsharded model of that size. `param_groups` hold row
parameters with gradients of rows, and `state` is keyed by them; all is put back before a hook or a closure looks.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass

from .._errors import InvalidArgumentError, MismatchError
from .batch import Batch, Updates
from .digests import is_plain_tensor
from .parameter import LogicalParameter
from .replicated import replicated_of
from .store import agree, digest_of, refuse_difference
from .telling import known
from .tensor import LogicalTensor, is_sharded
from .weight import Weight
from .whole_parameters import checksum_of, refuse_difference_before

if TYPE_CHECKING:
    from .model import ShardedModel

_PLAIN = (bool, int, float, complex, str, type(None))


class HandedOver:
    """What an optimiser holds of sharded parameters, as plain rows."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: Updates, batch: Batch, counts_writes: bool) -> None:
        """`counts_writes`: the step changes versions of what it writes, which .data would not."""
        self._optimizer = optimizer
        self._counts_writes = counts_writes
        self._updates = updates
        self._batch = batch
        self._stamp = 0
        self._lists: list[tuple[dict[str, Any], list[Any]]] = []  # groups, and their parameters
        self._states: list[tuple[Weight, dict[str, Any], dict[str, LogicalTensor]]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []  # of parameters and states, before the step
        self._order: list[Any] = []  # of the keys of states, likewise

    def begin(self) -> None:
        """Compare what the step depends on, begin the update, and hand rows over. Collective."""
        if self._lists:
            return
        self.require_same()
        self._batch.has_compared = True
        self._batch.begin([weight for _, weights in self._updates for weight in weights])
        self._order = list(self._optimizer.state)
        with torch.no_grad():
            for _, weights in self._updates:
                for weight in weights:
                    if weight.store.rows is not None:  # else it is frozen, and kept quantised only
                        self._hand_over(weight)
        for group in self._optimizer.param_groups:
            self._lists.append((group, group["params"]))
            group["params"] = [_rows_parameter(each) for each in group["params"]]

    def require_same(self) -> None:
        """Throw if ranks would make different steps: of another class, with other numbers, or of gradients that they
        have not written alike. Collective."""
        kind = type(self._optimizer).__name__
        for model, weights in self._updates:
            stamps = [stamp for weight in weights for stamp in self._stamps_of(weight)]
            depends = kind, groups_of(self._optimizer, model), stamps, checksum_of(model), self._stamp
            told = hashlib.blake2b(repr(depends).encode(), digest_size=16).digest()
            self._stamp = int.from_bytes(told[:8], "little", signed=True)
            if model.core.size == 1:
                continue
            answers = model.core.exchange("an optimiser's step", told)
            other = next((rank for rank, answer in enumerate(answers) if answer != answers[0]), None)
            if other is not None:
                refuse_difference_before(f"{kind}.step()", model)
                raise known(
                    MismatchError(
                        f"{kind}.step() of sharded {weights[0].name} and others: ranks 0 and {other} differ in a "
                        "setting (lr, weight_decay, ...), in which parameters a group has, or in what was written into "
                        "parameters, gradients or states: give all ranks the same; no weight was written"
                    )
                )

    def _stamps_of(self, weight: Weight) -> list[Any]:
        parameter = weight.parameter
        gradient = parameter.grad
        state = self._optimizer.state.get(parameter)
        found: list[Any] = [weight.store.stamp, None if gradient is None else gradient.store.stamp]
        if isinstance(state, dict):
            for key, value in state.items():
                if is_sharded(value):
                    found.append(value.store.stamp)
                elif isinstance(value, torch.Tensor) and value.dim() == 0:
                    found.append((key, value.item()))
                elif isinstance(value, _PLAIN):
                    found.append((key, value))
        return found

    def _hand_over(self, weight: Weight) -> None:
        row, parameter = weight.row_parameter, weight.parameter
        gradient = parameter.grad
        row.grad = None if gradient is None else gradient.rows
        states = self._optimizer.state
        state = states.get(parameter)
        logical: dict[str, LogicalTensor] = {}
        if state is not None:
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    tensor = logical_state(weight, key, value)
                    if tensor is not None:
                        logical[key] = tensor
            for key, known in logical.items():
                rows = state[key] = known.rows
                if rows is not None:
                    self._versions.append((rows, rows._version))
            states[row] = states.pop(parameter)
        self._versions.append((row, row._version))
        self._states.append((weight, {} if state is None else state, logical))

    def give_back(self) -> None:
        """Take rows back. Idempotent."""
        lists, self._lists = self._lists, []
        for group, parameters in lists:
            group["params"] = parameters
        changed = {id(tensor) for tensor, version in self._versions if tensor._version != version}
        self._batch.wrote |= bool(changed or (lists and not self._counts_writes))
        states, self._states, self._versions = self._states, [], []
        kept = self._optimizer.state
        for weight, _, logical in states:
            row = weight.row_parameter
            row.grad = None
            state = kept.pop(row, None)
            if state is None:
                continue
            for key, value in state.items():
                known = logical.get(key)
                if known is not None and known.rows is value:
                    if id(value) in changed or not self._counts_writes:
                        known.store.move_stamp(self._stamp)  # ranks have agreed on what it comes from
                    state[key] = known
                elif isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == row.shape:
                    require_plain_state(weight, key, value)
                    state[key] = weight.state_of(key, value)
                    state[key].store.written(self._stamp)
            kept[weight.parameter] = state
        written = [weight.parameter for weight, *_ in states]
        if written:
            self._put_in_order()
            with DisableTorchFunctionSubclass():
                torch.autograd.graph.increment_version(written)

    def _put_in_order(self) -> None:
        """Have states be in the order that they have in plain torch: as before the step, new ones by their groups."""
        states, order = self._optimizer.state, self._order
        if len(order) < len(states):
            order = [*order, *(each for group in self._optimizer.param_groups for each in group["params"])]
        elif all(map(operator.is_, states, order)):
            return
        for key in dict.fromkeys(order):
            if key in states:
                states[key] = states.pop(key)


def counts_writes(kind: type) -> bool:
    """Tell whether a class of optimisers, and functions of its modules that it calls, leave .data alone: writes by it
    go past the versions of tensors."""
    for each in kind.__mro__:
        if each is torch.optim.Optimizer:
            break
        known = vars(sys.modules.get(each.__module__, each))
        waiting, seen = list(vars(each).values()), set()
        while waiting:
            value = waiting.pop()
            function = inspect.unwrap(value) if callable(value) else value
            if not isinstance(function, types.FunctionType) or function in seen:
                continue
            seen.add(function)
            names = _names_in(function.__code__)
            if "data" in names:
                return False
            waiting += [known[name] for name in names if name in known]
    return True


def _names_in(code: types.CodeType) -> set[str]:
    """Return names that a function asks for, and functions within it."""
    within = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, within))


def groups_of(optimizer: torch.optim.Optimizer, model: ShardedModel) -> list[Any]:
    """Return what a step of a model depends on, as values whose repr is equal in all processes: settings of each group,
    and the names of the parameters that it has."""
    return [(*_settings_of(group), sorted(_names_in_group(group, model))) for group in optimizer.param_groups]


def _names_in_group(group: dict[str, Any], model: ShardedModel) -> Iterator[str]:
    for parameter in group["params"]:
        known = parameter.etp if isinstance(parameter, LogicalParameter) else replicated_of(parameter)
        if known is not None and known.model is model:
            yield known.name


def _settings_of(group: dict[str, Any]) -> Iterator[Any]:
    yield len(group["params"])
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        plain = value if isinstance(value, (tuple, list)) else (value,)
        yield name, value if all(isinstance(each, _PLAIN) for each in plain) else type(value).__name__


def _rows_parameter(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, LogicalParameter) or parameter.etp.store.rows is None:
        return parameter
    return parameter.etp.row_parameter


def require_plain_state(weight: Weight, key: str, value: torch.Tensor) -> None:
    """Throw if a state is of another package's class, such as a quantised one."""
    if not is_plain_tensor(value):
        raise InvalidArgumentError(
            f"the state {key!r} of sharded {weight.name} is {type(value).__name__}, of which there are no rows: leave "
            "allow_optimizer() out, with which its steps are right, on whole tensors"
        )


def logical_state(weight: Weight, key: str, value: torch.Tensor) -> LogicalTensor | None:
    """Return a state as one that goes along with a weight; None: it does not."""
    spec = weight.store.spec
    if is_sharded(value):
        if value.rows is not None and not value.chain and spec.is_like(value.spec):
            if not value.store.kept:  # a program has made it outside of steps, as wrappers do
                kept = weight.state_of(key, value.rows)
                kept.store.written(value.store.stamp)
                value.become(kept)
            return value
    elif value.shape != weight.shape:
        if value.shape == weight.row_parameter.shape:
            raise InvalidArgumentError(
                f"the state {key!r} of sharded {weight.name} is {tuple(value.shape)}, as this rank's rows are, and the "
                f"weight is {tuple(weight.shape)}: load whole tensors, or what optimizer.state_dict() gives"
            )
        return None
    if not isinstance(value, LogicalTensor):
        require_plain_state(weight, key, value)
    whole = value.whole() if isinstance(value, LogicalTensor) else value
    what = f"the state {key!r} of sharded {weight.name}"
    if not agree(weight.store, what, digest_of([whole])):
        raise refuse_difference(what)
    return weight.state_of(key, spec.cut(whole).clone(memory_format=torch.contiguous_format))
