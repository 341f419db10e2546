"""What a user registers, as (name, Source): modules, state_dicts, single tensors with or without a layout.

A batch keeps a `Source` for each name. locate() looks the tensor up as it is now; a transfer holds what it returns, so
that the memory stays while it is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from .. import _core
from .._errors import Error, InvalidArgumentError
from .arrays import Array, is_array
from .foreign import type_name
from .layouts import as_layout
from .location import Location, Source, brings_source, refusal
from .modules import walk_module
from .torch import TorchTensor, is_module, is_torch_tensor


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of some library: torch's, NumPy's, one with DLPack, or a QuantizedTensor."""
    return brings_source(value) or is_torch_tensor(value) or is_array(value)


class WithLayout:
    """A local tensor whose layout is said beside it."""

    def __init__(self, name: str, source: Source, layout: _core.Layout, shape: tuple[int, ...] | None = None) -> None:
        self._name = name
        self._source = source
        self.current = source.current
        self._layout = layout
        self._shape = shape

    def locate(self) -> Location:
        found = self._source.locate()
        if found.layout is not None:
            raise refusal(self._name, f"it is a DTensor with a layout of its own, {found.layout}: give it alone")
        return replace(found, layout=self._layout, global_shape=self._shape)

    def require_writeable(self) -> None:
        self._source.require_writeable()

    def written(self) -> None:
        self._source.written()


def source_of(name: str, value: Any) -> Source:
    """The Source of a tensor, or of (tensor, layout) or (tensor, layout, global shape)."""
    if _has_layout(value):
        try:
            layout = as_layout(value[1])
            shape = tuple(int(size) for size in value[2]) if len(value) == 3 else None
        except (Error, TypeError, ValueError) as error:
            raise refusal(name, f"{error}; give (tensor, layout) or (tensor, layout, global shape)") from None
        return WithLayout(name, source_of(name, value[0]), layout, shape)
    if brings_source(value):
        return value.__tessera_source__(name)
    if is_torch_tensor(value):
        return TorchTensor(name, value)
    if is_array(value):
        return Array(name, value)
    raise refusal(name, f"a {type_name(value)} is not a tensor")


def _has_layout(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) in (2, 3) and is_tensor(value[0]) and not is_tensor(value[1])


def walk(tensors: Any, skipped: list[str], keep: Callable[[str], bool]) -> Iterator[tuple[str, Source, Any]]:
    """(name, source, tensor) of everything to be kept of a module, or of a dict of tensors, nested ones with dotted
    names. Names of what is not a tensor are appended to `skipped`."""
    if is_module(tensors):
        yield from walk_module(tensors, keep)
    elif isinstance(tensors, Mapping):
        seen: set[str] = set()
        for name, value in leaves(tensors, skipped):
            if not keep(name):
                continue
            if name in seen:
                raise refusal(name, "two tensors have that name, one of them in a nested dict: rename one")
            seen.add(name)
            yield name, source_of(name, value), value[0] if isinstance(value, tuple) else value
    else:
        raise InvalidArgumentError(
            f"a {type_name(tensors)} cannot be registered: give a torch module or {{name: tensor or (array, layout)}}"
        )


def leaves(values: Mapping[Any, Any], skipped: list[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, tensor or (tensor, layout)) of a dict and those nested in it, likewise lists that hold tensors."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from leaves(value, skipped, f"{name}.")
        elif is_tensor(value) or _has_layout(value):
            yield name, value
        elif isinstance(value, list | tuple) and any(is_tensor(each) or _has_layout(each) for each in value):
            yield from leaves(dict(enumerate(value)), skipped, f"{name}.")
        else:
            skipped.append(name)
