"""state_dict() and load_state_dict() of optimisers that hold sharded parameters.

It takes what any number of ranks has saved: logical tensors, whole tensors and DTensors, by name where both sides know
names. In two steps, each with one exchange: first names, kinds, shapes and numbers, so that what one rank refuses is
told to all before a tensor is gathered; then digests of the tensors that are the same on all ranks. Only then rows are
put into memory that all ranks read.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from .._errors import InvalidArgumentError, MismatchError
from .chunks import whole_shape
from .compile import left_out
from .digests import comparable_digest, is_plain_tensor
from .model import ShardedModel
from .parameter import LogicalParameter
from .parts import WholePart
from .state_dict import UncutState, held_of, rows_of
from .state_helpers import watch_helpers
from .state_kinds import kind_of, require_kind, require_options, shapes_are_parameters
from .state_names import names_of, numbered_parameters, saved_names_of
from .store import digest_of
from .telling import answers_of, json_of, known, told_of
from .tensor import LogicalTensor, is_sharded
from .weight import Weight

State = dict[str, Any]
_WHAT = "an optimiser's load_state_dict()"


def watch_loads() -> None:
    """Once a process."""
    torchs = torch.optim.Optimizer.load_state_dict
    if getattr(torchs, "takes_logical", False):
        return

    @functools.wraps(torchs)
    def load_state_dict(optimizer: torch.optim.Optimizer, state_dict: State) -> Any:
        if not any(isinstance(each, LogicalParameter) or held_of("", each) for each in numbered_parameters(optimizer)):
            return torchs(optimizer, _plain(state_dict))
        handle = optimizer.register_load_state_dict_pre_hook(_prepared)  # behind the user's
        try:
            return torchs(optimizer, state_dict)
        finally:
            handle.remove()

    its_state = torch.optim.Optimizer.state_dict

    @functools.wraps(its_state)
    def state_dict(optimizer: torch.optim.Optimizer) -> State:
        watch_helpers()
        return its_state(optimizer)

    wrapper: Any = left_out(load_state_dict)
    wrapper.takes_logical = True
    torch.optim.Optimizer.load_state_dict = wrapper  # type: ignore[method-assign]
    torch.optim.Optimizer.state_dict = left_out(state_dict)  # type: ignore[method-assign, assignment]


def _plain(state: Any) -> Any:
    """Return a state for parameters that are not sharded: what is sharded in it, whole."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return state  # which torch refuses
    with torch.no_grad():
        whole = tree_map_only((LogicalTensor, UncutState), lambda each: each.whole().clone(), state["state"])
    return {**state, "state": whole}


def _prepared(optimizer: torch.optim.Optimizer, state: State) -> State:
    """Return the state as this rank is to load it. Collective."""
    models = _models_of(optimizer)
    with torch.no_grad():
        plan = _shared(models, lambda: _plan(optimizer, state), lambda plan: plan.told)
        _shared(models, plan.gather, lambda told: told)
        for model in models:
            model.begin_states()
        try:
            loaded: State = plan.state()
            return loaded
        finally:
            for model in models:
                model.end_states()


def _models_of(optimizer: torch.optim.Optimizer) -> list[ShardedModel]:
    """Return the models whose ranks load together, in an order that they share."""
    found = {
        parameter.etp.model.number: parameter.etp.model
        for parameter in numbered_parameters(optimizer)
        if isinstance(parameter, LogicalParameter)
    }
    return [found[number] for number in sorted(found)]


Told = list[tuple[str, str]]  # what, and its digest


def _shared(models: list[ShardedModel], function: Callable[[], Any], told: Callable[[Any], Told]) -> Any:
    """Call a function on all ranks. An error on one of them is raised on all; so is a difference of what it tells."""
    error: Exception | None = None
    result: Any = None
    own: Told = []
    try:
        result = function()
        own = told(result)
    except Exception as raised:
        error = raised
    blob = told_of(_WHAT, json.dumps(own).encode(), error)
    told_by_all = [model.core.exchange(_WHAT, blob) for model in models]  # in all groups, whatever one of them tells
    for answers in told_by_all:
        _require_same(answers_of(answers, error))
    return result


def _require_same(answers: list[bytes]) -> None:
    told = [
        dict(pairs)
        for pairs in json_of(answers, "an optimiser's state", lambda pairs: all(len(pair) == 2 for pair in pairs))
    ]
    other = next((rank for rank, answer in enumerate(answers) if answer != answers[0]), None)
    if other is None:
        return
    first, second = told[0], told[other]
    what = next((what for what in [*first, *second] if first.get(what) != second.get(what)), "the order of its entries")
    raise known(
        MismatchError(
            f"{_WHAT}: ranks 0 and {other} give it different states: {what} differs: load the same file on all ranks, "
            "or broadcast what one rank has read; nothing was loaded"
        )
    )


class _Entry(NamedTuple):
    """A tensor of a state, and what becomes of it."""

    number: int  # of the parameter
    path: tuple[Any, ...]  # of keys
    value: torch.Tensor
    weight: Weight | WholePart | None  # whose shape it has
    on_rows: bool  # it has this rank's rows of that weight
    name: str


