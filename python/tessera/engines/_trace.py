"""Watches a loader of weights that works on tensors without data, and notes what it copies where."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._errors import UnimplementedError
from ._boxes import Box, Content, contents_of, dense_shape, dense_strides, overlap, through, volume

_aten = torch.ops.aten
_CLONES = {_aten.clone, _aten._to_copy, _aten.contiguous}


class Memory:
    """What is known of a storage: a tensor of the checkpoint, a parameter, or something in between."""

    def __init__(self, tensor: torch.Tensor, name: str, is_target: bool = False) -> None:
        shape = dense_shape(tensor.shape, tensor.stride())
        self.name = name
        self.is_target = is_target
        self.shape = shape if shape is not None else (tensor.untyped_storage().nbytes() // tensor.element_size(),)
        self.contents: list[Content] = []
        self.computed = ""  # why it is not a copy of the checkpoint's elements
        self.computed_from: set[str] = set()  # tensors of the checkpoint
        self.keeper = tensor  # so that no other storage gets its address

    @property
    def tensors(self) -> set[str]:
        """Of the checkpoint, that are in it."""
        return self.computed_from | {each.name for each in self.contents}

    def compute(self, why: str, *sources: Memory) -> None:
        self.computed = self.computed or why
        for each in sources:
            self.computed_from |= each.tensors

    def put(self, new: Content) -> str:
        """Takes a content in place of what it covers. Returns what speaks against it, or nothing."""
        for old in [each for each in self.contents if overlap(each, new)]:
            if old.place != new.place:
                return f"tensors {old.name} and {new.name} overlap in part of it"
            if old.name != new.name and self.is_target:
                return f"tensors {old.name} and {new.name} are both loaded into the same elements of it"
            self.contents.remove(old)
        self.contents.append(new)
        return ""

    def fill(self, box: Box) -> None:
        """Forgets what a value that is not of the checkpoint overwrites."""
        for filled in contents_of(box, self.shape, "", False):
            for old in [each for each in self.contents if overlap(each, filled)]:
                self.contents.remove(old)
                if volume(old) > volume(filled):
                    self.compute("part of what was loaded is overwritten")
                    self.computed_from.add(old.name)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, copies between storages are noted: from tensors of the checkpoint, through what is cloned,
    concatenated, stacked or padded, into the targets. All other operations on them make what they give "computed"."""

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conflicts: dict[str, str] = {}  # by target
        self._memories: dict[int, Memory] = {}
        for name, tensor in checkpoint.items():
            memory = self._memories[_key(tensor)] = Memory(tensor, name)
            whole = tuple(map(range, memory.shape))
            if math.prod(memory.shape):
                memory.contents = [Content(whole, name, 0, dense_strides(memory.shape), False)]
        for name, tensor in targets.items():
            self._memories.setdefault(_key(tensor), Memory(tensor, name, is_target=True))

    def of(self, tensor: torch.Tensor) -> Memory | None:
        return self._memories.get(_key(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is _aten.copy_.default:
            self._copied(args[0], args[1])
            return result
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        known = [each for each in inputs if self.of(each) is not None]
        if not known:
            return result
        storages = {_key(each) for each in inputs}
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if func._schema.is_mutable:
            self._written(func, inputs, args, kwargs)
        else:
            for output in outputs:
                if _key(output) not in storages and not _has_no_elements_of(func):
                    self._made(func, output, inputs, args, kwargs)
        return result

    def _copied(self, to: torch.Tensor, source: torch.Tensor) -> None:
        of_source, of_target = self.of(source), self.of(to)
        if of_source is None:
            if of_target is not None:
                of_target.fill(_fill_of(to))
            return
        if of_target is None:
            of_target = self._new(to)
        if of_source.computed or of_source.is_target:
            of_target.compute(of_source.computed or f"it is copied from {of_source.name}", of_source)
            return
        self._copy(to, source, of_target)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, of_target: Memory) -> None:
        source = source.expand(to.shape)
        box = Box(tuple(to.shape), int(to.storage_offset()), to.stride(), int(source.storage_offset()), source.stride())
        for content in self._read(box, source, of_target, to.dtype != source.dtype):
            conflict = of_target.put(content)
            if conflict and of_target.is_target:
                self.conflicts.setdefault(of_target.name, conflict)
            elif conflict:
                of_target.compute(conflict)

    def _read(self, box: Box, source: torch.Tensor, of_target: Memory, cast: bool) -> Iterator[Content]:
        of_source = self.of(source)
        assert of_source is not None
        try:
            for found, content in through(box, of_source.shape, of_source.contents):
                yield from contents_of(found, of_target.shape, content.name, cast or content.cast)
        except UnimplementedError as error:
            of_target.compute(str(error), of_source)

    def read(self, tensor: torch.Tensor) -> Memory:
        """What is at the place of `tensor`: it may be a view of a tensor of the checkpoint."""
        found = Memory(tensor, "")
        memory = self.of(tensor)
        if memory is None:
            return found
        if memory.computed:
            found.compute(memory.computed, memory)
        else:
            to = dense_strides(tensor.shape)
            box = Box(tuple(tensor.shape), 0, to, int(tensor.storage_offset()), tensor.stride())
            found.shape = tuple(tensor.shape)
            found.contents = list(self._read(box, tensor, found, False))
        return found

    def _new(self, tensor: torch.Tensor) -> Memory:
        return self._memories.setdefault(_key(tensor), Memory(tensor, "a temporary"))

    def _written(self, func: Any, inputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation in place, or one with out=."""
        packet = func.overloadpacket
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor):
            if self.of(out) is None and any(self.of(each) is not None for each in inputs):
                self._new(out)
            rest = {name: value for name, value in kwargs.items() if name != "out"}
            if packet in _MADE:
                self._made(func, out, inputs, args, rest)
            else:
                self._compute(out, func, inputs)
            return
        target = args[0]
        others = [each for each in inputs if each is not target and self.of(each) is not None]
        memory = self.of(target)
        if others:
            self._compute(target, func, inputs)
        elif memory is not None and packet in _FILLS:
            memory.fill(_fill_of(target))
        elif memory is not None and packet not in _HARMLESS and (memory.contents or not memory.is_target):
            self._compute(target, func, inputs)

    def _compute(self, tensor: torch.Tensor, func: Any, inputs: list[torch.Tensor]) -> None:
        known = [memory for memory in map(self.of, inputs) if memory is not None]
        self._new(tensor).compute(f"it is computed by {func}", *known)

    def _made(
        self, func: Any, output: torch.Tensor, inputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        parts = _MADE.get(func.overloadpacket)
        if parts is None:
            self._compute(output, func, inputs)
            return
        memory = self._new(output)
        try:
            for view, source in parts(output, *args, **kwargs):
                if self.of(source) is not None:
                    self._copied(view, source)
        except UnimplementedError as error:
            memory.compute(str(error), *filter(None, map(self.of, inputs)))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _fill_of(tensor: torch.Tensor) -> Box:
    zeros = (0,) * tensor.dim()
    return Box(tuple(tensor.shape), int(tensor.storage_offset()), tensor.stride(), 0, zeros)


def _has_no_elements_of(func: Any) -> bool:
    """Whether it takes no more than the shape of its arguments."""
    name = str(func.overloadpacket.__name__)
    return name.endswith("_like") or name.startswith("new_")


# --- operations whose results are made of elements of their arguments: views of the result, and what lies there


def _clone(output: torch.Tensor, source: torch.Tensor, *rest: Any, **options: Any) -> Iterable[Any]:
    yield output, source


def _cat(output: torch.Tensor, tensors: list[torch.Tensor], dim: int = 0) -> Iterable[Any]:
    at = 0
    for tensor in tensors:
        if tensor.numel():
            yield output.narrow(dim, at, tensor.shape[dim]), tensor
            at += tensor.shape[dim]


def _stack(output: torch.Tensor, tensors: list[torch.Tensor], dim: int = 0) -> Iterable[Any]:
    for i, tensor in enumerate(tensors):
        yield output.select(dim, i), tensor


def _pad(output: torch.Tensor, source: torch.Tensor, pad: list[int], *rest: Any) -> Iterable[Any]:
    for i in range(len(pad) // 2):
        dim, before, after = source.dim() - 1 - i, pad[2 * i], pad[2 * i + 1]
        source = source.narrow(dim, max(-before, 0), source.shape[dim] - max(-before, 0) - max(-after, 0))
        output = output.narrow(dim, max(before, 0), source.shape[dim])
    yield output, source


def _repeat(output: torch.Tensor, source: torch.Tensor, repeats: list[int]) -> Iterable[Any]:
    source = source[(None,) * (len(repeats) - source.dim())]
    if not source.numel():
        return
    view = output
    for dim, size in enumerate(source.shape):
        view = view.view(*view.shape[: 2 * dim], repeats[dim], size, *view.shape[2 * dim + 1 :])
        source = source.unsqueeze(2 * dim)
    yield view, source


def _index_select(output: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor) -> Iterable[Any]:
    if index.is_meta:
        raise UnimplementedError("it is selected by an index without values")
    for i, at in enumerate(index.tolist()):
        yield output.select(dim, i), source.select(dim, at)


_MADE: dict[Any, Callable[..., Iterable[Any]]] = {
    **dict.fromkeys(_CLONES, _clone),
    _aten.cat: _cat,
    _aten.stack: _stack,
    _aten.constant_pad_nd: _pad,
    _aten.repeat: _repeat,
    _aten.index_select: _index_select,
}
_FILLS = {_aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.random_}
_HARMLESS = {  # they change how a tensor sees its memory
    *(_aten.resize_, _aten.set_, _aten.detach_, _aten.t_, _aten.transpose_, _aten.squeeze_, _aten.unsqueeze_),
    _aten.as_strided_,
}
