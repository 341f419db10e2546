"""Names on the bus that differ from local ones: one tensor holds parts of several, or is a part of one.

A map tells which tensors of the bus a local tensor holds, and where. Each such Part is registered as a tensor of
its own, a view of the local one: an engine's [q; k; v] is three tensors on the bus, and nothing is copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from .. import _core
from .._arguments import pattern, sizes, text
from .._errors import Error, InvalidArgumentError
from .._tensors.foreign import type_name
from .._tensors.layouts import LayoutLike, as_layout
from .._tensors.location import Location
from .slices import Entry, Index, cut, entries, index_text, is_sharded, require_index, sharding_axes, view


@dataclass(frozen=True)
class Part:
    """A tensor on the bus that is part of a local tensor.

    Indices are ints and slices, as in NumPy's basic indexing: an int along a dim of experts takes one expert.

    Attributes:
        name: Name on the bus, usually the checkpoint's. If the key of the map is a regular expression, it may refer to
            groups, as in re.sub.
        local: Index of the part in the *local* tensor: a strided view. None: all of it.
        layout: Layout of the named tensor over the ranks of this job. None: that of the local tensor (if that is plain,
            this rank holds all of the named tensor).
        shape: Global shape of the named tensor. None: it follows if nothing is sharded, and from a DTensor; else from
            what all ranks of the job hold of it.
        whole: Instead of `local`, `layout` and `shape`: index of the part in the whole tensor, in global coordinates.
            The three follow from it, even if ranks hold pieces of unequal size, or none.
        source: For a receiver: the slice of the *named* tensor to take, in global coordinates; `layout` and `shape` are
            then those of that slice. None: all of it.
    """

    name: str
    local: Index | None = None
    layout: LayoutLike | None = None
    shape: Sequence[int] | None = None
    whole: Index | None = field(default=None, kw_only=True)
    source: Index | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not text("Part: name", self.name):
            raise InvalidArgumentError(f"Part({self.name!r}): a name is a text that is not empty")
        if self.layout is not None:
            object.__setattr__(self, "layout", as_layout(self.layout))
        if self.shape is not None:
            object.__setattr__(self, "shape", sizes(f"part {self.name}: shape", self.shape))
        for what in ("local", "whole", "source"):
            if getattr(self, what) is not None:
                require_index(f"part {self.name}: {what}", getattr(self, what))
        if self.whole is not None and not (self.local is None and self.layout is None and self.shape is None):
            raise InvalidArgumentError(
                f"part {self.name}: whole= says local=, layout= and shape= already: give either it or them"
            )


# The parts of a local tensor: another name, several parts, or None to leave it out.
Mapped: TypeAlias = str | Part | Sequence[str | Part] | None
# By local name, as a regular expression that matches all of it (a key that equals the name comes first, then the others
# in order; a name without a match is kept); or a function of the local name and the tensor.
Map: TypeAlias = Mapping[str, Mapped] | Callable[[str, Any], Mapped]


def compile_map(given: Map | None) -> Callable[[str, Any], list[Part]]:
    """The map as a function from a local name and its tensor to parts. Raises InvalidArgumentError."""
    if given is None:
        return lambda name, tensor: [Part(name)]
    if isinstance(given, Mapping):
        return _compile_rules(given)
    if callable(given):
        function = given
        return lambda name, tensor: _parts(name, function(name, tensor))
    raise InvalidArgumentError(f"map {given!r}: give {{local name: name, Part, [Part, ...] or None}} or a function")


def mapped_names(given: Map | None, names: Iterable[str]) -> list[str] | None:
    """The names on the bus of tensors that are not at hand; None if only a function knows them."""
    if callable(given):
        return None if list(names) else []
    parts_of = compile_map(given)
    return [part.name for name in names for part in parts_of(name, None)]


def _compile_rules(rules: Mapping[str, Mapped]) -> Callable[[str, Any], list[Part]]:
    patterns = [(pattern("map: key", key), _parts(key, mapped)) for key, mapped in rules.items()]

    def apply(name: str, tensor: Any) -> list[Part]:
        if name in rules:
            return _parts(name, rules[name])
        for known, parts in patterns:
            if match := known.fullmatch(name):
                return [replace(part, name=_expand(match, part.name)) for part in parts]
        return [Part(name)]

    return apply


def _expand(match: re.Match[str], template: str) -> str:
    try:
        return match.expand(template)
    except (re.error, IndexError) as error:
        raise InvalidArgumentError(f"map: {template!r} beside the key {match.re.pattern!r}: {error}") from None


def _parts(name: str, mapped: Mapped) -> list[Part]:
    if mapped is None:
        return []
    if isinstance(mapped, str | Part):
        return [_part(name, mapped)]
    if isinstance(mapped, Iterable):
        return [_part(name, each) for each in mapped]
    raise InvalidArgumentError(f"map: {name} becomes {mapped!r}: give a name, a Part, a list of them, or None")


def _part(name: str, mapped: Any) -> Part:
    if isinstance(mapped, str):
        return Part(mapped)
    if isinstance(mapped, Part):
        return mapped
    raise InvalidArgumentError(f"map: {name} becomes {mapped!r} ({type_name(mapped)}): give a name or a Part")


# --- the places of parts


class Piece(NamedTuple):
    """This rank's piece of a tensor on the bus."""

    tensor: str  # the local tensor that it is, or is in
    location: Location  # with a layout; without memory
    shape: tuple[int, ...] | None  # global; None: it follows from all ranks' local shapes
    source: str = ""  # on the bus
    sliced: Index | None = None  # the slice that is taken, in global coordinates; None: all of it
    taken: tuple[Entry, ...] = ()  # the same, once the shape of the source is known


