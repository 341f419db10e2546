"""What a batch has registered: sources by name, as they were then, and what they have become since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from . import _core
from ._errors import Error, InvalidArgumentError
from ._tensors import Location, Source, walk


class Registration:
    """The tensors of one rank's batch."""

    def __init__(
        self,
        sources: dict[str, Source],
        skipped: list[str],
        rank: int,
        fallback: _core.Layout | None,
        missing_ok: bool,
    ) -> None:
        self._sources = sources
        self._skipped = skipped
        self._rank = rank
        self._fallback = fallback
        self._missing_ok = missing_ok
        self._locations = {name: source.locate() for name, source in sources.items()}
        self._shapes = {name: self._global_shape(name, location) for name, location in self._locations.items()}
        self._forget_memory()

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
        sources = dict(walk(tensors, skipped, keep))
        return Registration(sources, [name for name in skipped if keep(name)], rank, fallback, missing_ok)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sources)

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(self._skipped)

    def choose(self, manifest: Callable[[], Sequence[_core.ManifestEntry]]) -> None:
        """Leaves out what a receiver need not ask for: further names of one tensor, and, if missing_ok, what the sender
        has not."""
        if not self._missing_ok and not self._ties():
            return
        offered = {entry.name for entry in manifest()}
        dropped = {name for name in self._sources if name not in offered} if self._missing_ok else set()
        for tied in self._ties():
            known = [name for name in tied if name in offered]
            dropped.update(name for name in tied if name not in known and known)
        for name in sorted(dropped):
            del self._sources[name], self._locations[name], self._shapes[name]
            self._skipped.append(name)

    def specs(self, sends: bool) -> list[_core.TensorSpec]:
        """For the core."""
        if not sends:
            self.written()
        return [
            _core.TensorSpec(
                name, location.address, location.dtype, self._shapes[name], self._layout(location), location.strides
            )
            for name, location in self._locations.items()
        ]

    def locate(self) -> list[Any]:
        """What keeps the memory of all tensors where it is. Raises InvalidArgumentError for one that has changed."""
        held = []
        for name, source in self._sources.items():
            now = source.locate()
            then = self._locations[name]
            if now != then:
                raise InvalidArgumentError(f"tensor {name}: {_difference(then, now)} since it was registered")
            held.append(now.memory)
        return held

    def written(self) -> None:
        """Tells the tensors' libraries that the elements change."""
        for source in self._sources.values():
            source.written()

    def _global_shape(self, name: str, location: Location) -> tuple[int, ...]:
        layout = self._layout(location)
        if location.global_shape is not None:
            self._check_local_shape(name, location, layout, location.global_shape)
            return location.global_shape
        # Where nothing is sharded the local shape is the global one.
        shape = location.shape
        if layout.bind(shape).local_shape(shape, self._rank) == shape:
            return shape
        raise InvalidArgumentError(
            f"tensor {name}: its layout {layout} shards it, so that its global shape cannot be seen from its local one "
            f"{shape}: register (array, layout, global shape)"
        )

    def _check_local_shape(
        self, name: str, location: Location, layout: _core.Layout, global_shape: tuple[int, ...]
    ) -> None:
        """What the layout says is moved: it must be what is there."""
        try:
            said = layout.local_shape(global_shape, self._rank)
        except Error as error:
            raise type(error)(f"tensor {name}: {error}") from None
        if said == location.shape or (0 in said and 0 in location.shape):
            return
        raise InvalidArgumentError(
            f"tensor {name}: the local tensor has shape {location.shape}, but {layout} gives rank {self._rank} {said} "
            f"of {global_shape}: correct the layout or the global shape (FSDP2 cuts a dim over tensor parallelism "
            "otherwise than its placements say where it does not divide evenly)"
        )

    def _layout(self, location: Location) -> _core.Layout:
        if location.layout is not None:
            return location.layout
        if self._fallback is not None:
            return self._fallback
        # Held whole by each rank that registers it: a mesh of its own on each, hence replicas.
        return _core.Layout(_core.Mesh([1], ranks=[self._rank]), [_core.Replicate()])

    def _ties(self) -> list[list[str]]:
        """Names of one and the same memory."""
        groups: dict[Any, list[str]] = {}
        for name, location in self._locations.items():
            if location.address:
                groups.setdefault((location.address, location.shape, location.strides, location.dtype), []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def _forget_memory(self) -> None:
        self._locations = {name: replace(at, memory=None) for name, at in self._locations.items()}


def _difference(then: Location, now: Location) -> str:
    for what in ("dtype", "shape", "layout", "strides", "address"):
        before, after = getattr(then, what), getattr(now, what)
        if before != after:
            if what == "address":
                return "its memory has moved"
            return f"its {what} has changed from {before} to {after}"
    return "it has changed"
