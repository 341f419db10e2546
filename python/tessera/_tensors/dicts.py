"""Tensors in dicts, nested or not, as sources of a batch: looked up again at every transfer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from .._errors import InvalidArgumentError
from .location import Location, Source, brings_source, refusal
from .tensors import Beside, has_layout, is_tensor, source_of
from .torch import Locator, is_torch_tensor, written

Container: TypeAlias = Mapping[Any, Any] | list[Any] | tuple[Any, ...]


class Entry:
    """The value that a dict, or a container nested in it, has under a key: a tensor, or a tensor with a layout. Either
    may be replaced by another of the same kind.

    An entry keeps the dict alive, and so its tensors, but not those that were replaced."""

    __slots__ = ("_beside", "_keys", "_locator", "_name", "_root", "_torch")  # there may be many

    def __init__(self, name: str, root: Container, keys: tuple[Any, ...]) -> None:
        """keys: The keys of the containers on the way from `root`."""
        self._name = name
        self._root = root
        self._keys = keys
        self._locator: Locator | None = None
        self._beside: Beside | None = None
        self._torch: weakref.ref[Any] | None = None  # the tensor that was last located, if it is torch's

    @property
    def current(self) -> Callable[[], Any] | None:
        if self._torch is None:
            return None
        if self._beside is None and len(self._keys) == 1 and type(self._root) is dict:
            return partial(self._root.get, self._keys[0])
        return self._current

    def _current(self) -> Any:
        value = self._find()
        if self._beside is None:
            return value
        return value[0] if isinstance(value, tuple) and self._beside.says(value[1:]) else None

    def locate(self) -> Location:
        tensor = self._tensor()
        if is_torch_tensor(tensor) and not brings_source(tensor):
            self._locator = self._locator or Locator(self._name)
            found = self._locator.locate(tensor)
            self._torch = weakref.ref(tensor)
        else:
            found = source_of(self._name, tensor).locate()
            self._torch = None
        return found if self._beside is None else self._beside.lay_out(found)

    def require_writeable(self) -> None:
        tensor = self._tensor()
        if not is_torch_tensor(tensor):
            source_of(self._name, tensor).require_writeable()

    def begin_write(self) -> None:
        tensor = self._tensor()
        if brings_source(tensor):
            source_of(self._name, tensor).begin_write()

    def written(self) -> None:
        if self._torch is None:
            return self.require_writeable()
        tensor = self._torch()
        if tensor is not None:
            written(tensor)

    def _tensor(self) -> Any:
        """The current tensor, with the layout given with it."""
        value = self._find()
        if has_layout(value):
            if self._beside is None or not self._beside.says(value[1:]):
                self._beside = Beside(self._name, value[1:])
            return value[0]
        if not is_tensor(value):
            raise refusal(
                self._name,
                "the dict that was registered has no tensor there any more: put one back, or close the batch and "
                "register it again",
            )
        self._beside = None
        return value

    def _find(self) -> Any:
        at: Any = self._root
        for key in self._keys:
            if isinstance(at, Mapping):
                at = at.get(key)
            elif isinstance(at, list | tuple) and key < len(at):
                at = at[key]
            else:
                return None
        return at


def entries(tensors: Mapping[Any, Any], skipped: list[str]) -> Iterator[tuple[str, Source, Any]]:
    """Yields (name, Entry, value) for each leaf."""
    for leaf in leaves(tensors, skipped):
        yield leaf.name, Entry(leaf.name, tensors, leaf.keys), leaf.value


class Leaf(NamedTuple):
    """A tensor, or (tensor, layout), in a dict or nested in it."""

    name: str  # the keys, with dots between them
    keys: tuple[Any, ...]
    value: Any


@dataclass(frozen=True)
class _Level:
    container: Container
    prefix: str
    keys: tuple[Any, ...]
    items: Iterator[tuple[Any, Any]] = field(compare=False)


def leaves(values: Mapping[Any, Any], skipped: list[str]) -> Iterator[Leaf]:
    """Leaves of a dict, of dicts nested in it, and of lists with tensors. Names of other values go to `skipped`. Raises
    InvalidArgumentError for a container that contains itself."""
    levels = [_Level(values, "", (), iter(values.items()))]
    open_now = {id(values)}
    while levels:
        level = levels[-1]
        for key, value in level.items:
            name, keys = f"{level.prefix}{key}", (*level.keys, key)
            if is_tensor(value) or has_layout(value):
                yield Leaf(name, keys, value)
            elif isinstance(value, Mapping) or _holds_tensors(value):
                if id(value) in open_now:
                    raise InvalidArgumentError(
                        f"{name} is a {type(value).__name__} that contains itself: register what is in it once"
                    )
                open_now.add(id(value))
                items = value.items() if isinstance(value, Mapping) else enumerate(value)
                levels.append(_Level(value, f"{name}.", keys, iter(items)))
                break
            else:
                skipped.append(name)
        else:
            open_now.remove(id(levels.pop().container))


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(is_tensor(each) or has_layout(each) for each in value)