class _Plan:
    """What one rank is going to load."""

    def __init__(self, groups: list[State], states: dict[Any, State], entries: list[_Entry], told: Told) -> None:
        self._groups = groups
        self._states = states
        self._entries = entries
        self._wholes: dict[int, torch.Tensor] = {}  # by entry
        self.told = told

    def gather(self) -> Told:
        """Make the tensors whole that do not have this rank's rows. Collective; all ranks have the same ones."""
        told = []
        for place, entry in enumerate(self._entries):
            if not entry.on_rows:
                if _is_opaque(entry.value):
                    told.append((entry.name, comparable_digest(entry.value)))
                    continue
                whole = _whole(entry.value, entry.weight)
                self._wholes[place] = whole
                told.append((entry.name, digest_of([whole])[:16].hex()))
        return told

    def state(self) -> State:
        """Return a state whose tensors have memory of their own, but for those of other packages' classes."""
        for place, entry in enumerate(self._entries):
            into = self._states[entry.number]
            for key in entry.path[:-1]:
                into = into[key]
            into[entry.path[-1]] = self._loaded(place, entry)
        return {"state": self._states, "param_groups": self._groups}

    def _loaded(self, place: int, entry: _Entry) -> torch.Tensor:
        weight, key = entry.weight, str(entry.path[-1])
        if _is_opaque(entry.value):
            return entry.value
        if isinstance(weight, Weight):
            rows = _rows(entry.value, weight) if entry.on_rows else weight.store.spec.cut(self._wholes[place])
            dtype = weight.dtype if key != "step" else rows.dtype
            return weight.state_of(key, rows.to(dtype, copy=True, memory_format=torch.contiguous_format))
        return self._wholes[place].clone(memory_format=torch.preserve_format)


def _rows(value: Any, weight: Weight) -> torch.Tensor:
    """Return this rank's rows in the shape of its parameter's."""
    rows: Any = value.rows if isinstance(value, LogicalTensor) else value.rows_for(weight)
    like = weight.store.rows if weight.store.rows is not None else weight.local
    return rows.reshape(like.shape)  # type: ignore[no-any-return]


def _whole(value: Any, weight: Weight | WholePart | None) -> torch.Tensor:
    if weight is not None:
        value = rows_of(value, weight)
    if isinstance(value, UncutState | LogicalTensor):
        value = value.whole()
    if hasattr(value, "full_tensor"):  # a DTensor
        value = value.full_tensor()
    return value.detach()  # type: ignore[no-any-return]


def _plan(optimizer: torch.optim.Optimizer, state: State) -> _Plan:
    """Check a state as far as one rank can."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict) or "param_groups" not in state:
        raise InvalidArgumentError(f"{_WHAT}: it has no state and param_groups: give what state_dict() returns")
    saved = [dict(group) for group in state["param_groups"]]
    keys = [key for group in saved for key in group["params"]]
    groups, order = _matched(optimizer, saved, saved_names_of(state["state"], saved))
    require_options(optimizer, groups, _WHAT)
    parameters = numbered_parameters(optimizer)
    names = [name or f"parameter {number}" for number, name in enumerate(names_of(optimizer))]
    states: dict[Any, State] = {
        number: _copied(state["state"][keys[place]])
        for number, place in enumerate(order)
        if keys[place] in state["state"]
    }
    require_kind(optimizer, [(names[number], entry) for number, entry in states.items()], _WHAT)
    entries: list[_Entry] = []
    told: Told = [("param_groups", _hashed(_settings(groups)))]
    for number, own in states.items():
        for path, value in _leaves(own):
            name = f"state {'.'.join(map(str, path))!r} of {names[number]}"
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                told.append((name, _hashed(value.item() if isinstance(value, torch.Tensor) else value)))
                continue
            entry = _entry_of(optimizer, number, path, value, parameters[number], name)
            entries.append(entry)
            how = "rows" if entry.on_rows else "whole"
            told.append((name, f"{how} {tuple(value.shape)} {value.dtype}"))
    others = {key: value for key, value in state["state"].items() if key not in keys}
    return _Plan(groups, {**states, **others}, entries, told)


def _entry_of(
    optimizer: torch.optim.Optimizer,
    number: int,
    path: tuple[Any, ...],
    value: torch.Tensor,
    parameter: torch.Tensor,
    name: str,
) -> _Entry:
    weight: Any = held_of("", parameter)
    if _is_opaque(value):
        return _Entry(number, path, value, None, False, name)
    if weight is None:
        if shapes_are_parameters(optimizer) and value.shape != parameter.shape:
            raise _unlike(name, value, parameter.shape)
        return _Entry(number, path, value, None, False, name)
    if value.shape in (weight.shape, whole_shape(weight)):
        return _Entry(number, path, value, weight, _is_on_rows(value, weight), name)
    # Another package's state in the shape of the rows is most likely one of rows. Torch's own kinds have other shapes,
    # which may be those of the rows by chance: Adafactor's col_var is, where a rank has one row.
    rows = () if kind_of(optimizer) else (weight.local.shape, _shape_of_rows(weight))
    if shapes_are_parameters(optimizer) or value.shape in rows:
        raise _unlike(name, value, whole_shape(weight))
    return _Entry(number, path, value, None, False, name)


def _is_opaque(value: torch.Tensor) -> bool:
    """Tell whether a tensor is of another package's class, such as a quantised state, whose rows nobody can cut."""
    known = isinstance(value, LogicalTensor | UncutState) or hasattr(value, "full_tensor")
    return not known and not is_plain_tensor(value)


