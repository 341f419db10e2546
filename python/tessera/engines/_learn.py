"""Learned maps: where each element of a checkpoint lands in the parameters of this rank."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch

from .._bus.mapping import Part
from .._errors import Error, InvalidArgumentError, UnimplementedError
from ._boxes import Box, Content, aligned, dense_strides, volume
from ._trace import Memory, Trace

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Meta = Callable[[torch.nn.Module], AbstractContextManager[None]]
_MOST_NAMED = 5


class Form(NamedTuple):
    """How a parameter lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True)
class Slice:
    """What a rank takes of a tensor of the checkpoint.

    Attributes:
        tensor: Its name.
        ranges: Along each of its dims.
        dtype: The tensor's.
        is_whole: All of it.
    """

    tensor: str
    ranges: tuple[range, ...]
    dtype: torch.dtype
    is_whole: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))

    @property
    def index(self) -> tuple[slice, ...]:
        """For indexing the tensor."""
        return tuple(slice(each.start, each.stop, each.step if each.step > 1 else None) for each in self.ranges)


@dataclass(frozen=True)
class Piece:
    """Where the elements of a slice of the checkpoint lie in a parameter.

    Attributes:
        parameter: Its name in the model.
        source: The slice. Several pieces may have the same one.
        cast: Its dtype differs from the parameter's.
    """

    parameter: str
    source: Slice
    cast: bool
    _box: Box = field(repr=False)  # of which the source is the whole tensor
    _dims: tuple[int | None, ...] = field(repr=False)  # of the tensor, for each dim of the box

    @property
    def elements(self) -> int:
        """Of the parameter that it gives."""
        return self._box.elements

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        """Where the elements belong in `parameter`; taken() has the same shape."""
        offset = int(parameter.storage_offset()) + self._box.to
        return torch.as_strided(parameter, self._box.size, self._box.to_strides, offset)

    def taken(self, staged: torch.Tensor) -> torch.Tensor:
        """What goes there, of the slice `staged`."""
        strides = [0 if dim is None else staged.stride(dim) for dim in self._dims]
        return torch.as_strided(staged, self._box.size, strides, int(staged.storage_offset()))

    def install(self, parameter: torch.Tensor, staged: torch.Tensor) -> None:
        """Copies the slice to where it belongs."""
        self.place(parameter).copy_(self.taken(staged))

    def view(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The place in `parameter` as a tensor of the slice's shape. None if an element lies in several places of it,
        or must be cast."""
        if self.cast or None in self._dims:
            return None
        of_dim = dict(zip(self._dims, self._box.to_strides, strict=True))
        strides = [of_dim.get(dim, 0) for dim in range(len(self.source.ranges))]
        return torch.as_strided(parameter, self.source.shape, strides, parameter.storage_offset() + self._box.to)


@dataclass(frozen=True)
class LearnedMap:
    """Where each element of a checkpoint lands in one rank's parameters; what learn_map() returns.

    Attributes:
        slices: What this rank takes of the checkpoint.
        pieces: Where they go, in the order of the model's parameters.
        computed: Parameters that the loader computes instead of copying, and how. They go by the loader.
        by_loader: Tensors of the checkpoint that the loader needs for these.
        forms: Shape, strides and dtype of each parameter as it is loaded; its running form may be another one.
        untouched: Parameters with elements that no tensor gives, and how many: padding, or what the engine fills.
        unused: Tensors of the checkpoint from which this rank takes nothing.
        results: What the loader computes, as slices of their own, once with_loader() has been called.
    """

    slices: tuple[Slice, ...]
    pieces: tuple[Piece, ...]
    computed: Mapping[str, str]
    by_loader: tuple[str, ...]
    forms: Mapping[str, Form] = field(repr=False)
    untouched: Mapping[str, int]
    unused: tuple[str, ...]
    results: tuple[Slice, ...] = ()
    _keys: Mapping[Slice, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        keys = {each: f"{each.tensor}#{i}" for i, each in enumerate((*self.slices, *self.results))}
        object.__setattr__(self, "_keys", keys)

    @property
    def elements(self) -> int:
        """Of the checkpoint that this rank takes by its slices."""
        return sum(math.prod(each.shape) for each in self.slices)

    @property
    def nbytes(self) -> int:
        """The same in bytes, in the dtypes of the checkpoint."""
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in self.slices)

    def key(self, source: Slice) -> str:
        """Its local name, in staging() and map()."""
        return self._keys[source]

    def map(self, name: str, tensor: Any = None) -> Part:
        """For register(): the part of the checkpoint that a tensor of staging() holds."""
        number = name.rpartition("#")[2]
        if not number.isdigit() or int(number) >= len(self.slices) or self._keys[self.slices[int(number)]] != name:
            raise InvalidArgumentError(f"{name!r} is not a slice of this map: register what staging() gives")
        source = self.slices[int(number)]
        return Part(source.tensor) if source.is_whole else Part(source.tensor, source=source.index)

    def cast_on_the_way(self) -> LearnedMap:
        """The same map, for a batch that casts: a slice that goes to parameters of one other dtype has that dtype."""
        wanted: dict[Slice, set[torch.dtype]] = {}
        for piece in self.pieces:
            wanted.setdefault(piece.source, set()).add(self.forms[piece.parameter].dtype)
        cast = {each: _cast(each, wanted[each]) for each in self.slices}
        pieces = tuple(
            replace(piece, source=cast[piece.source], cast=piece.cast and cast[piece.source] == piece.source)
            for piece in self.pieces
        )
        return replace(self, slices=tuple(cast.values()), pieces=pieces)

    def staging(
        self, allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Memory for each slice, by key. `allocate(shape, dtype)`: torch.empty() unless given."""
        make = allocate or (lambda shape, dtype: torch.empty(shape, dtype=dtype))
        return {self.key(each): make(each.shape, each.dtype) for each in self.slices}

    def with_loader(self, checkpoint: Mapping[str, Any]) -> LearnedMap:
        """The same, for an engine that runs its loader for what is computed: its slices have the tensors which that one
        needs, whole; and each computed parameter is a piece, whose source is one of the `results`. Give install()
        memory for both: that of staging(), and by key(result) a tensor for each result. `checkpoint`: as for
        learn_map()."""
        needed = [_whole(name, *_described(name, checkpoint[name])) for name in self.by_loader]
        results = [_whole(name, self.forms[name].shape, self.forms[name].dtype) for name in self.computed]
        pieces = [_result_piece(each, self.forms[each.tensor]) for each in results]
        return dataclasses.replace(
            self,
            slices=tuple(dict.fromkeys((*self.slices, *needed))),
            pieces=(*self.pieces, *pieces),
            results=tuple(results),
        )

    def install(self, parameters: Mapping[str, torch.Tensor], staged: Mapping[str, torch.Tensor]) -> None:
        """Copies all pieces to where they belong."""
        with torch.no_grad():
            for piece in self.pieces:
                piece.install(parameters[piece.parameter], staged[self.key(piece.source)])

    def install_from(self, parameters: Mapping[str, torch.Tensor], checkpoint: Mapping[str, torch.Tensor]) -> None:
        """The same, from whole tensors of the checkpoint."""
        with torch.no_grad():
            for piece in self.pieces:
                whole = checkpoint[piece.source.tensor]
                piece.install(parameters[piece.parameter], whole[piece.source.index])


_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # by the bus, into one another


def _cast(source: Slice, wanted: set[torch.dtype]) -> Slice:
    castable = len(wanted) == 1 and source.dtype in _CAST and wanted <= set(_CAST) and source.dtype not in wanted
    return replace(source, dtype=next(iter(wanted))) if castable else source


@contextlib.contextmanager
def on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Parameters and buffers of the model without data, of the same shapes, types and attributes; the real ones come
    back whatever happens. For engines whose running form is the loaded one."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    made: dict[int, torch.Tensor] = {}  # tied ones stay tied

    def stand(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            if isinstance(tensor, torch.nn.Parameter):
                strided = torch.nn.Parameter(strided, requires_grad=False)
            strided.__class__ = tensor.__class__
            strided.__dict__.update(tensor.__dict__)
            made[id(tensor)] = strided
        return made[id(tensor)]

    try:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                kept.append((tensors, dict(tensors)))
                for name, tensor in list(tensors.items()):
                    if tensor is not None:
                        tensors[name] = stand(tensor)  # type: ignore[assignment]
        yield
    finally:
        for tensors, before in kept:
            tensors.clear()
            tensors.update(before)


def learn_map(
    model: torch.nn.Module,
    checkpoint: Mapping[str, Any],
    *,
    load: Loader | None = None,
    meta: Meta = on_meta,
) -> LearnedMap:
    """Learns from an engine's own loader where each element of a checkpoint lands in this rank's parameters.

    The loader runs once, on tensors without data, and each of its copies is noted: of whole tensors, of slices, fused,
    stacked, transposed, padded or repeated ones. Nothing of the model is changed, and no byte of it is read.

    Args:
        model: The engine's, of this rank.
        checkpoint: By name, a tensor (of any device; its data is not read) or (shape, dtype).
        load: The loader: called with (name, tensor) pairs. Default: model.load_weights.
        meta: Puts parameters without data, as the loader wants them, into the model, and the real ones back.

    Raises:
        InvalidArgumentError: Two tensors of the checkpoint land in the same elements, such as those that the engine has
            tied because they were equal; names both.
        UnimplementedError: The loader needs values, not shapes only.
    """
    known = {name: _described(name, each) for name, each in checkpoint.items()}
    sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in known.items()}
    run: Loader = load if load is not None else cast(Any, model).load_weights
    with meta(model), torch.no_grad():
        targets = {name: tensor.data for name, tensor in _tensors(model)}
        trace = Trace(sources, targets)
        try:
            with trace:
                run(iter(sources.items()))
        except Error:
            raise
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error).lower():
                raise
            raise UnimplementedError(f"the loader needs values of the checkpoint: {error}") from error
        memories = {name: _found(trace, name, targets.get(name), tensor) for name, tensor in _tensors(model)}
        forms = {name: Form.of(tensor) for name, tensor in _tensors(model)}
    if trace.conflicts:
        named = [f"{name}: {why}" for name, why in list(trace.conflicts.items())[:_MOST_NAMED]]
        raise InvalidArgumentError(
            f"the checkpoint does not fit the engine's parameters: {'; '.join(named)}. If the engine has tied them "
            "because they were equal when it started, start it with a checkpoint in which they differ"
        )
    return _learned(known, memories, forms)


