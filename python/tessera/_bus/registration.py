"""The tensors that a batch has registered: sources by name, their places then and now."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _core
from .._arguments import text
from .._errors import Error, InvalidArgumentError, MismatchError
from .._tensors.location import Location, Source, refusal
from .._tensors.shapes import Shape, global_shape
from .._tensors.walk import Hold, walk
from .._tensors.watch import Watch
from .fused import Fused, fused_parts
from .mapping import Local, Map, Part, Piece, compile_map, mapped_names
from .patterns import Reported, report, require_matches
from .patterns import read as read_patterns
from .replicas import AllowedReplicas, Replicas, compare, compile_allowed, digests, first_of
from .slices import Entry, as_slices, entries, index_text
from .wire import Wire, compile_wire

LARGEST = 1 << 62  # of a dim; the core checks sums


class Held:
    """What one transfer keeps of a registration: the memory, its place, and the version counters to bump."""

    def __init__(self, memory: list[Any], watch: Watch | None, counted: list[Any], others: Sequence[Source]) -> None:
        """`counted` come from the watch."""
        self.memory = memory
        self._watch = watch
        self._counted = counted
        self._others = others

    def written(self) -> None:
        """Tells the tensors' libraries that the elements have changed, or are about to change."""
        if self._watch is not None:
            self._watch.written(self._counted)
        for source in self._others:
            source.written()


