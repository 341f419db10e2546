"""A sharded weight in any operation of torch: it is gathered for the call, and its gradient is produced when the
backward comes by. Between them nothing keeps the gathered weight alive: what autograd saves of it is a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._C import DisableTorchFunctionSubclass

from ..._errors import InvalidArgumentError, UnimplementedError
from .._compile import left_out, opaque
from .inline import GatherInline
from .routes import VIEWS, writes
from .saved_tensors import innermost_hooks

_recomputation = "_recomputation_hook"
_NO_TASK = -1


class Model(Protocol):
    inline: bool

    def phase(self) -> str: ...
    def enter_backward(self) -> None: ...


class Weight(Protocol):
    """What a use needs of a weight."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def model(self) -> Model: ...
    def gather(
        self, phase: str, expects_backward: bool = False, version: int | None = None
    ) -> tuple[torch.Tensor, int]: ...
    def whole(self, expects_backward: bool) -> tuple[torch.Tensor, int]: ...
    def own(self, full: torch.Tensor) -> torch.Tensor: ...
    def stand(self) -> torch.Tensor: ...
    def anchor(self) -> torch.Tensor: ...
    def wanted(self) -> bool: ...
    def give(self, gradient: torch.Tensor) -> None: ...


class Parameter(Protocol):
    """What a call gathers."""

    requires_grad: bool

    @property
    def etp(self) -> Weight: ...


def expects_backward(phase: str) -> bool:
    """Whether a use whose graph is recorded now will be followed by its backward. A forward that torch's checkpoint
    repeats only for its saved tensors will not: the first one's backward comes."""
    if phase != "recompute":
        return True
    hooks = innermost_hooks()
    return hooks is None or _recomputation not in getattr(hooks[0], "__qualname__", "")


def refuse_twice(weight: Weight) -> None:
    if torch.is_grad_enabled():
        raise UnimplementedError(
            f"{weight.name}: a backward with create_graph=True goes through a sharded weight, whose gradient cannot be "
            "differentiated again: shard with mode='inline', or leave this weight out with filter="
        )


def refuse_transforms(name: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise UnimplementedError(
            f"{name} is sharded, and transforms of torch.func cannot pass through it: use torch.autograd, or transform "
            "the model after etp.unshard_()"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A gathered weight, and where its memory is."""

    weight: Weight
    version: int
    address: int


class Gather(torch.autograd.Function):
    """The whole weight. Its gradient goes to the ranks that own its rows."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weight: Weight, found: list[int]) -> torch.Tensor:
        ctx.weight = weight
        full, version = weight.whole(True)
        found.append(version)
        return full

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        weight: Weight = ctx.weight
        refuse_twice(weight)
        weight.model.enter_backward()
        if weight.wanted():
            weight.give(gradient.to_dense() if gradient.is_sparse else gradient)
        return None, None, None


def gathered(weight: Weight, trains: bool) -> tuple[torch.Tensor, Source]:
    """The whole weight, differentiable if it `trains`."""
    refuse_transforms(weight.name)
    if trains and torch.is_grad_enabled():
        versions: list[int] = []
        node, of = (GatherInline, weight.stand()) if weight.model.inline else (Gather, weight.anchor())
        full: torch.Tensor = node.apply(of, weight, versions)  # type: ignore[no-untyped-call]
        version = versions[0]
    else:
        full, version = weight.whole(False)
    return full, Source(weight, version, full.untyped_storage().data_ptr())


@opaque((*VIEWS, "data"))
class Gathered(torch.Tensor):
    """A view of a gathered weight (`self.weight.t()`), to be read. Operations on it are those on its weight."""

    plain: torch.Tensor
    source: Source

    @classmethod
    @left_out
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if type(first) is Gathered and writes(func):
            raise InvalidArgumentError(
                f"{first.source.weight.name} is sharded, and {func.__name__}() would write into what has been gathered "
                "of it: clone() it first"
            )
        return Call().run(func, args, kwargs or {})


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """What autograd keeps of a tensor that lies in a gathered weight."""

    source: Source
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def tensor(self) -> torch.Tensor:
        weight = self.source.weight
        phase = "fwd"
        if torch._C._current_graph_task_id() != _NO_TASK:
            weight.model.enter_backward()
            phase = "bwd"
        with torch.no_grad():
            full, _ = weight.gather(phase, version=self.source.version)
            return weight.own(full).to(weight.dtype).as_strided(self.size, self.stride, self.offset)


class Call:
    """One call of an operation, with weights gathered for it."""

    parameter_class: type = type(None)

    def __init__(self) -> None:
        self._sources: dict[int, Source] = {}  # by address
        self._found: dict[int, torch.Tensor] = {}  # by parameter

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple([self._swap(each) for each in args])
        kwargs = {name: self._swap(each) for name, each in kwargs.items()}
        if not torch.is_grad_enabled():
            return self._wrap(func(*args, **kwargs))
        # The innermost hooks are the only ones that autograd calls: they pass on what is not theirs.
        outer = innermost_hooks()
        pack, unpack = (_keep, _kept) if outer is None else outer
        sources = self._sources

        def shrink(tensor: torch.Tensor) -> Any:
            source = sources.get(tensor.untyped_storage().data_ptr())
            if source is None or tensor.dtype is not source.weight.dtype:
                return pack(tensor)
            return Token(source, tensor.size(), tensor.stride(), tensor.storage_offset())

        def restore(kept: Any) -> torch.Tensor:
            return kept.tensor() if type(kept) is Token else unpack(kept)

        with torch.autograd.graph.saved_tensors_hooks(shrink, restore):
            result = func(*args, **kwargs)
        return self._wrap(result)

    def use(self, weight: Weight, trains: bool) -> Any:
        """The gathered weight itself, to be read."""
        found, source = gathered(weight, trains)
        self._know(source)
        return self._wrap(found)

    def _know(self, source: Source) -> None:
        """Where shards themselves are used, the first expert of a stack begins where the whole does, which has more."""
        known = self._sources.get(source.address)
        if known is None or known.weight.shape.numel() < source.weight.shape.numel():
            self._sources[source.address] = source

    def _swap(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, self.parameter_class):
            found = self._found.get(id(value))
            if found is None:
                found, source = gathered(value.etp, value.requires_grad)
                self._found[id(value)] = found
                self._know(source)
            return found
        if kind is Gathered:
            self._know(value.source)
            return value.plain
        if kind in (list, tuple):
            return kind([self._swap(each) for each in value])
        if kind is dict:
            return {name: self._swap(each) for name, each in value.items()}
        return value

    def _wrap(self, result: Any) -> Any:
        kind = type(result)
        if kind is torch.Tensor:
            if result.layout is not torch.strided:
                return result
            source = self._sources.get(result.untyped_storage().data_ptr())
            if source is None:
                return result
            with DisableTorchFunctionSubclass():
                view = result.as_subclass(Gathered)
            view.plain, view.source = result, source
            return view
        if kind in (list, tuple):
            return kind([self._wrap(each) for each in result])
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    tensor: torch.Tensor
    version: int


def _keep(tensor: torch.Tensor) -> _Kept:
    return _Kept(tensor, tensor._version)


def _kept(kept: _Kept) -> torch.Tensor:
    """Autograd checks versions of what it saves itself only."""
    if kept.tensor._version != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tuple(kept.tensor.shape)} is at version {kept.tensor._version}, expected version {kept.version}"
        )
    return kept.tensor
