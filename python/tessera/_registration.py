"""What a batch has registered: sources by name, as they were then, and what they have become since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from . import _core
from ._errors import InvalidArgumentError, MismatchError, UnimplementedError
from ._mapping import Local, Map, Part, Piece, check_shape, compile_map
from ._tensors import Location, Source, walk


class Registration:
    """The tensors of one rank's batch: sources by local name, and what of them has which name on the bus."""

    def __init__(
        self,
        sources: dict[str, Source],
        parts: dict[str, list[Part]],
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
        self._pieces: dict[str, Piece] = {}
        for name, location in self._locations.items():
            local = Local(name, location, self._layout(location), rank)
            for part in parts[name]:
                self._add(part.name, local.piece(part))
        self._forget_memory()

    @staticmethod
    def collect(
        tensors: Any,
        keep: Callable[[str], bool],
        rank: int,
        fallback: _core.Layout | None,
        missing_ok: bool,
        names: Map | None = None,
    ) -> Registration:
        """Everything of `tensors` whose name is to be kept. Raises InvalidArgumentError for what cannot be moved."""
        skipped: list[str] = []
        sources: dict[str, Source] = {}
        parts: dict[str, list[Part]] = {}
        parts_of = compile_map(names)
        for name, source, tensor in walk(tensors, skipped, keep):
            if found := parts_of(name, tensor):
                sources[name], parts[name] = source, found
        made = Registration(sources, parts, [name for name in skipped if keep(name)], rank, fallback, missing_ok)
        if names is None:
            made._require_shapes()
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """On the bus."""
        return tuple(self._pieces)

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(self._skipped)

    def choose(self, manifest: Callable[[], Sequence[_core.ManifestEntry]]) -> None:
        """Of a receiver: leaves out what it need not ask for: further names of one tensor, and, if missing_ok, what the
        sender has not. Takes from the sender the global shapes that cannot be seen here."""
        if not self._missing_ok and not self._ties() and not any(self._shapeless()):
            return
        offered = {entry.name: entry.shape for entry in manifest()}
        dropped = {name for name in self._pieces if name not in offered} if self._missing_ok else set()
        for tied in self._ties():
            known = [name for name in tied if name in offered]
            dropped.update(name for name in tied if name not in known and known)
        for name in sorted(dropped):
            del self._pieces[name]
            self._skipped.append(name)
        self._forget_unused()
        unknown = []
        for name, piece in self._shapeless():
            if name not in offered:
                unknown.append(name)
                continue
            try:
                check_shape(piece.location, offered[name], self._rank)
            except InvalidArgumentError as error:
                raise MismatchError(f"part {name} of tensor {piece.tensor}: {error}") from None
            self._pieces[name] = replace(piece, shape=offered[name])
        if unknown:
            raise MismatchError(f"the other job does not offer {len(unknown)} tensors of the map: {_listed(unknown)}")

    def specs(self, sends: bool) -> list[_core.TensorSpec]:
        """For the core."""
        self._require_shapes()
        if not sends:
            self.written()
        return [
            _core.TensorSpec(
                name,
                piece.location.address,
                piece.location.dtype,
                piece.shape or (),
                piece.location.layout,
                piece.location.strides,
            )
            for name, piece in self._pieces.items()
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

    def _add(self, name: str, piece: Piece | None) -> None:
        if piece is None:
            return
        other = self._pieces.get(name)
        if other is None:
            self._pieces[name] = piece
        elif other.location != piece.location or other.shape != piece.shape:
            raise UnimplementedError(
                f"tensor {name} of the bus is in two tensors here, {other.tensor} and {piece.tensor}: a batch takes a "
                "name once yet. Let the other job send it under a second name, too, with a map that gives it both: "
                f"{{{name!r}: [{name!r}, {piece.tensor!r}]}}; or register {piece.tensor} in another batch"
            )

    def _require_shapes(self) -> None:
        for name, piece in self._shapeless():
            where = name if name == piece.tensor else f"{name} (of {piece.tensor})"
            raise InvalidArgumentError(
                f"tensor {where}: its layout {piece.location.layout} shards it, so that its global shape cannot be "
                f"seen from its local one {piece.location.shape}: register (array, layout, global shape), or a Part "
                "with shape="
            )

    def _shapeless(self) -> Iterator[tuple[str, Piece]]:
        return ((name, piece) for name, piece in list(self._pieces.items()) if piece.shape is None)

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
        for name, piece in self._pieces.items():
            at = piece.location
            if at.address:
                groups.setdefault((at.address, at.shape, at.strides, at.dtype), []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def _forget_unused(self) -> None:
        """Sources of which no part is left."""
        used = {piece.tensor for piece in self._pieces.values()}
        self._sources = {name: source for name, source in self._sources.items() if name in used}
        self._locations = {name: self._locations[name] for name in self._sources}

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


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