class Registration:
    """The tensors of one rank's batch: sources by local name, and their names on the bus."""

    def __init__(
        self,
        sources: Iterable[tuple[str, Source, Any]],
        skipped: Sequence[str],
        rank: int,
        fallback: _core.Layout | None,
        missing_ok: bool = False,
        names: Map | None = None,
        wire: Wire | None = None,
        replicas: AllowedReplicas | None = None,
    ) -> None:
        self._skipped = list(skipped)
        self._rank = rank
        self._missing_ok = missing_ok
        self._sources: dict[str, Source] = {}
        self._locations: dict[str, Location] = {}
        self._identities: dict[str, int] = {}  # of the objects: one that occurs twice is tied, even if it is empty
        self._parts: dict[str, dict[str, Part]] = {}  # by local tensor, by name in the batch
        self._pieces: dict[str, Piece] = {}  # by name in the batch
        self._layouts: dict[str, _core.Layout] = {}  # of local tensors, as agreed
        self._moved: dict[str, Location] = {}  # the new places of tensors that have moved
        self._replicas: list[Replicas] = []  # by rank
        self._gathered_ties: list[list[str]] = []  # on any rank of the job
        self._tied_to: dict[str, str] = {}  # a receiver's local tensors: the one that receives into the same memory
        self._watch: Watch | None = None
        self._unwatched: list[str] = []
        self._wire_of = compile_wire(wire)  # by name on the bus
        self._may_differ = compile_allowed(replicas)  # by name on the bus
        self._allowed = sorted(str(key) for key in replicas or ())
        self._offered = False  # whether it is to be sent
        self._patterns: Reported = {}
        parts_of = compile_map(names)
        taken: set[str] = set()
        own = self._own_layout()
        for name, source, tensor in sources:
            text("the name of a tensor,", name)
            if not (parts := parts_of(name, tensor)):
                continue
            at = source.locate()
            layout = at.layout or fallback or own
            if layout is own and any(part.layout is None for part in parts):
                _require_whole(name, tensor)
            self._identities[name] = id(tensor)
            self._sources[name], self._locations[name] = source, at._replace(layout=layout, memory=None)
            self._parts[name] = self._named(name, parts, taken)
            self._add(name, layout)

    @staticmethod
    def collect(
        tensors: Any,
        keep: Callable[[str], bool],
        rank: int,
        fallback: _core.Layout | None,
        missing_ok: bool,
        names: Map | None = None,
        wire: Wire | None = None,
        replicas: AllowedReplicas | None = None,
        hold: Hold = "strong",
    ) -> Registration:
        """Collects all of `tensors` whose name is kept. Raises InvalidArgumentError for what cannot be moved."""
        skipped: list[str] = []
        sources = list(walk(tensors, skipped, keep, hold))
        left_out = [name for name in skipped if keep(name)]
        return Registration(sources, left_out, rank, fallback, missing_ok, names, wire, replicas)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the batch: those on the bus; "NAME in TENSOR" and "NAME[SLICE]" for a name that is taken again, or
        in part."""
        return tuple(self._pieces)

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(self._skipped)

    def name_patterns(self, names: Collection[str], options: Mapping[str, Any]) -> None:
        """Keeps the patterns of `options` (only, ignore, map, wire, replicas), which agree() compares. `names` are all
        local ones that the user gave, also those left out."""
        on_bus = dict.fromkeys(part.name for parts in self._parts.values() for part in parts.values())
        left_out = [name for name in names if name not in self._sources]
        renamed = mapped_names(options["map"], left_out)
        self._patterns = {
            **report("only", options["only"], names),
            **report("ignore", options["ignore"], names),
            **report("map", options["map"], names),
        }
        if renamed is not None:
            for what in ("wire", "replicas"):
                self._patterns |= report(what, options[what], on_bus, {*left_out, *renamed})

    def require_matches(self) -> None:
        """Raises InvalidArgumentError for a pattern that matches no name of this rank, of a job that has no other."""
        require_matches([self._patterns])

    # --- before it is registered with the other job

    def to_gather(self, world: int = 0, membership: int = 0) -> str:
        """What the other ranks of the job must know: local shapes of tensors without a given global shape, how strided
        placements are read here, which names share memory, which patterns match a name and, for a job of `world` ranks
        that is about to send, digests of replicas. `membership` is the pair's: the job's processes that are told."""
        shapes = {
            name: [str(piece.location.layout), piece.location.shape]
            for name, piece in self._pieces.items()
            if piece.shape is None
        }
        readings = {name: str(at.layout) for name, at in self._locations.items() if _may_be_read_otherwise(at)}
        replicas = digests(self._pieces, self._rank, world, self._may_differ) if world else {}
        firsts = {
            name: str(piece.location.layout) for name, piece in self._pieces.items() if self._is_first_sent(piece)
        }
        told = {"shapes": shapes, "readings": readings, "ties": self._ties_here(), "replicas": replicas}
        told |= {"patterns": self._patterns, "firsts": firsts, "allowed": self._allowed}
        return json.dumps({**told, "membership": membership})

    def agree(self, gathered: Sequence[str]) -> None:
        """Determines every layout and global shape from what the job's ranks returned from to_gather(), by rank."""
        shapes: dict[tuple[str, str], dict[int, Shape]] = {}
        readings: dict[tuple[str, str], int] = {}
        self._replicas, self._gathered_ties = [], []
        ranks = [_read(rank, told) for rank, told in enumerate(gathered)]
        require_matches([of_rank.patterns for of_rank in ranks])
        for rank, of_rank in enumerate(ranks):
            self._replicas.append(of_rank.replicas)
            self._gathered_ties += of_rank.ties
            for name, (layout, shape) in of_rank.shapes.items():
                shapes.setdefault((name, layout), {})[rank] = tuple(shape)
            for name, layout in of_rank.readings.items():
                readings.setdefault((name, layout), rank)
        for name, at in self._locations.items():
            other = at.other_layout
            if other is not None and (name, str(other)) in readings:
                self._read_otherwise(name, other, readings[name, str(other)])
        for name, piece in self._pieces.items():
            own = piece.location.layout
            if piece.shape is None and own is not None:
                found = global_shape(name, own, shapes[name, str(own)])
                self._pieces[name] = piece._replace(shape=found)
        self._send_first(ranks)

    def replicas(self, world: int, membership: int) -> str:
        """Likewise, only the digests, after the registration."""
        return json.dumps(
            {"replicas": digests(self._pieces, self._rank, world, self._may_differ), "membership": membership}
        )

    def hear_replicas(self, gathered: Sequence[str]) -> None:
        """Takes what the job's ranks returned from replicas(), by rank."""
        self._replicas = [_read_replicas(rank, text) for rank, text in enumerate(gathered)]

    def compare_replicas(self, membership: int) -> None:
        """Raises MismatchError if the digests differ that ranks have reported for this membership of the job. REQUIRES:
        agree() has been called. (A rank that has come back reads what the others told the process before it: those have
        sent other versions since.)"""
        compare([told.digests if told.membership == membership else {} for told in self._replicas])

    def offer(self) -> None:
        """Marks it as to be sent. Raises InvalidArgumentError for what only a receiver may do: take one name twice, or
        a slice of it."""
        self._offered = True
        offered: dict[str, Piece] = {}
        for piece in self._pieces.values():
            if piece.sliced is not None:
                raise InvalidArgumentError(
                    f"part {piece.source} of tensor {piece.tensor}: source= says which part a receiver takes; "
                    "a sender says with local= or whole= which part it offers"
                )
            other = offered.get(piece.source)
            if other is None or not self._holds(other):
                offered[piece.source] = piece
            elif self._holds(piece):
                raise InvalidArgumentError(
                    f"tensor {piece.source} of the bus is in two tensors here, {other.tensor} and {piece.tensor}: a "
                    "sender offers a name once; map one of them to another name, or to None"
                )
        self._pieces = offered
        self._parts = {tensor: {part.name: part for part in parts.values()} for tensor, parts in self._parts.items()}

    @property
    def wants_manifest(self) -> bool:
        """For a receiver: whether the tensors that it takes depend on those offered."""
        sliced = any(piece.sliced is not None for piece in self._pieces.values())
        return self._missing_ok or sliced or bool(self._ties())

    def choose(self, offered: Mapping[str, Shape]) -> None:
        """Leaves out what a receiver need not ask for: further names of one tensor and, with missing_ok, what the
        sender lacks. Resolves slices against the `offered` shapes."""
        absent = {name for name, piece in self._pieces.items() if piece.source not in offered}
        dropped = set(absent) if self._missing_ok else set()
        pieces, ties = dict(self._pieces), self._ties()
        for names in ties:
            if not absent.issuperset(names):
                dropped |= absent.intersection(names)
        for name, piece in self._pieces.items():
            if piece.sliced is not None and name not in absent:
                self._pieces[name] = piece._replace(taken=_taken(piece, offered[piece.source]))
        for name in sorted(dropped):
            del self._pieces[name]
            self._skipped.append(name)
        self._watch, self._unwatched = None, []
        used = {piece.tensor for piece in self._pieces.values()}
        for names in ties:  # what is received under another name is written, too
            kept = next((pieces[name].tensor for name in names if name in self._pieces), None)
            if kept is not None:
                self._tied_to |= {pieces[name].tensor: kept for name in names if pieces[name].tensor not in used}
        used |= self._tied_to.keys()
        self._sources = {name: source for name, source in self._sources.items() if name in used}
        self._locations = {name: self._locations[name] for name in self._sources}

    def specs(self) -> list[_core.TensorSpec]:
        """Specs for the core. REQUIRES: agree() has been called."""
        return self._specs(self._pieces)

    # --- at every transfer

    def locate(self) -> Held:
        """Locates all tensors: `moved` then lists those that have moved. Raises InvalidArgumentError for a name that
        now has another kind of tensor."""
        self._moved = {}
        watched = self._watch.hold() if self._watch is not None else None
        if watched is not None:
            memory, counted = watched
            memory += [self._locate(name) for name in self._unwatched]
            return Held(memory, self._watch, counted, [self._sources[name] for name in self._unwatched])
        memory = [self._locate(name) for name in self._sources]
        for name, other in self._tied_to.items():
            self._require_tied(name, other)
        self._watch_them()
        return Held(memory, None, [], list(self._sources.values()))

    @property
    def has_moved(self) -> bool:
        return bool(self._moved)

    @property
    def moved(self) -> list[str]:
        """The tensors that have moved since specs(), and why."""
        return [_changed(name, self._locations[name], now) for name, now in self._moved.items()]

    def relocated(self) -> list[_core.TensorSpec]:
        """specs() for the present places."""
        return self._specs(self._moved_pieces())

    def settle(self) -> None:
        """Makes the present places those of specs()."""
        self._pieces = self._moved_pieces()
        self._locations.update(self._moved)
        self._moved = {}

    def require_writeable(self) -> None:
        for source in self._sources.values():
            source.require_writeable()

    def begin_write(self) -> None:
        """Refuses what may not be written now. REQUIRES: locate() has just been called."""
        for name in self._sources if self._watch is None else self._unwatched:
            self._sources[name].begin_write()

    # --- private

    @staticmethod
    def _named(tensor: str, parts: Sequence[Part], taken: set[str]) -> dict[str, Part]:
        """The parts, each with a unique name in the batch: if another has the same name, the tensor's name is added.
        (All ranks must find the same names, so parts that a rank does not hold have names, too.)"""
        named: dict[str, Part] = {}
        for number, part in enumerate(parts):
            name = source = _source(part)
            if name in taken:
                name = f"{source} in {tensor}"
                if name in taken:
                    name = f"{source} in {tensor}#{number}"
            taken.add(name)
            named[name] = part
        return named

    def _add(self, tensor: str, layout: _core.Layout) -> None:
        """Adds the pieces of the local tensor."""
        at = self._locations[tensor]
        self._layouts[tensor] = layout
        if at.global_shape is not None:
            at.check(tensor, layout, at.global_shape, self._rank)
        local = Local(tensor, at, layout, self._rank)
        for name, part in self._parts[tensor].items():
            if name in self._pieces:  # for a sender, which leaves out what this rank does not hold
                continue
            piece = local.piece(part)
            first = self._pieces.get(_source(part))
            if piece is not None and not (first is not None and self._are_tied(first, piece)):
                self._pieces[name] = piece._replace(source=part.name, sliced=part.source)

    def _is_first_sent(self, piece: Piece) -> bool:
        return self._offered and self._holds(piece) and self._may_differ(piece.source)

    def _send_first(self, ranks: Sequence[_Gathered]) -> None:
        """For a sender: keeps those replicas that may differ which the first ranks hold, and drops the others."""
        for rank, of_rank in enumerate(ranks):
            if of_rank.allowed != ranks[0].allowed:
                raise MismatchError(
                    f"ranks allow other replicas to differ: replicas= has {ranks[0].allowed} on rank 0 and "
                    f"{of_rank.allowed} on rank {rank}: give all ranks the same"
                )
        for name, piece in list(self._pieces.items()):
            layout = piece.location.layout
            if layout is None or not self._is_first_sent(piece):
                continue
            others = {of_rank.firsts[name] for of_rank in ranks if name in of_rank.firsts}
            first = first_of(layout, map(_core.Layout, sorted(others)))
            if self._rank in first.mesh:
                self._pieces[name] = piece._replace(location=piece.location._replace(layout=first))
            else:
                del self._pieces[name]
                self._skipped.append(name)

    def _holds(self, piece: Piece) -> bool:
        layout = piece.location.layout
        return layout is not None and self._rank in layout.mesh

    def _are_tied(self, a: Piece, b: Piece) -> bool:
        if a.location != b.location or a.shape != b.shape:
            return False
        return bool(a.location.address) or self._identities[a.tensor] == self._identities[b.tensor]

    def _read_otherwise(self, tensor: str, layout: _core.Layout, rank: int) -> None:
        """Reads it as `rank` does, whose local shape leaves no choice."""
        self._pieces = {name: piece for name, piece in self._pieces.items() if piece.tensor != tensor}
        try:
            self._add(tensor, layout)
        except InvalidArgumentError as error:
            raise MismatchError(
                f"{error} (rank {rank} holds what {layout} gives it, and no other layout does)"
            ) from None

    def _locate(self, name: str) -> Any:
        now = self._sources[name].locate()
        then = self._locations[name]
        if not now.is_as(then):
            if now.layout is None:
                now = now._replace(layout=then.layout)
            if now._replace(address=then.address, strides=then.strides) != then:
                raise InvalidArgumentError(f"{_changed(name, then, now)}: close the batch and register it again")
            self._moved[name] = now._replace(memory=None)
        return now.memory

    def _require_tied(self, name: str, other: str) -> None:
        now, there = (self._moved.get(each, self._locations[each]) for each in (name, other))
        if now.address != there.address:
            raise InvalidArgumentError(
                f"tensor {name}: it is tied to {other} no more, as it was when it was registered: close the batch and "
                "register it again"
            )

    def _moved_pieces(self) -> dict[str, Piece]:
        pieces = dict(self._pieces)
        for tensor, at in self._moved.items():
            local = Local(tensor, at, self._layouts[tensor], self._rank)
            for name, part in self._parts[tensor].items():
                piece, now = pieces.get(name), local.piece(part)
                if piece is not None and now is not None:
                    there = piece.location._replace(address=now.location.address, strides=now.location.strides)
                    pieces[name] = piece._replace(location=there)
        return pieces

    def _specs(self, pieces: Mapping[str, Piece]) -> list[_core.TensorSpec]:
        fused: dict[str, Fused] = {}
        for tensor, parts in self._parts.items():
            if len(parts) > 1 and not self._offered:
                fused |= fused_parts(parts, self._locations[tensor], self._layouts[tensor])
        return [
            _spec(name, piece, self._wire_of(piece.source), fused.get(name), self._offered)
            for name, piece in pieces.items()
        ]

    def _watch_them(self) -> None:
        """Called when they have just been located."""
        torchs = {name: source.current for name, source in self._sources.items() if source.current is not None}
        watch = Watch.over(list(torchs.values())) if torchs and not self._moved else None
        self._watch = watch if watch is not None and watch.hold() is not None else None
        self._unwatched = [name for name in self._sources if self._watch is None or name not in torchs]

    def _own_layout(self) -> _core.Layout:
        """Each rank that registers it holds all of it: a separate mesh on each, hence replicas."""
        return _core.Layout(_core.Mesh([1], ranks=[self._rank]), [_core.Replicate()])

    def _ties_here(self) -> list[list[str]]:
        """Names of the same memory on this rank; for empty tensors, of the same object."""
        groups: dict[Any, list[str]] = {}
        for name, piece in self._pieces.items():
            at = piece.location
            if at.address:
                groups.setdefault((at.address, at.shape, at.strides, at.dtype), []).append(name)
            elif len(self._parts[piece.tensor]) == 1:
                groups.setdefault(self._identities[piece.tensor], []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def _ties(self) -> list[list[str]]:
        """Likewise; for names that are empty here, also the ties that another rank has reported: that rank has seen the
        memory."""
        ties = self._ties_here()
        for names in self._gathered_ties:
            empty = [name for name in names if name in self._pieces and not self._pieces[name].location.address]
            if len(empty) > 1 and empty not in ties:
                ties.append(empty)
        return ties


def _require_whole(name: str, tensor: Any) -> None:
    """Refuses a part that tensor parallelism has made, by the attributes that Megatron gives to parameters."""
    if getattr(tensor, "tensor_model_parallel", False):
        raise refusal(
            name,
            f"it is this rank's part of a tensor that tensor parallelism cuts along dim "
            f"{getattr(tensor, 'partition_dim', None)}, and nothing says which part: register (tensor, layout, global "
            "shape)",
        )


def _source(part: Part) -> str:
    """Describes the source that fills it."""
    return part.name if part.source is None else f"{part.name}[{index_text(part.source)}]"


def _taken(piece: Piece, shape: Shape) -> tuple[Entry, ...]:
    try:
        return entries(piece.sliced, shape)
    except Error as error:
        raise type(error)(f"part {piece.source} of tensor {piece.tensor}: source=: {error}") from None


def _may_be_read_otherwise(at: Location) -> bool:
    placements = at.layout.placements if at.layout is not None else []
    return at.other_layout is not None or any(isinstance(each, _core.StridedShard) for each in placements)


@dataclass(frozen=True)
class _Gathered:
    """What a rank of the job returned from to_gather()."""

    shapes: Mapping[str, tuple[str, list[int]]]
    readings: Mapping[str, str]
    ties: list[list[str]]
    replicas: Replicas
    patterns: Reported
    firsts: Mapping[str, str]  # layouts of tensors whose replicas may differ
    allowed: list[str]


def _read(rank: int, text: str) -> _Gathered:
    """Reads untrusted input."""
    try:
        told = json.loads(text)
        shapes, readings, ties, patterns = (
            told["shapes"],
            told["readings"],
            told["ties"],
            read_patterns(told["patterns"]),
        )
        if not (isinstance(ties, list) and all(isinstance(names, list) for names in ties)):
            raise TypeError
        if not all(isinstance(name, str) for names in ties for name in names):
            raise TypeError
        for layout, shape in shapes.values():
            if not (isinstance(layout, str) and all(isinstance(size, int) and 0 <= size < LARGEST for size in shape)):
                raise TypeError
        if not all(isinstance(layout, str) for layout in readings.values()):
            raise TypeError
        firsts, allowed = told["firsts"], told["allowed"]
        if not all(isinstance(layout, str) for layout in firsts.values()) or not isinstance(allowed, list):
            raise TypeError
        return _Gathered(shapes, readings, ties, _replicas_of(told), patterns, firsts, allowed)
    except _JUNK:
        raise _refused(rank, text) from None


def _read_replicas(rank: int, text: str) -> Replicas:
    """Reads untrusted input."""
    try:
        return _replicas_of(json.loads(text))
    except _JUNK:
        raise _refused(rank, text) from None


def _replicas_of(told: Any) -> Replicas:
    replicas, membership = told["replicas"], told["membership"]
    if not isinstance(membership, int):
        raise TypeError
    if not all(isinstance(part, str) and isinstance(digest, str) for part, digest in replicas.values()):
        raise TypeError
    return Replicas(replicas, membership)


_JUNK = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)


