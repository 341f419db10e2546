"""The type of everything that is sharded: `LogicalTensor`, which is the whole tensor for every operation.

A logical tensor is a store, which has this rank's rows, and a chain of views that leads from it. It holds no gathered
copy: it reads when it is used, so that no view is stale, and every write through it reaches the store. Operations
come to `dispatch.py`, below autograd, which sees the whole's shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch._C import _disabled_torch_function_impl

from .._errors import InvalidArgumentError
from .address import Address
from .chunks import chunk_list, shard_at, write_items
from .compile import opaque
from .store import Spec, Store, agree, digest_of, refuse_difference
from .telling import telling

_torchs_data: Any = torch.Tensor.data
Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Step(NamedTuple):
    """One view of a chain: the operation, its arguments behind the tensor, and which of its results is meant."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int | None  # None: there is one result

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of a plain tensor."""
        made = self.func(tensor, *self.args, **self.kwargs)
        return made if self.number is None else made[self.number]  # type: ignore[no-any-return]


Chain = tuple[Step, ...]
_CPU = torch.device("cpu")


def follow(tensor: torch.Tensor, chain: Chain) -> torch.Tensor:
    """Return what a chain of views makes of a plain tensor."""
    for step in chain:
        tensor = step.apply(tensor)
    return tensor


class Outline:
    """A meta tensor, which programs that copy a tensor's attributes leave alone."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Outline:
        return self