class Local:
    """A local tensor that has parts."""

    def __init__(self, name: str, location: Location, layout: _core.Layout, rank: int) -> None:
        self._name = name
        self._layout = layout
        self._rank = rank
        self._shape = location.global_shape
        if self._shape is None and not is_sharded(layout):
            self._shape = location.shape
        plain = location.layout is layout and location.global_shape is None and location.memory is None
        self._location = location if plain else location._replace(layout=layout, global_shape=None, memory=None)

    def piece(self, part: Part) -> Piece | None:
        """Where `part` lies; None if this rank is not in its mesh and need not register it.

        Raises InvalidArgumentError, or UnimplementedError, that names tensor and part.
        """
        try:
            if self._location.quantised and (part.whole, part.local) != (None, None):
                raise InvalidArgumentError(
                    "a QuantizedTensor is registered as a whole: make one for each part, or register a tensor of floats"
                )
            if part.whole is not None:
                if self._shape is None:
                    raise InvalidArgumentError(f"whole=: its global shape cannot be seen under {self._layout}: give it")
                return self._of_whole(entries(part.whole, self._shape))
            if part.layout is None:
                return self._of_same_layout(part)
            return self._of_local(entries(part.local, self._location.shape), as_layout(part.layout), part.shape)
        except Error as error:
            where = f"tensor {self._name}" if part == Part(self._name) else f"part {part.name} of tensor {self._name}"
            raise type(error)(f"{where}: {error}") from None

    def _of_same_layout(self, part: Part) -> Piece | None:
        if part.local is None and part.shape is None and self._shape is not None:
            self._location.check_shape(self._layout, self._shape, self._rank)
            return Piece(self._name, self._location, self._shape)
        if self._rank not in self._layout.mesh:
            return None
        here = self._location.shape
        taken = entries(part.local, here)
        if self._shape is not None and not self._cuts_sharded_dim(taken):
            # A dim that is not sharded is as long here as it is in all.
            whole = [
                range(size) if _takes_all(each, local) else each
                for each, local, size in zip(taken, here, self._shape, strict=True)
            ]
            piece = self._of_whole(whole)
            if part.shape is not None and part.shape != piece.shape:
                raise InvalidArgumentError(f"shape={part.shape}, but it is {piece.shape} under {self._layout}")
            return piece
        if any(isinstance(each, int) for each in taken):
            raise InvalidArgumentError(
                f"local=[{index_text(part.local)}] drops a dim, and no layout follows from {self._layout}: give "
                "layout= or whole="
            )
        return self._of_local(taken, self._layout, part.shape)

    def _cuts_sharded_dim(self, taken: Sequence[Entry]) -> bool:
        bound = self._layout.bind(self._shape or ())
        return any(
            not _takes_all(each, size) and any(bound.mesh.shape[axis] > 1 for axis in sharding_axes(bound, dim))
            for dim, (each, size) in enumerate(zip(taken, self._location.shape, strict=True))
        )

    def _of_whole(self, taken: Sequence[Entry]) -> Piece:
        assert self._shape is not None
        self._location.check_shape(self._layout, self._shape, self._rank)
        found = cut(self._layout, self._shape, self._rank, taken)
        if found.local is None or not self._location.address:
            shape = found.layout.bind(found.shape).local_shape(found.shape, self._rank)
            here = self._location._replace(address=0, shape=shape, strides=(0,) * len(shape))
        else:
            here = view(self._location, found.local)
        return Piece(self._name, here._replace(layout=found.layout), found.shape)

    def _of_local(self, taken: Sequence[Entry], layout: _core.Layout, shape: Sequence[int] | None) -> Piece:
        here = view(self._location, taken)._replace(layout=layout)
        known = tuple(shape) if shape is not None else None if is_sharded(layout) else here.shape
        if known is not None:
            here.check_shape(layout, known, self._rank)
        return Piece(self._name, here, known)


def _takes_all(each: Entry, size: int) -> bool:
    return isinstance(each, range) and len(each) == size
