"""Walks what a user registers, as (name, Source): modules, state_dicts, single tensors with or without a layout.

A batch keeps a `Source` for each name. locate() looks the tensor up as it is now; a transfer holds what it returns, so
that the memory stays while it is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args

from .._arguments import choice
from .._errors import InvalidArgumentError
from .dicts import Entry, entries
from .foreign import type_name
from .location import Source, refusal
from .modules import walk_module
from .tensors import has_layout, is_tensor, weak_source_of
from .torch import is_module

Hold: TypeAlias = Literal["strong", "weak"]
"""What a batch keeps alive: the module or dict that it was given, whose tensors it looks up at each transfer; or
nothing, and the registered tensors may be freed at any time."""


def require_hold(hold: Any) -> None:
    """Raises InvalidArgumentError unless it is a Hold."""
    choice("hold", hold, get_args(Hold))


def walk(
    tensors: Any, skipped: list[str], keep: Callable[[str], bool], hold: Hold = "strong"
) -> Iterator[tuple[str, Source, Any]]:
    """Yields (name, source, tensor) for all that is to be kept of a module, or of a dict of tensors; nested ones get
    dotted names. Names of entries that are not tensors are appended to `skipped`."""
    if is_module(tensors):
        for name, source, tensor in walk_module(tensors, keep):
            if hold == "weak":
                source.locate()  # raises for what FSDP has gathered
                source = weak_source_of(name, tensor)
            yield name, source, tensor
    elif isinstance(tensors, Mapping):
        seen: set[str] = set()
        for name, source, value in entries(tensors, skipped):
            if not keep(name):
                continue
            if name in seen:
                raise refusal(name, "two tensors have that name, one of them in a nested dict: rename one")
            seen.add(name)
            yield name, source if hold == "strong" else weak_source_of(name, value), _tensor(value)
    else:
        raise InvalidArgumentError(
            f"a {type_name(tensors)} cannot be registered: give a torch module or {{name: tensor or (array, layout)}}"
        )


def other_names(tensors: Any) -> list[str]:
    """Names of tensors that walk() passes over, though a pattern may mean them: buffers that are not persistent."""
    return [name for name, _ in tensors.named_buffers(remove_duplicate=False)] if is_module(tensors) else []


def single(name: str, value: Any, hold: Hold) -> tuple[str, Source, Any]:
    """Likewise, for one tensor, or one with a layout."""
    if not (is_tensor(value) or has_layout(value)):
        raise refusal(name, f"a {type_name(value)} is not a tensor")
    source = weak_source_of(name, value) if hold == "weak" else Entry(name, {name: value}, (name,))
    return name, source, _tensor(value)


def _tensor(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value