def _described(name: str, given: Any) -> tuple[tuple[int, ...], torch.dtype]:
    shape, dtype = (given.shape, given.dtype) if hasattr(given, "dtype") else given
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"checkpoint {name!r}: dtype {dtype!r}: give a torch.dtype")
    return tuple(int(size) for size in shape), dtype


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _found(trace: Trace, name: str, before: torch.Tensor | None, now: torch.Tensor) -> Memory:
    """The loader may have replaced a parameter's tensor."""
    same = before is not None and before.untyped_storage()._cdata == now.untyped_storage()._cdata
    memory = trace.of(now) if same else trace.read(now.data)
    assert memory is not None
    return memory


def _learned(
    known: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    memories: Mapping[str, Memory],
    forms: Mapping[str, Form],
) -> LearnedMap:
    pieces: list[Piece] = []
    computed: dict[str, str] = {}
    untouched: dict[str, int] = {}
    used: set[str] = set()
    by_loader: set[str] = set()
    for name, memory in memories.items():
        if memory.computed:
            computed[name] = memory.computed
            by_loader |= memory.tensors
            continue
        written = sum(map(volume, memory.contents))
        if written < math.prod(memory.shape):
            untouched[name] = math.prod(memory.shape) - written
        for content in memory.contents:
            used.add(content.name)
            pieces.extend(_pieces(name, memory.shape, content, *known[content.name], forms[name].dtype))
    unused = tuple(name for name in known if name not in used | by_loader)
    whole = tuple(name for name in known if name in by_loader)
    slices = tuple(dict.fromkeys(piece.source for piece in pieces))
    return LearnedMap(slices, tuple(pieces), computed, whole, forms, untouched, unused)


def _pieces(
    parameter: str,
    memory: tuple[int, ...],
    content: Content,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    to_dtype: torch.dtype,
) -> Iterator[Piece]:
    steps = zip(dense_strides(memory), content.place, strict=True)
    strides = tuple(stride * place.step for stride, place in steps)
    start = sum(stride * place.start for stride, place in zip(dense_strides(memory), content.place, strict=True))
    box = Box(tuple(map(len, content.place)), start, strides, content.source, content.strides)
    for part, slices, dims in aligned(box, shape):
        source = Slice(content.name, slices, dtype, slices == tuple(map(range, shape)))
        yield Piece(parameter, source, content.cast or dtype != to_dtype, part, dims)


def _whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slice:
    return Slice(name, tuple(map(range, shape)), dtype, True)


def _result_piece(result: Slice, form: Form) -> Piece:
    box = Box(form.shape, 0, form.strides, 0, dense_strides(form.shape))
    return Piece(result.tensor, result, False, box, tuple(range(len(form.shape))))
