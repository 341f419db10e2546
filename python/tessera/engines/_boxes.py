"""Copies between dense memories, as strided boxes of elements: cut until slices describe them, and composed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._errors import UnimplementedError

_MOST_PIECES = 1 << 16  # of one copy; a loader that needs more moves single elements


class Box(NamedTuple):
    """For every index below `size`, one element: at `to` + sum(index * to_strides) it is the one that lies at `source`
    + sum(index * source_strides), all in elements of the two memories. A source stride may be 0."""

    size: tuple[int, ...]
    to: int
    to_strides: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    def turned(self) -> Box:
        """The same copy the other way round."""
        return Box(self.size, self.source, self.source_strides, self.to, self.to_strides)


class Aligned(NamedTuple):
    """A box whose source is slices of a dense tensor."""

    box: Box
    slices: tuple[range, ...]  # one for each dim of that tensor
    dims: tuple[int | None, ...]  # of that tensor, one for each dim of the box; None: the same element each time


class Content(NamedTuple):
    """What lies in a part of a dense tensor: elements of a tensor of the checkpoint."""

    place: tuple[range, ...]  # in that tensor
    name: str
    source: int  # the element at the first index of `place`
    strides: tuple[int, ...]  # for one step along each dim of `place`
    cast: bool  # it had another dtype on its way


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def dense_shape(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Of the tensor in the order of its memory: a transposed one is seen as it lies. None if there are gaps."""
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim]), reverse=True)
    found = tuple(shape[dim] for dim in order)
    wanted = dense_strides(found)
    if any(shape[dim] != 1 and strides[dim] != step for dim, step in zip(order, wanted, strict=True)):
        return None
    return found


def aligned(box: Box, shape: Sequence[int]) -> list[Aligned]:
    """`box` in parts whose sources are slices of a dense tensor of `shape`. Raises UnimplementedError if there are too
    many."""
    found: list[Aligned] = []
    todo = [_normal(box)] if box.elements else []
    strides = dense_strides(shape)
    while todo:
        if len(found) + len(todo) > _MOST_PIECES:
            raise UnimplementedError(f"a copy of {box.elements} elements is not made of slices of {tuple(shape)}")
        parts = _fit(todo.pop(), shape, strides)
        if isinstance(parts, Aligned):
            found.append(parts)
        else:
            todo.extend(map(_squeezed, parts))
    return found


def _dims(box: Box) -> list[tuple[int, int, int]]:
    return [each for each in zip(box.size, box.to_strides, box.source_strides, strict=True) if each[0] > 1]


def _with_dims(box: Box, dims: Sequence[tuple[int, int, int]]) -> Box:
    size, to_strides, source_strides = zip(*dims, strict=True) if dims else ((), (), ())
    return Box(size, box.to, to_strides, box.source, source_strides)


def _squeezed(box: Box) -> Box:
    """Without dims of one element."""
    return _with_dims(box, _dims(box))


def _normal(box: Box) -> Box:
    """Without dims of one element; dims that follow each other in both memories become one."""
    dims = _dims(box)
    dims.sort(key=lambda each: (each[2], each[1]), reverse=True)
    joined: list[tuple[int, int, int]] = []
    for size, to, source in dims:
        if joined and joined[-1][1] == to * size and joined[-1][2] == source * size and source:
            joined[-1] = (joined[-1][0] * size, to, source)
        else:
            joined.append((size, to, source))
    return _with_dims(box, joined)


def _fit(box: Box, shape: Sequence[int], strides: Sequence[int]) -> Aligned | list[Box]:
    """The box itself if its source is slices; else boxes that are nearer to it."""
    start = _coordinates(box.source, shape, strides)
    taken: dict[int, tuple[int, int]] = {}  # dim of the tensor: dim of the box, step
    dims: list[int | None] = []
    for k, (size, stride) in enumerate(zip(box.size, box.source_strides, strict=True)):
        if stride == 0:
            dims.append(None)
            continue
        dim = next(d for d in range(len(shape)) if strides[d] <= stride and shape[d] > 1)
        step, rest = divmod(stride, strides[dim])
        if rest:
            return _cut(box, k, 1)
        room = (shape[dim] - 1 - start[dim]) // step + 1
        if size > room:
            turn = shape[dim] // step if shape[dim] % step == 0 and start[dim] < step else 0
            if turn and size >= turn:
                whole = size // turn * turn
                return [_split(box, k, turn)] if whole == size else _cut(box, k, whole)
            return _cut(box, k, room)
        if dim in taken:
            other, other_step = taken[dim]
            return _cut(box, k if step > other_step else other, 1)
        taken[dim] = (k, step)
        dims.append(dim)
    slices = tuple(
        range(at, at + (box.size[taken[d][0]] - 1) * taken[d][1] + 1, taken[d][1]) if d in taken else range(at, at + 1)
        for d, at in enumerate(start)
    )
    return Aligned(box, slices, tuple(dims))