@opaque()
class LogicalTensor(torch.Tensor):
    """A tensor whose rows lie on the ranks of a group, and which has the shape, values and algebra of the whole
    tensor for every operation: a parameter, its gradient, a state of an optimiser, a value of a state_dict().

    `etp.local(t)` gives this rank's rows, `etp.whole(t)` the whole as a plain tensor. docs/guide/etp.md has the rules.
    """

    store: Store
    chain: Chain
    rows: torch.Tensor | None  # this rank's, where the chain keeps them
    spec: Spec | None  # of these
    _outline: Outline | None
    _saved: torch.Tensor | None = None  # the store's memory with all of a value of a state_dict()

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]
    # Modules that import this one set them: dispatch.py, and registered.py, how a batch of the tensor bus
    # registers it.
    dispatch: Rule
    __tessera_source__: Any

    @staticmethod
    def __new__(
        cls: type[LogicalTensor],
        store: Store,
        chain: Chain = (),
        rows: torch.Tensor | None = None,
        spec: Spec | None = None,
        outline: torch.Tensor | None = None,
        requires_grad: bool = False,
    ) -> LogicalTensor:
        """Make one; `outline`, a meta tensor, has the sizes and strides of a view."""
        if not isinstance(store, Store):
            raise InvalidArgumentError(
                f"LogicalTensor({type(store).__name__}): sharded tensors are made by etp.shard_module_(), by "
                "operations on them, and by etp.from_local(rows, like=p)"
            )
        size, stride, offset, dtype = store.spec.shape, store.stride, None, store.dtype
        if outline is not None:
            size, stride, offset, dtype = outline.shape, outline.stride(), outline.storage_offset(), outline.dtype
        made: LogicalTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=_CPU, requires_grad=requires_grad
        )
        if outline is not None and outline.is_conj():
            torch._C._set_conj(made, True)
        if outline is not None and outline.is_neg():
            torch._C._set_neg(made, True)
        made.store, made.chain, made.rows, made.spec = store, chain, rows, spec
        made._outline = None if outline is None else Outline(outline)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def of(cls, store: Store) -> LogicalTensor:
        """Return the tensor that a store is."""
        return cls(store, (), store.rows, None if store.rows is None else store.spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return LogicalTensor.dispatch(func, args, kwargs or {})

    @property
    def etp(self) -> Any:
        """The weight that its rows are a part of, or go along with: name, shape, rows, group, layout, ..."""
        return self.store.held

    @property
    def is_sharded(self) -> bool:
        """Whether it is not the rank's own."""
        return self.store.own is None

    def outline(self) -> torch.Tensor:
        """Return a meta tensor of the same sizes, strides and offset."""
        if self._outline is None:
            self._outline = Outline(follow(self.store.outline(), self.chain))
        return self._outline.tensor

    @property
    def known_outline(self) -> torch.Tensor | None:
        """The outline, if it has been made."""
        return None if self._outline is None else self._outline.tensor

    def expert(self) -> Any:
        """Return the expert of a stack that the chain selects; None: it has more than one."""
        experts = getattr(self.store.weight, "experts", None)
        if experts is None or not self.chain or self.store.own is not None or self.store.stride is not None:
            return None
        step = self.chain[0]
        if step.func is torch.ops.aten.select.int and step.args[0] in (0, -3):
            return experts[step.args[1]]
        if step.func is torch.ops.aten.unbind.int and (step.args[0] if step.args else 0) in (0, -3):
            return experts[step.number]
        return None

    def whole(self, product: bool = False) -> torch.Tensor:
        """Return the whole as a plain tensor, to be read."""
        expert = self.expert()
        if expert is not None:
            return follow(expert.pull(product), self.chain[1:])
        return follow(self.store.whole(product), self.chain)

    def become(self, other: LogicalTensor) -> None:
        """Take over what another one is."""
        self.store, self.chain, self.rows, self.spec = other.store, other.chain, other.rows, other.spec
        self._outline = other._outline

    # --- what does not come to the dispatcher

    @property
    def data(self) -> Any:
        """Return the same memory, whose writes autograd does not see: detach() would count them."""
        with torch.no_grad():
            return LogicalTensor.dispatch(torch.ops.aten.detach.default, (self,), {})

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        self._set_data(new)

    def _set_data(self, new: torch.Tensor) -> None:
        """Become `new`, which has the same shape and dtype."""
        if new is self:
            return
        with telling(f".data of {self.store}", [self.store.model.member.family]):
            self._replace_data(new)

    def require_like(self, new: torch.Tensor) -> None:
        """Throw unless a tensor that is to take its place has its shape, dtype and device."""
        if new.shape != self.shape or new.dtype != self.dtype or new.device.type != "cpu":
            raise InvalidArgumentError(
                f"{self.store.name} is sharded and cannot become {new.dtype} of {tuple(new.shape)} on {new.device}: it "
                f"is {self.dtype} of {tuple(self.shape)} in memory that ranks share: convert, move or resize the model "
                "before shard_module_(), or after unshard_()"
            )

    def _replace_data(self, new: torch.Tensor) -> None:
        self.require_like(new)
        what = f".data of {self.store}"
        with torch.no_grad():
            if self._is_parameter():
                self._write_data(new)
                return
            if self.chain:
                self._leave(new)
                return
            if is_sharded(new) and new.spec is not None and not new.chain and new.spec.is_like(self.spec):
                if self.store.weight is None:
                    new.store.kept = self.store.kept
                    new.store.name = new.store.name or self.store.name
                self.become(new)
                return
            whole = new.whole() if isinstance(new, LogicalTensor) else new.detach()
            if not agree(self.store, what, digest_of([whole])):
                raise refuse_difference(what)
            rows = self.store.spec.cut(whole).clone(memory_format=torch.contiguous_format)
            store, kept = self.store, self.store.kept and self.store.weight is None
            self.become(
                LogicalTensor.of(
                    Store(store.model, store.spec, rows, store.dtype, name=store.name, kept=kept, held=store.held)
                )
            )

    def _is_parameter(self) -> bool:
        """Tell whether this is a weight itself, whose rows stay where they are."""
        return self.store.weight is not None and not self.chain and isinstance(self, torch.nn.Parameter)

    def _write_data(self, new: torch.Tensor) -> None:
        """Have a weight get other values, and what has had its memory keep the values of before: in plain torch that
        keeps the memory which the parameter leaves."""
        store = self.store
        aliases = [
            each for each in store.take_aliases() if each is not self and each is not new and each.store is store
        ]
        left = copy_of(self).store if aliases else store
        try:
            self.copy_(new)
        except BaseException:
            left = store
            raise
        finally:
            for alias in aliases:
                if left is store:
                    store.note_alias(alias)
                else:
                    alias.move_to(left)

    def move_to(self, store: Store) -> None:
        """Be the same view of a copy of the store."""
        before, rows = self.store.rows, self.rows
        self.store = store
        if not self.chain:
            self.become(LogicalTensor.of(store))
        elif before is not None and rows is not None and store.rows is not None:
            at = store.rows.storage_offset() + rows.storage_offset() - before.storage_offset()
            self.rows = store.rows.as_strided(rows.shape, rows.stride(), at)

    def _leave(self, new: torch.Tensor) -> None:
        """Have a view get other memory than what it is a view of: what it becomes is the rank's own."""
        if isinstance(new, LogicalTensor):
            self.become(new.detach())  # type: ignore[arg-type]
            return
        model = self.store.model
        spec = Spec(self.store.spec.group, torch.Size(new.shape), None, 1, 1)
        store = Store(model, spec, None, new.dtype, new.stride(), name=self.store.name, held=self.store.held)
        store.become_own(new.detach())
        self.become(LogicalTensor.of(store))

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch's; "cpu:0" and its like are where it is."""
        options = dict(kwargs)
        copies = options.pop("copy", False)
        try:
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **options)
        except (RuntimeError, TypeError):  # such as copy= by its place: torch knows what it takes
            return super().to(*args, **kwargs)
        if device is not None and device.type != "cpu":
            self._require_movable(device)
        elif dtype in (None, self.dtype) and memory_format is None and not copies:
            return self
        return super().to(*args, **kwargs)

    def _require_movable(self, device: torch.device) -> None:
        """Throw if a copy on that device would take its place in a module."""

    def tolist(self) -> Any:
        return self._read().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole tensor's values, read-only: a write into them would be lost."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        values = self._read().numpy(force=force)
        values.flags.writeable = False
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._read().clone().__dlpack__(*args, **kwargs)

    def _read(self) -> torch.Tensor:
        with torch.no_grad():
            return self.whole().detach()

    def data_ptr(self) -> Any:
        """Return the address of all of a value of a state_dict(); of others one that can be compared, whose number is
        refused."""
        if self._has_memory():
            return self._memory("data_ptr()").data_ptr()
        return Address(self.store, int(self.storage_offset()), self._without_memory("data_ptr()"))

    def untyped_storage(self) -> Any:
        return self._memory("untyped_storage()").untyped_storage()

    def storage(self) -> Any:
        return self._memory("storage()").storage()  # type: ignore[no-untyped-call]

    def _has_memory(self) -> bool:
        return self.store.saved and self.store.own is None

    def _memory(self, what: str) -> torch.Tensor:
        """Return a plain tensor with all of a value of a state_dict(), to be read: programs that save it ask for its
        memory, which is kept with it until the next call behind a write. Values of tied parameters, and views of one
        value, share memory as in plain torch: by that such programs leave duplicates out."""
        if not self._has_memory():
            raise self._without_memory(what)
        with torch.no_grad():
            self._saved = self.store.in_memory()
            return follow(self._saved, self.chain)

    def share_memory_(self) -> Any:
        raise self._without_memory("share_memory_()")

    def _without_memory(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{what} of {self.store}, whose rows lie on several ranks: etp.whole(t) has memory with all of it, "
            "etp.local(t) has this rank's rows"
        )

    # torch.distributed.checkpoint's protocol, and the tensor bus's

    def _state_rows(self) -> torch.Tensor:
        if self.chain or self.etp is None or self.store.own is not None:
            raise InvalidArgumentError(
                f"{self.store} is no parameter, gradient or state, and its rows cannot be saved: save etp.whole(t)"
            )
        return self.etp.values() if self.rows is None else self.rows

    def _rows_in_memory(self) -> torch.Tensor:
        if self.store.weight is not None:
            self.etp.require_rows()
        return self._state_rows()

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self.etp, self._state_rows())

    def __create_chunk_list__(self) -> list[Any]:
        """It is going to be loaded. Other ranks may read the model's memory, so that is left to load_state_dict()."""
        store = self.store
        if store.weight is not None:
            rows = self._state_rows().detach().clone()
            self.become(
                LogicalTensor.of(Store(store.model, store.spec, rows, store.dtype, name=store.name, held=store.held))
            )
        return chunk_list(self.etp)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return shard_at(self.etp, self._state_rows(), index.offset)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        with torch.no_grad():
            copied = self._copied()
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __copy__(self) -> torch.Tensor:
        """Share the memory, as a copy of a plain tensor does."""
        with torch.no_grad():
            copied = self.detach()
        return copied.requires_grad_(self.requires_grad)

    def _copied(self) -> torch.Tensor:
        """Return a copy: of a value of a state_dict() all of it, so that any rank may save it alone; else of rows."""
        if not self.store.saved or self.store.own is not None or not self.store.asks_nobody():
            return copy_of(self)
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype).copy_(self.whole())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is the whole tensor in a file, once for tied parameters."""
        is_weight = self.store.weight is not None and self.store.own is None  # in a state_dict(), which goes soon
        tensor = self._memory("a file") if is_weight else self._read()
        return tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        what = f"LogicalTensor({self.store.name!r}, {tuple(self.shape)}, {self.dtype}"
        if self.store.own is not None:
            return f"{what}, this rank's own)"
        if self.rows is None or self.spec is None:
            return f"{what}, a view)" if self.chain else f"{what}, kept as {self.etp.format} only)"
        with torch.no_grad():
            return f"{what}, rows {self.spec.begin} to {self.spec.end} here)\n{self.rows.detach()!r}"

    def __format__(self, format_spec: str) -> str:
        return self.item().__format__(format_spec) if self.dim() == 0 else repr(self)


def copy_of(tensor: LogicalTensor) -> LogicalTensor:
    """Return a copy of this rank's rows that goes along with the same weight."""
    store, rows = tensor.store, tensor.rows
    if rows is None and store.weight is not None and not tensor.chain:  # kept quantised only: decoded
        copied: LogicalTensor = store.held.rows_as_value(store.held.values().clone())
        return copied
    if rows is None or tensor.chain or store.own is not None:
        raise InvalidArgumentError(f"{store} is a view, whose rows cannot be copied: copy etp.whole(t)")
    return LogicalTensor.of(
        Store(
            store.model,
            store.spec,
            rows.detach().clone(),
            store.dtype,
            store.stride,
            store.stamp,
            store.name,
            held=store.held,
        )
    )


def is_sharded(value: Any) -> TypeGuard[LogicalTensor]:
    """Tell whether a value is sharded, and not the rank's own."""
    return isinstance(value, LogicalTensor) and value.store.own is None


def normal_mode(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Leave inference mode for a view of a tensor that was not made in it."""
    return contextlib.nullcontext() if tensor.is_inference() else lasting()


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Leave inference mode for what is kept and trained when it has ended."""
    if torch.is_inference_mode_enabled():
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            yield
    else:
        yield