def _unlike(name: str, value: torch.Tensor, shape: torch.Size) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{_WHAT}: {name} is {tuple(value.shape)}, and the parameter {tuple(shape)}: load whole tensors, or what "
        "optimizer.state_dict() or etp.optimizer_state_dict() gave; nothing was loaded"
    )


def _shape_of_rows(weight: Any) -> Any:
    store = getattr(weight, "store", None)
    return None if store is None or store.rows is None else store.rows.shape


def _is_on_rows(value: Any, weight: Weight | WholePart) -> bool:
    if not isinstance(weight, Weight):
        return False
    if isinstance(value, UncutState):
        return value.has_rows_of(weight)
    return is_sharded(value) and value.rows is not None and not value.chain and weight.store.spec.is_like(value.spec)


# --- which parameter is meant


def _matched(
    optimizer: torch.optim.Optimizer, saved: list[State], theirs: list[str | None]
) -> tuple[list[State], list[int]]:
    """Return its groups in this optimiser's order, with its numbers, and the place in the state of each of them: by
    name where both sides know names, else by position."""
    own = names_of(optimizer)
    lengths, its = [len(group["params"]) for group in optimizer.param_groups], [len(group["params"]) for group in saved]
    conflict = next(
        (
            (mine, other)
            for mine, other in zip(own, theirs, strict=False)
            if mine != other and mine is not None and other is not None and (mine in theirs or other in own)
        ),
        None,
    )
    if conflict is None:
        if lengths != its:
            raise InvalidArgumentError(
                f"{_WHAT}: its param_groups have {its} parameters, and this optimiser's {lengths}: make it with the "
                "same groups; nothing was loaded"
            )
        return _numbered(saved, list(map(_renamed, saved, optimizer.param_groups))), list(range(len(own)))
    if None in own or None in theirs or set(own) != set(theirs):
        mine, other = conflict
        missing = sorted(name for name in own if name is not None and name not in theirs)
        raise InvalidArgumentError(
            f"{_WHAT}: it has {other} where this optimiser has {mine}"
            f"{', and no ' + ', '.join(missing[:5]) if missing and None not in theirs else ''}: make the optimiser "
            "with the parameters of the one that was saved, of model.named_parameters() if their order differs; "
            "nothing was loaded"
        )
    order = [theirs.index(name) for name in own]
    group_of = [number for number, group in enumerate(saved) for _ in group["params"]]
    groups, at = [], 0
    for number, group in enumerate(optimizer.param_groups):
        sources = {group_of[place] for place in order[at : at + lengths[number]]}
        if len(sources) > 1 or (sources and its[min(sources)] != lengths[number]):
            raise InvalidArgumentError(
                f"{_WHAT}: param_groups[{number}] has {own[at]} and others, which are not one group of the state: make "
                "the optimiser with the same groups; nothing was loaded"
            )
        groups.append(_renamed(saved[min(sources, default=number)], group))
        at += lengths[number]
    return _numbered(groups, groups, lengths), order


def _renamed(saved: State, group: State) -> State:
    """Return the options of a saved group, with this one's names."""
    found = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
    if "param_names" in group:
        found["param_names"] = list(group["param_names"])
    elif "param_names" in saved:
        found["param_names"] = list(saved["param_names"])
    return found


def _numbered(saved: list[State], options: list[State], lengths: list[int] | None = None) -> list[State]:
    groups, at = [], 0
    for number, group in enumerate(options):
        count = len(saved[number]["params"]) if lengths is None else lengths[number]
        groups.append({**group, "params": list(range(at, at + count))})
        at += count
    return groups


# --- what is compared


def _copied(value: Any) -> Any:
    """Return containers of their own, of the same leaves; step counts, which optimisers count on, too."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.clone()
    return [_copied(each) for each in value] if type(value) is list else value


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        pairs = value.items()
    elif type(value) is list:
        pairs = enumerate(value)
    else:
        yield path, value
        return
    for key, each in pairs:
        yield from _leaves(each, (*path, key))


def _settings(groups: list[State]) -> list[Any]:
    return [
        [(name, _number(value)) for name, value in sorted(group.items(), key=lambda item: str(item[0]))]
        for group in groups
    ]


def _number(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _hashed(value: Any) -> str:
    return hashlib.blake2b(_text(value).encode(), digest_size=8).hexdigest()


def _text(value: Any) -> str:
    """Return a text that is equal in all processes: without addresses."""
    if value is None or isinstance(value, bool | int | float | str | bytes | complex):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(each)}' for key, each in value.items())}}}"
    return type(value).__name__