def _coordinates(offset: int, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [offset // stride % size if size else 0 for size, stride in zip(shape, strides, strict=True)]


def _cut(box: Box, dim: int, at: int) -> list[Box]:
    """In two along `dim`; at 1, in boxes of one index each."""
    size = box.size[dim]
    bounds = range(size) if at == 1 else (0, at)
    ends = (*bounds[1:], size)
    return [
        Box(
            (*box.size[:dim], end - begin, *box.size[dim + 1 :]),
            box.to + begin * box.to_strides[dim],
            box.to_strides,
            box.source + begin * box.source_strides[dim],
            box.source_strides,
        )
        for begin, end in zip(bounds, ends, strict=True)
    ]


def _split(box: Box, dim: int, inner: int) -> Box:
    """With two dims in place of one."""

    def both(strides: tuple[int, ...]) -> tuple[int, ...]:
        return (*strides[:dim], strides[dim] * inner, strides[dim], *strides[dim + 1 :])

    size = (*box.size[:dim], box.size[dim] // inner, inner, *box.size[dim + 1 :])
    return Box(size, box.to, both(box.to_strides), box.source, both(box.source_strides))


def contents_of(box: Box, shape: Sequence[int], name: str, cast: bool) -> Iterator[Content]:
    """What a copy from the checkpoint's tensor `name` leaves in a dense tensor of `shape`."""
    for part, slices, dims in aligned(box.turned(), shape):
        strides = [0] * len(shape)
        for dim, stride in zip(dims, part.to_strides, strict=True):
            if dim is not None:
                strides[dim] = stride
        yield Content(slices, name, part.to, tuple(strides), cast)


def through(box: Box, shape: Sequence[int], contents: Sequence[Content]) -> Iterator[tuple[Box, Content]]:
    """`box` reads a dense tensor of `shape` that holds `contents`: the boxes that read the checkpoint's tensors."""
    for part, slices, dims in aligned(box, shape):
        of_dim = {dim: k for k, dim in enumerate(dims) if dim is not None}
        for content in contents:
            common = [_common(a, b) for a, b in zip(slices, content.place, strict=True)]
            if all(common):
                yield _composed(part, slices, of_dim, content, [each for each in common if each]), content


def _composed(
    part: Box, slices: Sequence[range], of_dim: dict[int, int], content: Content, common: Sequence[range]
) -> Box:
    size, to, to_strides = list(part.size), part.to, list(part.to_strides)
    source, source_strides = content.source, [0] * len(size)
    for d, (here, place, both) in enumerate(zip(slices, content.place, common, strict=True)):
        source += place.index(both.start) * content.strides[d]
        k = of_dim.get(d)
        if k is None:
            continue
        to += here.index(both.start) * part.to_strides[k]
        size[k] = len(both)
        to_strides[k] *= both.step // here.step
        source_strides[k] = both.step // place.step * content.strides[d]
    return Box(tuple(size), to, tuple(to_strides), source, tuple(source_strides))


def _common(a: range, b: range) -> range | None:
    """What two ascending ranges have in common."""
    divisor = math.gcd(a.step, b.step)
    if (b.start - a.start) % divisor:
        return None
    step = a.step // divisor * b.step
    turns = (b.start - a.start) // divisor * pow(a.step // divisor, -1, b.step // divisor) if b.step > divisor else 0
    first = a.start + turns * a.step
    first += -((first - max(a.start, b.start)) // step) * step
    end = min(a[-1], b[-1]) + 1
    return range(first, end, step) if first < end else None


def overlap(a: Content, b: Content) -> bool:
    return all(_common(x, y) for x, y in zip(a.place, b.place, strict=True))


def volume(content: Content) -> int:
    return math.prod(map(len, content.place))
