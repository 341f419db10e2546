"""What a batch has registered: sources by name, as they were then, and what they have become since."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from . import _core
from ._errors import InvalidArgumentError, MismatchError
from ._shapes import Shape, global_shape
from ._tensors import Location, Source, walk


class Registration:
    """The tensors of one rank's batch."""

    def __init__(
        self,
        sources: Iterable[tuple[str, Source]],
        skipped: Sequence[str],
        rank: int,
        fallback: _core.Layout | None,
        missing_ok: bool = False,
    ) -> None:
        self._sources = dict(sources)
        self._skipped = list(skipped)
        self._rank = rank
        self._missing_ok = missing_ok
        self._locations: dict[str, Location] = {}
        for name, source in self._sources.items():
            at = source.locate()
            layout = at.layout or fallback or self._own_layout()
            if at.global_shape is not None:
                at.check(name, layout, at.global_shape, rank)
            self._locations[name] = replace(at, layout=layout, memory=None)
        self._fallback = fallback
        self._shapes: dict[str, Shape] = {}

    @staticmethod
    def collect(
        tensors: Any,
        keep: Callable[[str], bool],
        rank: int,
        fallback: _core.Layout | None,
        missing_ok: bool,
    ) -> Registration:
        """Everything of `tensors` whose name is to be kept. Raises InvalidArgumentError for what cannot be moved."""
        skipped: list[str] = []
        sources = list(walk(tensors, skipped, keep))
        return Registration(sources, [name for name in skipped if keep(name)], rank, fallback, missing_ok)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sources)

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(self._skipped)

    # --- before it is registered with the other job

    def said(self) -> str:
        """What the other ranks of the job must know: local shapes of tensors whose global one nobody has said."""
        return json.dumps(
            {
                name: [str(at.layout), at.shape]
                for name, at in self._locations.items()
                if at.global_shape is None and self._is_sharded(at)
            }
        )

    def agree(self, said: Sequence[str]) -> None:
        """Finds every global shape, out of what the job's ranks have said(), by rank."""
        shapes: dict[tuple[str, str], dict[int, Shape]] = {}
        for rank, text in enumerate(said):
            for name, (layout, shape) in _read(rank, text).items():
                shapes.setdefault((name, layout), {})[rank] = tuple(shape)
        for name, at in self._locations.items():
            if at.global_shape is not None:
                self._shapes[name] = at.global_shape
            elif self._is_sharded(at):
                self._shapes[name] = global_shape(name, _layout(at), shapes[name, str(at.layout)])
            else:
                self._shapes[name] = at.shape

    @property
    def wants_manifest(self) -> bool:
        """Of a receiver: whether what it takes depends on what is offered."""
        return self._missing_ok or bool(self._ties())

    def choose(self, offered: Set[str]) -> None:
        """Leaves out what a receiver need not ask for: further names of one tensor, and, if missing_ok, what the sender
        has not."""
        dropped = self._sources.keys() - offered if self._missing_ok else set()
        for tied in self._ties():
            if not offered.isdisjoint(tied):
                dropped |= {name for name in tied if name not in offered}
        for name in sorted(dropped):
            del self._sources[name], self._locations[name]
            self._skipped.append(name)

    def specs(self) -> list[_core.TensorSpec]:
        """For the core. REQUIRES: agree() has been called."""
        return [
            _core.TensorSpec(name, at.address, at.dtype, self._shapes[name], at.layout, at.strides)
            for name, at in self._locations.items()
        ]

    # --- at every transfer

    def locate(self) -> list[Any]:
        """What keeps the memory of all tensors where it is. Raises InvalidArgumentError for one that has changed."""
        held = []
        for name, source in self._sources.items():
            now = source.locate()
            then = self._locations[name]
            if now.layout is None:
                now = replace(now, layout=then.layout)
            if now != then:
                raise InvalidArgumentError(f"tensor {name}: {_difference(then, now)} since it was registered")
            held.append(now.memory)
        return held

    def written(self) -> None:
        """Tells the tensors' libraries that the elements change."""
        for source in self._sources.values():
            source.written()

    # --- inside

    def _own_layout(self) -> _core.Layout:
        """Held whole by each rank that registers it: a mesh of its own on each, hence replicas."""
        return _core.Layout(_core.Mesh([1], ranks=[self._rank]), [_core.Replicate()])

    def _is_sharded(self, at: Location) -> bool:
        return any(hasattr(placement, "dim") for placement in _layout(at).placements)

    def _ties(self) -> list[list[str]]:
        """Names of one and the same memory."""
        groups: dict[Any, list[str]] = {}
        for name, at in self._locations.items():
            if at.address:
                groups.setdefault((at.address, at.shape, at.strides, at.dtype), []).append(name)
        return [names for names in groups.values() if len(names) > 1]


def _layout(at: Location) -> _core.Layout:
    if at.layout is None:
        raise AssertionError("a registered tensor has a layout")
    return at.layout


def _read(rank: int, text: str) -> Mapping[str, tuple[str, list[int]]]:
    """What another rank has said: untrusted."""
    try:
        said = json.loads(text)
        for name, (layout, shape) in said.items():
            if not (isinstance(name, str) and isinstance(layout, str) and all(isinstance(size, int) for size in shape)):
                raise TypeError
    except (ValueError, TypeError, AttributeError):
        raise MismatchError(f"rank {rank} says what no Tessera of this release does: {text[:200]!r}") from None
    return said  # type: ignore[no-any-return]


def _difference(then: Location, now: Location) -> str:
    for what in ("dtype", "shape", "layout", "strides", "address"):
        before, after = getattr(then, what), getattr(now, what)
        if before != after:
            return "its memory has moved" if what == "address" else f"its {what} has changed from {before} to {after}"
    return "it has changed"
