"""Replicas that ranks of one job register with disjoint meshes of their own: receivers take a part from each.

FSDP2 over tensor parallelism does so with modules that the parallel plan leaves out; so does a job whose ranks each
register a plain tensor. Nobody but the user keeps them equal, so they are compared before the first is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .. import _core
from .._errors import MismatchError
from .._tensors.location import Location
from .mapping import Piece

SHOWN = 5  # tensors in an error
Digests = Mapping[str, tuple[str, str]]


class Replicas(NamedTuple):
    """What a rank has reported of its replicas."""

    digests: Digests
    membership: int  # of the job that was told


def digests(pieces: Mapping[str, Piece], rank: int, world: int) -> dict[str, tuple[str, str]]:
    """By name, for tensors that other meshes may hold, too: which part it is, and its digest."""
    found = {}
    for name, piece in pieces.items():
        at = piece.location
        layout = at.layout
        if layout is None or len(layout.mesh.ranks) >= world or not at.address:
            continue
        if any(isinstance(each, _core.Partial) for each in layout.placements):
            continue  # terms of separate sums
        part = f"{layout.placements} {layout.mesh.shape} {layout.mesh.coordinate(rank)}"
        found[name] = (part, _digest(at))
    return found


def _digest(at: Location) -> str:
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
    more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    raise MismatchError(
        f"replicas of {len(differing)} tensors differ: {', '.join(shown)}{more}. Each of these ranks registers them as "
        "a whole tensor, and receivers would take parts from each: make them equal before the first send, or leave "
        "them out (ignore=)"
    )


def _listed(found: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(f"ranks {', '.join(map(str, ranks))}: {digest[:8]}" for digest, ranks in found.items())
