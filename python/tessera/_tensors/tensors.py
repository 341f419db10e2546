"""Single tensors of any library, with or without a layout, as Sources."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from .._arguments import sizes
from .._errors import Error
from .arrays import Array, is_array
from .foreign import type_name
from .layouts import as_layout
from .location import Location, Source, brings_source, refusal
from .torch import WeakTensor, is_torch_tensor


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of some library: torch's, NumPy's, one with DLPack, or a QuantizedTensor."""
    return brings_source(value) or is_torch_tensor(value) or is_array(value)


def has_layout(value: Any) -> bool:
    """Whether it is (tensor, layout) or (tensor, layout, global shape)."""
    return isinstance(value, tuple) and len(value) in (2, 3) and is_tensor(value[0]) and not is_tensor(value[1])


class Beside:
    """The layout given with a local tensor, and its global shape if given."""

    def __init__(self, name: str, said: Sequence[Any]) -> None:
        """`said` is what follows the tensor."""
        self._name = name
        self._said = tuple(said)
        try:
            self._layout = as_layout(said[0])
            self._shape = sizes("global shape", said[1]) if len(said) == 2 else None
        except Error as error:
            raise refusal(name, f"{error}; give (tensor, layout) or (tensor, layout, global shape)") from None

    def says(self, said: Sequence[Any]) -> bool:
        """Whether it was made of these very objects."""
        return len(said) == len(self._said) and all(now is then for now, then in zip(said, self._said, strict=True))

    def lay_out(self, found: Location) -> Location:
        if found.layout is not None:
            raise refusal(self._name, f"it has a layout of its own, {found.layout}: give only the tensor")
        return found._replace(layout=self._layout, global_shape=self._shape)


class WithLayout:
    """A local tensor whose layout is given with it."""

    def __init__(self, source: Source, beside: Beside) -> None:
        self._source = source
        self._beside = beside
        self.current = source.current

    def locate(self) -> Location:
        return self._beside.lay_out(self._source.locate())

    def require_writeable(self) -> None:
        self._source.require_writeable()

    def begin_write(self) -> None:
        self._source.begin_write()

    def written(self) -> None:
        self._source.written()


class WeakArray:
    """A tensor of a library other than torch, held weakly."""

    current = None

    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        try:
            self._array = weakref.ref(array)
        except TypeError:
            raise refusal(name, f"a {type_name(array)} cannot be held weakly: register it with hold='strong'") from None
        source_of(name, array)  # raises for what cannot be moved

    def _source(self) -> Source:
        array = self._array()
        if array is None:
            raise refusal(self._name, "it was freed; keep the array, or register it with hold='strong'")
        return source_of(self._name, array)

    def locate(self) -> Location:
        return self._source().locate()

    def require_writeable(self) -> None:
        self._source().require_writeable()

    def begin_write(self) -> None:
        self._source().begin_write()

    def written(self) -> None:
        if self._array() is not None:
            self._source().written()


def source_of(name: str, value: Any) -> Source:
    """The Source of a tensor, or of (tensor, layout) or (tensor, layout, global shape). For torch it holds only the
    storage, and that weakly; it keeps other tensors alive."""
    if has_layout(value):
        return WithLayout(source_of(name, value[0]), Beside(name, value[1:]))
    if brings_source(value):
        return value.__tessera_source__(name)
    if is_torch_tensor(value):
        return WeakTensor(name, value)
    if is_array(value):
        return Array(name, value)
    raise refusal(name, f"a {type_name(value)} is not a tensor")


def weak_source_of(name: str, value: Any) -> Source:
    """Likewise, but holds tensors of other libraries weakly, too."""
    if has_layout(value):
        return WithLayout(weak_source_of(name, value[0]), Beside(name, value[1:]))
    if is_tensor(value) and not is_torch_tensor(value):
        return WeakArray(name, value)
    return source_of(name, value)
