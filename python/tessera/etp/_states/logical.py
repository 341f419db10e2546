"""state_dict() and load_state_dict() of sharded modules: what is saved tells the logical shape, and cannot be taken for
the whole weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from ..._errors import InvalidArgumentError
from .._autograd.routes import words
from .._weights.matrix import Model
from .._weights.parameter import ShardedParameter
from .._weights.registered import RowsSource
from .._weights.rows import gather_rows
from .._weights.weight import Weight
from .chunks import chunk_list, shard_at, write_items

_FACTS = words(
    "size dim ndimension numel nelement stride is_floating_point is_complex is_contiguous element_size get_device "
    "is_pinned is_shared is_inference __len__ __hash__ requires_grad_"
)
_COPIES = frozenset(("clone", "detach", "__deepcopy__"))
_EMPTY = frozenset(("new_empty", "empty_like", "zeros_like"))


class LogicalTensor(torch.Tensor):
    """A sharded weight in a state_dict(): the logical shape, and this rank's rows. Arithmetic is refused.

    load_state_dict() of a sharded model takes it. clone() and copy.deepcopy() copy this rank's rows.
    torch.distributed.checkpoint saves and loads it: what it loads is this tensor's own, until load_state_dict(), and
    what async_save() stages is a copy of this rank's rows.

    Attributes:
        local: This rank's rows, [rows, K], or [E, rows, K] of a stack: the model's own memory, or a copy's.
        etp: Name, shape and rows of the weight, as `p.etp`.
    """

    local: torch.Tensor
    etp: Weight

    def __new__(cls, weight: Weight, rows: torch.Tensor) -> LogicalTensor:
        made: LogicalTensor = torch.Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=rows.dtype, device=rows.device
        )
        made.local, made.etp = rows, weight
        return made

    def full(self) -> torch.Tensor:
        """All rows, as a tensor of its own. Collective."""
        return gather_rows(self.etp.group.core, self.etp, self.local).view(self.etp.shape)

    def __tessera_source__(self, name: str) -> RowsSource[LogicalTensor]:
        """How a batch of the tensor bus registers it."""
        return RowsSource(name, self, lambda tensor: tensor.local)

    def rows_for(self, weight: Weight) -> torch.Tensor:
        """Those that this rank has of another weight of that shape."""
        same = all(getattr(weight, each) == getattr(self.etp, each) for each in ("rows", "shard_rows", "shape", "lead"))
        return self.local if same else weight.cut(self.full())

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        first = args[0] if args else None
        if name in _COPIES and type(first) is cls:
            return cls(first.etp, first.local if name == "detach" else first.local.clone())
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

    def _empty(self, sizes: tuple[Any, ...], options: dict[str, Any]) -> LogicalTensor:
        """Zeros in host memory, for a copy of these rows."""
        others = {name: value for name, value in options.items() if value is not None and name != "requires_grad"}
        place = others.pop("device", "cpu")
        wanted = torch.Size(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
        if others or torch.device(place).type != "cpu" or wanted not in (self.shape, ()):
            _refuse((self,), "new_empty")
        return LogicalTensor(self.etp, torch.zeros_like(self.local))

    def _takes(self, other: Any) -> bool:
        """Whether copy_() of it is possible. The model's memory is written by load_state_dict() only."""
        return (
            type(other) is LogicalTensor
            and self.local.shape == other.local.shape
            and self.etp is other.etp
            and (self.local.numel() == 0 or self.local.data_ptr() != self.etp.address)
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        _refuse(args, func.__name__)

    # torch.distributed.checkpoint's protocol

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self.etp, self.local)

    def __create_chunk_list__(self) -> list[Any]:
        """It is going to be loaded. Other ranks may read the model's memory, so that is left to load_state_dict()."""
        if self.local.data_ptr() == self.etp.address:
            self.local = self.local.clone()
        return chunk_list(self.etp)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return shard_at(self.etp, self.local, index.offset)

    def __deepcopy__(self, memo: dict[int, Any]) -> LogicalTensor:
        copied = LogicalTensor(self.etp, self.local.clone())
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"{self.etp.name} is sharded and its state cannot be pickled: save the state_dict() within "
            "etp.summon(model), or what .full() gives for each of these tensors"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        begin, end = self.etp.rows
        return f"LogicalTensor({self.etp.name!r}, {tuple(self.etp.shape)}, here rows {begin} to {end})"


def _refuse(args: tuple[Any, ...], name: str) -> NoReturn:
    found = next((each for each in args if type(each) is LogicalTensor), None)
    what = "a sharded weight" if found is None else found.etp.name
    raise InvalidArgumentError(
        f"{name}() of {what} in a state_dict(), of which this rank has some rows: use .full(), which is collective, or "
        ".local"
    )


def rows_of(given: Any, weight: Weight) -> Any:
    if type(given) is LogicalTensor:
        return given.rows_for(weight) if given.shape == weight.shape else given.full()  # torch tells of the shapes
    if hasattr(given, "full_tensor"):  # a DTensor
        given = given.full_tensor()
    return weight.cut(given) if getattr(given, "shape", None) == weight.shape else given


def _sharded(module: torch.nn.Module, model: Model | None = None) -> dict[str, Weight]:
    return {
        name: parameter.etp
        for name, parameter in module._parameters.items()
        if isinstance(parameter, ShardedParameter) and (model is None or parameter.etp.model is model)
    }


def _save(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, weight in _sharded(module).items():
        saved = state.get(prefix + name)
        if saved is not None and not isinstance(saved, ShardedParameter):  # keep_vars=True
            state[prefix + name] = LogicalTensor(weight, weight.local)


def watch_states(module: torch.nn.Module, model: Model) -> list[RemovableHandle]:
    """Of one module, and its parameters of that model. Loading it is an update. Twice is as good as once."""
    began: list[bool] = []

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
        if not model.updating:
            began.append(True)
            model.begin_update(weights.values())
        for name, tensor in given.items():
            state[prefix + name] = rows_of(tensor, weights[name])

    def loaded(*_: Any) -> None:
        if began:
            began.clear()
            model.end_update()

    return [
        module.register_state_dict_post_hook(_save),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(load),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(loaded),  # type: ignore[no-untyped-call]
    ]


def _tied(module: torch.nn.Module, name: str, parameter: Any) -> None:
    if isinstance(parameter, ShardedParameter):
        parameter.etp.model.watch_tied(module)


_hooked: list[RemovableHandle] = []


def watch_ties() -> None:
    """Of modules of any kind that get a sharded parameter by an assignment. Once a process."""
    if not _hooked:
        _hooked.append(register_module_parameter_registration_hook(_tied))