def _refused(rank: int, text: str) -> MismatchError:
    return MismatchError(f"rank {rank} published what no Tessera of this release writes: {text[:200]!r}")


def _spec(name: str, piece: Piece, wire: str | None, fused: Fused | None, offered: bool) -> _core.TensorSpec:
    at = piece.location
    format, planes = at.quantised or (wire, ())
    if wire not in (None, format):
        raise InvalidArgumentError(
            f"tensor {piece.tensor}: wire= asks for {wire}, and it is a QuantizedTensor of {format}: leave it out"
        )
    source = "" if piece.source == name else piece.source
    slices = as_slices(piece.taken)
    return _core.TensorSpec(
        name,
        at.address,
        at.dtype,
        piece.shape or (),
        at.layout,
        at.strides,
        source,
        slices,
        format,
        planes,
        fused,
        at.copy if offered else None,
    )


def _changed(name: str, then: Location, now: Location) -> str:
    return f"tensor {name}: {_difference(then, now)} since it was registered"


def _difference(then: Location, now: Location) -> str:
    for what in ("dtype", "shape", "layout", "global_shape", "strides", "address"):
        before, after = getattr(then, what), getattr(now, what)
        if before != after:
            said = what.replace("_", " ")
            return "its memory has moved" if what == "address" else f"its {said} has changed from {before} to {after}"
    return "it has changed"
