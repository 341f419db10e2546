"""Replicas: parts that several ranks of one job hold. Receivers take a share of such a part from each of them.

Some lie in one mesh, along an axis that replicates (`Replicate`, HSDP, data parallelism of ETP); others in disjoint
meshes, such as plain tensors that each rank registers, and modules that a parallel plan leaves out under FSDP2 over
tensor parallelism. Nobody but the user keeps them equal, so they are compared before the first is sent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from .. import _core
from .._arguments import choice, pattern
from .._errors import InvalidArgumentError, MismatchError
from .._tensors.location import Location
from .mapping import Piece

SHOWN = 5  # tensors in an error
Digests = Mapping[str, tuple[str, str]]

# Replicas that are not compared, by names on the bus: regular expressions that match a whole name. "first": those of
# the lowest ranks are sent, and the others dropped.
AllowedReplicas: TypeAlias = Mapping[str, Literal["first"]]


class Replicas(NamedTuple):
    """What a rank has reported of its replicas."""

    digests: Digests
    membership: int  # of the job that was told


def compile_allowed(given: AllowedReplicas | None) -> Callable[[str], bool]:
    """Returns a predicate of names on the bus. Raises InvalidArgumentError."""
    if given is None:
        return lambda name: False
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"replicas {given!r}: give {{regular expression of names: 'first'}}")
    for key, value in given.items():
        choice(f"replicas: {key!r} becomes", value, ["first"])
    patterns = [pattern("replicas: key", key) for key in given]
    return lambda name: any(known.fullmatch(name) for known in patterns)


def first_of(layout: _core.Layout, others: Iterable[_core.Layout]) -> _core.Layout:
    """The layout, among those that the ranks of a job have of a tensor, of the lowest rank, without the replicas inside
    its mesh."""
    if not _has_terms(layout):  # other meshes have terms of separate sums
        layout = min([layout, *others], key=lambda other: min(other.mesh.ranks))
    mesh, placements = layout.mesh, layout.placements
    kept = [axis for axis, placement in enumerate(placements) if not isinstance(placement, _core.Replicate)]
    ranks = [
        rank
        for rank in mesh.ranks
        if all(at == 0 or axis in kept for axis, at in enumerate(mesh.coordinate(rank) or ()))
    ]
    if not kept:
        return _core.Layout(_core.Mesh([1], ranks=ranks), [_core.Replicate()])
    names = [mesh.names[axis] for axis in kept]
    return _core.Layout(
        _core.Mesh([mesh.shape[axis] for axis in kept], names, ranks), [placements[axis] for axis in kept]
    )


def digests(
    pieces: Mapping[str, Piece], rank: int, world: int, allowed: Callable[[str], bool]
) -> dict[str, tuple[str, str]]:
    """Returns, by name, for tensors of which other ranks may hold the same part: which part it is, and its digest.
    Those that may differ are left out."""
    found = {}
    for name, piece in pieces.items():
        layout = piece.location.layout
        if layout is None or not piece.location.address or allowed(piece.source):
            continue
        replicates = bool(_axes(layout, rank, replicated=True))
        if (replicates or len(layout.mesh.ranks) < world) and (part := _part(layout, rank, replicates)):
            found[name] = (part, _digest(piece.location))
    return found


def _part(layout: _core.Layout, rank: int, replicates: bool) -> str:
    """The place of a rank's part in the whole: equal texts are equal parts. Empty if it has no replicas."""
    cuts = ", ".join(f"{placement} {at} of {size}" for size, placement, at in _axes(layout, rank, replicated=False))
    if _has_terms(layout):
        return f"{cuts} over {layout.mesh.ranks}" if replicates else ""  # other meshes have terms of separate sums
    return cuts or "all"


def _has_terms(layout: _core.Layout) -> bool:
    return any(isinstance(placement, _core.Partial) for placement in layout.placements)


def _axes(layout: _core.Layout, rank: int, *, replicated: bool) -> list[tuple[int, Any, int]]:
    """(size, placement, coordinate of the rank) of the axes of its mesh that replicate, or of those that do not. An
    axis of size 1 does neither, unless it has terms of a sum."""
    coordinate = layout.mesh.coordinate(rank)
    if coordinate is None:
        return []
    axes = zip(layout.mesh.shape, layout.placements, coordinate, strict=True)
    return [
        (size, placement, at)
        for size, placement, at in axes
        if isinstance(placement, _core.Replicate) == replicated and (size > 1 or isinstance(placement, _core.Partial))
    ]


def _digest(at: Location) -> str:
    return _local_digest(at)[:16]  # digits of 32: no accident makes them equal, and all ranks read those of all


def _local_digest(at: Location) -> str:
    if at.quantised is None:
        return _core.local_digest(at.address, at.dtype, at.shape, at.strides)
    format, planes = at.quantised
    *stack, rows, columns = at.shape
    size, _ = _core.QuantSpec(format, "16x16").places(planes, math.prod(stack), rows, columns)
    return _core.local_digest(at.address, "u8", (size,), (1,))


def compare(told: Sequence[Digests]) -> None:
    """Raises MismatchError, with tensors and ranks, unless the same parts have the same digest on every rank."""
    ranks: dict[tuple[str, str], dict[str, list[int]]] = {}
    for rank, of_rank in enumerate(told):
        for name, (part, digest) in of_rank.items():
            ranks.setdefault((name, part), {}).setdefault(digest, []).append(rank)
    differing = {name: found for (name, _), found in ranks.items() if len(found) > 1}
    if not differing:
        return
    shown = [f"{name} ({_listed(found)})" for name, found in list(differing.items())[:SHOWN]]
    first = next(iter(differing))
    more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    raise MismatchError(
        f"replicas of {len(differing)} tensors differ: {', '.join(shown)}{more}. These ranks register the same "
        "part of a tensor, of which receivers would take a share from each: make them equal before the first send, "
        f"leave them out (ignore=), or have those of the lowest rank sent: replicas={{{re.escape(first)!r}: 'first'}}"
    )


def _listed(found: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(f"ranks {', '.join(map(str, ranks))}: {digest[:8]}" for digest, ranks in found.items())
