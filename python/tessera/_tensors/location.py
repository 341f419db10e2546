"""Where a rank's local tensors are, and checks for tensors of any library."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeGuard

from .. import _core
from .._errors import Error, InvalidArgumentError
from .foreign import dtype

_dtype_name = lru_cache(maxsize=64)(dtype)  # NumPy takes microseconds to spell out one of its own

OUTSIDE = -1
"""Location.rank of a process outside the mesh."""


class Location(NamedTuple):  # not a dataclass: there may be many, and replacing one's fields is slow
    """The current place of this rank's local tensor."""

    address: int  # of the first element; 0 if there is none
    dtype: str
    shape: tuple[int, ...]  # local
    strides: tuple[int, ...]  # in elements
    layout: _core.Layout | None  # None: this rank holds all of it
    global_shape: tuple[int, ...] | None  # None: it follows from the layout, or is `shape`
    rank: int | None = None  # of this process in the layout's mesh, or OUTSIDE; None: as the job says
    other_layout: _core.Layout | None = None  # the second of readings(); not compared
    memory: Any = None  # keeps the memory alive; not compared
    quantised: tuple[str, tuple[str, ...]] | None = None  # format and planes that are there, in one block of memory
    copy: _core.QuantizedCopy | None = None  # of these elements; not compared

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and self[:7] == other[:7] and self.quantised == other.quantised

    def __ne__(self, other: object) -> bool:  # a tuple has one of its own
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:7])

    def is_as(self, other: Location) -> bool:
        """Whether it is equal to `other`, whose layout stands in for one that is missing."""
        return (
            self[:4] == other[:4]
            and (self.layout is None or self.layout == other.layout)
            and self[5:7] == other[5:7]
            and self.quantised == other.quantised
        )

    def check(self, name: str, layout: _core.Layout, shape: tuple[int, ...], rank: int) -> None:
        """Refuses a local tensor that is not what `layout` gives `rank` of a tensor of global `shape`, since that much
        is read or written."""
        inside = rank in layout.mesh
        if self.rank is not None and self.rank != (rank if inside else OUTSIDE):
            here = "not in it" if self.rank == OUTSIDE else f"its rank {self.rank}"
            raise refusal(
                name,
                f"torch's mesh ({layout}) says that this process is {here}, its job that it is rank {rank}: connect() "
                "with torch's rank and world, or register (local tensor, layout over the job's ranks, global shape)",
            )
        try:
            self.check_shape(layout, shape, rank)
        except Error as error:
            raise refusal(name, str(error)) from None

    def check_shape(self, layout: _core.Layout, shape: tuple[int, ...], rank: int) -> None:
        """Likewise, for the shape only and without a name. A rank outside the mesh must hold nothing."""
        expected = layout.local_shape(shape, rank)
        empty = 0 in expected or rank not in layout.mesh
        if not (0 in self.shape if empty else expected == self.shape):
            raise InvalidArgumentError(
                f"{layout} gives rank {rank} {expected} of a tensor of shape {shape}; what it holds is {self.shape}"
            )


class Source(Protocol):
    """Something registered under a name."""

    @property
    def current(self) -> Callable[[], Any] | None:
        """Returns a function that gives torch's current tensor, or None if it has gone: a Watch calls that instead of
        locate(). Valid for the sources that are watched together from now on; after another locate(), call it again."""

    def locate(self) -> Location: ...

    def require_writeable(self) -> None:
        """Refuses what cannot be received into."""

    def begin_write(self) -> None:
        """A transfer is about to write the elements. Refuses what may not be written now."""

    def written(self) -> None:
        """Tells its library that the elements are about to change, or have changed."""


class BringsSource(Protocol):
    """A tensor that defines itself how it is registered; it may be one of torch's."""

    def __tessera_source__(self, name: str) -> Source: ...


def brings_source(value: Any) -> TypeGuard[BringsSource]:
    return hasattr(type(value), "__tessera_source__")


def refusal(name: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"tensor {name}: {why}")


def element_type(name: str, dtype: Any) -> str:
    """Tessera's name of the dtype of a tensor of torch or NumPy."""
    try:
        return _dtype_name(dtype)
    except Error as error:
        raise refusal(name, f"{error}; cast it, or view its bits as another type") from None


def sound_strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """`strides`, with harmless values for dims that are never stepped along. Refuses elements that share memory, and
    negative strides."""
    if not math.prod(shape):
        return tuple(math.prod(size or 1 for size in shape[dim + 1 :]) for dim in range(len(shape)))
    strides = tuple(stride if size > 1 else max(stride, 1) for size, stride in zip(shape, strides, strict=True))
    extent = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride < 0:
            raise refusal(name, f"it runs backwards in memory (shape {shape}, strides {strides}): copy it")
        if stride == 0:
            raise refusal(
                name,
                f"it is expanded (shape {shape}, strides {strides}): one element stands for several; clone it, or "
                "register what was expanded",
            )
        if stride < extent:
            raise refusal(name, f"its elements overlap in memory (shape {shape}, strides {strides}): clone it")
        extent += stride * (size - 1)
    return strides
