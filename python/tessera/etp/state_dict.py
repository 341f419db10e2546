"""Values of a state_dict() of what a tp_group has cut: they tell the logical shape, and cannot be taken for the whole
weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C import DisableTorchFunctionSubclass

from .._errors import InvalidArgumentError
from .chunks import chunk_list, shard_at, whole_shape, write_items
from .parameter import LogicalParameter
from .parts import WholePart, whole_part
from .registered import RowsSource
from .tensor import LogicalTensor, is_sharded
from .weight import Weight

if TYPE_CHECKING:
    pass

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
