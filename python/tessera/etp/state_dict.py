"""state_dict() and load_state_dict() of sharded modules: what is saved tells the logical shape, and cannot be taken for
the whole weight."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from .._errors import InvalidArgumentError, MismatchError
from .chunks import chunk_list, shard_at, whole_shape, write_items
from .parameter import LogicalParameter
from .parts import WholePart, whole_part
from .registered import RowsSource
from .state_helpers import watch_helpers
from .telling import families_in, json_of, known, telling
from .tensor import LogicalTensor, is_sharded
from .weight import Weight

if TYPE_CHECKING:
    from .model import ShardedModel

Held = Weight | WholePart


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLACES = ("rows", "shard_rows", "shape", "lead", "tp_cut")
_FACTS = words(
    "size dim ndimension numel nelement stride is_floating_point is_complex is_contiguous element_size get_device "
    "is_pinned is_shared is_inference __len__ __hash__ requires_grad_"
)
_COPIES = frozenset(("clone", "detach", "__deepcopy__"))
_EMPTY = frozenset(("new_empty", "empty_like", "zeros_like"))


class UncutState(torch.Tensor):
    """A value of a state_dict() of what tensor parallelism has cut: it has the shape of the uncut tensor, and this
    rank's rows of its part. Arithmetic is refused; etp.whole() gives all of it, collectively, over the tp_group, too.

    load_state_dict() of a sharded model takes it. clone() and copy.deepcopy() copy this rank's rows.
    torch.distributed.checkpoint saves and loads it: what it loads is this tensor's own, until load_state_dict(), and
    what async_save() stages is a copy of this rank's rows.

    Attributes:
        local: This rank's rows, [rows, K], or [E, rows, K] of a stack: the model's own memory, or a copy's. Of a weight
            without a master, a new tensor each time.
        etp: Name, shape and rows of the weight, as `p.etp`.
    """

    etp: Held
    _rows: torch.Tensor | None

    def __new__(cls, weight: Held, rows: torch.Tensor | None) -> UncutState:
        """`rows`: None: those that uses of the weight see, whenever they are asked for."""
        like = weight.local if rows is None else rows
        made: UncutState = torch.Tensor._make_wrapper_subclass(
            cls, whole_shape(weight), dtype=like.dtype, device=like.device
        )
        made._rows, made.etp = rows, weight
        return made

    @property
    def local(self) -> torch.Tensor:
        return self.etp.values() if self._rows is None else self._rows

    def __tessera_source__(self, name: str) -> RowsSource[Any]:
        """How a batch of the tensor bus registers it."""
        return RowsSource(name, self, _own_rows)

    def is_state_of(self, weight: Held) -> bool:
        """Whether it is what that weight has now, and not a copy."""
        return self._rows is None and self.etp is weight

    def whole(self) -> torch.Tensor:
        """All of it, as a tensor of its own. Collective, over a tp_group, too."""
        held = self.etp
        part, cut, parallel = held.part_from(self.local), held.tp_cut, held.parallel
        if cut is None or parallel is None:
            return part
        return parallel.gather_parts(part, cut.dim, cut.halves, cut.total)

    def has_rows_of(self, weight: Held) -> bool:
        """Tell whether its rows are those that this rank has of another weight."""
        return all(getattr(weight, each) == getattr(self.etp, each) for each in _PLACES)

    def rows_for(self, weight: Held) -> torch.Tensor:
        """Those that this rank has of another weight of that shape."""
        return self.local if self.has_rows_of(weight) else cut_for(weight, self.whole())

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        first = args[0] if args else None
        if name in _COPIES and type(first) is cls:
            return cls(first.etp, first._rows if name == "detach" else first.local.clone())
        if type(first) is cls:  # what a state is staged by
            if name in _EMPTY:
                return first._empty(args[1:], kwargs or {})
            if name == "data_ptr":
                return 0
            if name == "copy_" and first._takes(args[1]):
                first.local.copy_(args[1].local)
                return first
        if name in _FACTS or (name == "__get__" and func.__self__.__name__ != "data"):  # type: ignore[attr-defined]
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        _refuse(args, name)

    def _empty(self, sizes: tuple[Any, ...], options: dict[str, Any]) -> UncutState:
        """Zeros in host memory, for a copy of these rows."""
        others = {name: value for name, value in options.items() if value is not None and name != "requires_grad"}
        place = others.pop("device", "cpu")
        wanted = torch.Size(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
        if others or torch.device(place).type != "cpu" or wanted not in (self.shape, ()):
            _refuse((self,), "new_empty")
        return UncutState(self.etp, torch.zeros(self.etp.local.shape, dtype=self.dtype))

    def _takes(self, other: Any) -> bool:
        """Whether copy_() of it is possible. The model's memory is written by load_state_dict() only."""
        return (
            type(other) is UncutState
            and self._rows is not None
            and self.etp is other.etp
            and (self._rows.numel() == 0 or self._rows.data_ptr() != self.etp.address)
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        _refuse(args, func.__name__)

    # torch.distributed.checkpoint's protocol

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self.etp, self.etp.local if self._rows is None else self._rows)

    def __create_chunk_list__(self) -> list[Any]:
        """It is going to be loaded. Other ranks may read the model's memory, so that is left to load_state_dict()."""
        if self._rows is None or self._rows.data_ptr() == self.etp.address:
            self._rows = self.local.clone()
        return chunk_list(self.etp)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return shard_at(self.etp, self.local, index.offset)

    def __deepcopy__(self, memo: dict[int, Any]) -> UncutState:
        copied = UncutState(self.etp, self.local.clone())
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What only tensor parallelism has cut is this rank's part in a file, as it always was."""
        if isinstance(self.etp, WholePart):
            return self.local.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        raise InvalidArgumentError(
            f"{self.etp.name} is sharded and its state cannot be pickled: save the state_dict() within "
            "etp.summon(model), or what etp.whole() gives for each of these tensors"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        begin, end = self.etp.rows
        return f"UncutState({self.etp.name!r}, {tuple(self.etp.shape)}, here rows {begin} to {end})"


def _own_rows(tensor: UncutState) -> torch.Tensor:
    """In memory that stays."""
    if tensor._rows is None and isinstance(tensor.etp, Weight):
        tensor.etp.require_rows()
    return tensor.local


def _refuse(args: tuple[Any, ...], name: str) -> NoReturn:
    found = next((each for each in args if type(each) is UncutState), None)
    what = "a sharded weight" if found is None else found.etp.name
    raise InvalidArgumentError(
        f"{name}() of {what} in a state_dict(), of which this rank has some rows: use etp.whole(), which is "
        "collective, or .local"
    )


def rows_of(given: Any, weight: Held) -> Any:
    """Return what a parameter is to copy of a value in a state_dict: sharded alike, or the part that the tp_group gives
    this rank. Another shape stays, for torch to tell."""
    if type(given) is UncutState:
        if given.shape != whole_shape(weight):
            return given.whole()
        rows = given.rows_for(weight)
        return rows if isinstance(weight, WholePart) else weight.rows_as_value(rows)
    if is_sharded(given) and isinstance(weight, Weight) and weight.tp_cut is None:
        return given
    if isinstance(given, LogicalTensor):
        given = given.whole()
    if hasattr(given, "full_tensor"):  # a DTensor
        given = given.full_tensor()
    if weight.tp_cut is not None and getattr(given, "shape", None) == whole_shape(weight):
        return weight.tp_cut.part_of(given)
    return given


def cut_for(weight: Held, full: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a whole tensor."""
    return weight.cut(full if weight.tp_cut is None else weight.tp_cut.part_of(full))


def held_of(name: str, parameter: torch.Tensor) -> Held | None:
    """None: every rank has all of it."""
    return parameter.etp if isinstance(parameter, LogicalParameter) else whole_part(name, parameter)


def _sharded(module: torch.nn.Module, model: ShardedModel | None = None) -> dict[str, Weight]:
    return {
        name: parameter.etp
        for name, parameter in module._parameters.items()
        if isinstance(parameter, LogicalParameter) and (model is None or parameter.etp.model is model)
    }


def _save(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    watch_helpers()
    for name, weight in _sharded(module).items():
        saved = state.get(prefix + name)
        if saved is not None and saved is not weight.parameter and weight.tp_cut is not None:  # keep_vars=True
            state[prefix + name] = UncutState(weight, weight.local if weight.has_rows else None)


class _Update:
    """One update of all that a load_state_dict() writes, unless one is around it."""

    def __init__(self, model: ShardedModel) -> None:
        self._model, self._has_begun = model, False

    def begin(self, weights: Iterable[Weight]) -> None:
        self._has_begun = False  # one that has failed may have left it so
        if not self._model.updating:
            self._has_begun = True
            self._model.begin_update(weights, "load_state_dict()")

    def end(self) -> None:
        if self._has_begun:
            self._has_begun = False
            self._model.end_update()


def _require_same_entries(
    module: torch.nn.Module, model: ShardedModel, state: Mapping[str, Any], prefix: str, strict: bool
) -> None:
    """Throw if ranks do not load the same: sharded weights, each of which is a call of all of them, and, if `strict`,
    any names, as torch would refuse some on one rank only. Collective."""
    if model.size == 1:
        return
    own = {
        name: _shape_in(state, prefix + name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if strict or (isinstance(parameter, LogicalParameter) and parameter.etp.model is model)
    }
    if strict:
        names = sorted(str(name) for name in state if str(name).startswith(prefix))
        own.update((name.removeprefix(prefix), _shape_in(state, name)) for name in names)
    subject = "what load_state_dict() is given"
    told = json.dumps(own).encode()
    digests = model.core.exchange(subject, hashlib.blake2b(told, digest_size=16).digest())
    if all(digest == digests[0] for digest in digests):
        return
    answers = json_of(
        model.core.exchange(subject, told),
        subject,
        lambda told: all(each is None or all(type(size) is int for size in each) for each in told.values()),
    )
    for rank, other in enumerate(answers):
        for name in {**answers[0], **other}:
            entries = answers[0].get(name), other.get(name)
            if entries[0] != entries[1]:
                words = ["no tensor " + name if each is None else f"{name} of shape {tuple(each)}" for each in entries]
                raise known(
                    MismatchError(
                        f"load_state_dict(): the state of rank 0 has {words[0]}, and that of rank {rank} has "
                        f"{words[1]}: give all ranks the same; nothing was written"
                    )
                )


def _shape_in(state: Mapping[str, Any], name: str) -> list[int] | None:
    """Return the shape of an entry; None: there is no tensor."""
    shape = getattr(state.get(name), "shape", None)
    return None if shape is None else list(shape)


_followed: list[Callable[..., Any]] = []


def _follow_loads() -> None:
    """Have a load_state_dict() of a model that fails on one rank end those of the others. Once a process."""
    if _followed:
        return
    load = torch.nn.Module.load_state_dict
    _followed.append(load)

    @functools.wraps(load)
    def load_state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        models = {each.etp.model for each in module.parameters() if isinstance(each, LogicalParameter)}
        if not models:
            return load(module, *args, **kwargs)
        with telling("load_state_dict()", families_in([module])), contextlib.ExitStack() as loading:
            for model in sorted(models, key=lambda model: model.number):
                loading.enter_context(model.recovery.behind())
            return load(module, *args, **kwargs)

    torch.nn.Module.load_state_dict = load_state_dict  # type: ignore[assignment, method-assign]


def watch_loading(root: torch.nn.Module, model: ShardedModel) -> list[RemovableHandle]:
    """Make one update of a load_state_dict() of a whole model."""
    update = _Update(model)

    def load(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, _: Any, strict: bool, *__: Any) -> None:
        _require_same_entries(module, model, state, prefix, strict)
        update.begin(model.weights)

    return [
        root.register_load_state_dict_pre_hook(load),  # type: ignore[no-untyped-call]
        root.register_load_state_dict_post_hook(lambda *_: update.end()),  # type: ignore[no-untyped-call]
    ]


def watch_states(module: torch.nn.Module, model: ShardedModel) -> list[RemovableHandle]:
    """Watch one module, and its parameters of that model. Loading it is an update. Twice is as good as once."""
    _follow_loads()
    update = _Update(model)
    loading: list[Weight] = []

    def load(module: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        weights = _sharded(module, model)
        if not weights:
            return
        given = {name: state[prefix + name] for name in weights if prefix + name in state}
        for name in given:
            if metadata.get("assign_to_params_buffers", False):
                raise InvalidArgumentError(
                    f"{weights[name].name} is sharded, and load_state_dict(assign=True) would replace its memory: load "
                    "without assign=, or before shard_module_()"
                )
        update.begin(weights.values())
        for name, tensor in given.items():
            state[prefix + name] = rows_of(tensor, weights[name])
            loading.append(weights[name])

    def loaded(*_: Any) -> None:
        model.damage.mend(loading)
        loading.clear()
        update.end()

    return [
        module.register_state_dict_post_hook(_save),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(load),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(loaded),  # type: ignore[no-untyped-call]
    ]


def _parts(module: torch.nn.Module) -> dict[str, WholePart]:
    found = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, LogicalParameter):
            part = whole_part(name, parameter)
            if part is not None:
                found[name] = part
    return found


def _save_parts(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, part in _parts(module).items():
        saved = state.get(prefix + name)
        if saved is not None and saved is not module._parameters[name]:  # keep_vars=True
            state[prefix + name] = UncutState(part, saved)


def _load_parts(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, part in _parts(module).items():
        if prefix + name in state:
            state[prefix + name] = rows_of(state[prefix + name], part)


def watch_parts(module: torch.nn.Module) -> None:
    """Of parameters that only a tp_group has cut."""
    module.register_state_dict_post_hook(_save_parts)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_load_parts)  # type: ignore[no-untyped-call]


def _tied(module: torch.nn.Module, name: str, parameter: Any) -> None:
    if isinstance(parameter, LogicalParameter):
        parameter.etp.model.watch.add_tied(module)
    elif hasattr(parameter, "etp_cut") and _save_parts not in module._state_dict_hooks.values():
        watch_parts(module)


def _watch_loads() -> None:
    """Tell the other ranks of a load_state_dict() that fails: torch raises when it has called all hooks."""
    load = torch.nn.Module.load_state_dict

    @functools.wraps(load)
    def load_state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        sharded = [each for each in module.parameters() if isinstance(each, LogicalParameter)]
        with telling("load_state_dict()", families_in(sharded) if sharded else []):
            return load(module, *args, **kwargs)

    torch.nn.Module.load_state_dict = load_state_dict  # type: ignore[assignment, method-assign]


_hooked: list[RemovableHandle] = []


def watch_ties() -> None:
    """Of modules of any kind that get a sharded parameter by an assignment. Once a process."""
    if not _hooked:
        _watch_loads()
        _hooked.append(register_module_parameter_registration_hook(_tied))
