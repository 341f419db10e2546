"""A local tensor must have the shape that its layout and global shape give its rank: the core sees only an address."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import tessera
from tessera._bus.registration import Registration
from tessera._tensors.location import Location


def collect(value: Any, rank: int = 0) -> Registration:
    return Registration.collect({"w": value}, keep=lambda name: True, rank=rank, fallback=None, missing_ok=False)


@pytest.mark.parametrize(
    ("local", "layout", "shape", "rank"),
    [
        ((2,), "1:R", (1 << 20,), 0),
        ((2, 4), "2:S0", (6, 4), 0),
        ((4, 2), "2:S0", (4, 4), 0),
        ((3, 2), "2:S1", (4, 4), 0),
        ((4,), "2:S0", (2, 4), 1),
        ((3, 3), "2:S0", (5, 3), 1),  # torch.chunk's halves of 5 are 3 and 2
        ((12,), "2:S0", (8, 3), 0),
        ((2, 4), "2@0,1:S0", (4, 4), 2),  # outside the mesh
    ],
)
def test_a_local_shape_that_its_layout_does_not_give_is_refused(
    local: tuple[int, ...], layout: str, shape: tuple[int, ...], rank: int
) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=r"tensor w: (its local shape|.* what it holds) is"):
        collect((np.zeros(local, np.float32), layout, shape), rank)


@pytest.mark.parametrize(
    ("local", "layout", "shape", "rank"),
    [
        ((2, 4), "2:S0", (4, 4), 1),
        ((1, 4), "2:S0", (3, 4), 1),
        ((0, 4), "4:S0", (3, 4), 3),
        ((0,), "4:S0", (3, 4), 3),  # how torch holds nothing
        ((0,), "2@0,1:S0", (4, 4), 2),
    ],
)
def test_one_that_it_gives_is_registered(
    local: tuple[int, ...], layout: str, shape: tuple[int, ...], rank: int
) -> None:
    registration = collect((np.zeros(local, np.float32), layout, shape), rank)
    registration.agree([registration.to_gather()])
    (spec,) = registration.specs()
    assert spec.shape == shape


def test_a_layout_that_does_not_fit_the_shape_is_refused_by_name() -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=r"^tensor w: .*S2"):
        collect((np.zeros((4, 3), np.float32), "2:S2", (8, 3)))


# --- torch's strided placements have two readings: all ranks take the same one

STRIDED, NESTED = tessera.Layout("3,2:S0*2,S0"), tessera.Layout("2,3@0,2,4,1,3,5:S0,S0")
ROWS = 13


class Strided:
    """A local tensor with STRIDED placements, whose rows are those of one of its readings."""

    current = None

    def __init__(self, rank: int, held: tessera.Layout) -> None:
        self.shape = held.local_shape((ROWS,), rank)
        fits = NESTED.local_shape((ROWS,), rank) == self.shape
        self.layouts = (NESTED, STRIDED) if fits else (STRIDED, None)
        self.rank = rank

    def locate(self) -> Location:
        first, second = self.layouts
        return Location(64, "f32", self.shape, (1,), first, (ROWS,), self.rank, second)

    def require_writeable(self) -> None: ...
    def written(self) -> None: ...


def registered(held: tessera.Layout) -> list[Registration]:
    return [Registration([("w", Strided(rank, held), None)], [], rank, None) for rank in range(6)]


@pytest.mark.parametrize("held", [STRIDED, NESTED])
def test_a_reading_that_one_rank_cannot_have_is_nobodys(held: tessera.Layout) -> None:
    ranks = registered(held)
    gathered = [rank.to_gather() for rank in ranks]
    assert len({json.loads(text)["readings"]["w"] for text in gathered}) == (2 if held is STRIDED else 1)
    for rank in ranks:
        rank.agree(gathered)
        assert [spec.layout for spec in rank.specs()] == [held]
        rank.locate()  # nothing has changed since


def test_ranks_that_have_no_reading_in_common_are_told() -> None:
    forced = [rank for rank in range(6) if Strided(rank, STRIDED).layouts[1] is None]
    nested = [rank for rank in range(6) if NESTED.local_shape((ROWS,), rank) != STRIDED.local_shape((ROWS,), rank)]
    one, other = Strided(forced[0], STRIDED), Strided(nested[0], NESTED)
    ranks = [Registration([("w", each, None)], [], each.rank, None) for each in (one, other)]
    with pytest.raises(tessera.MismatchError, match=re.escape(f"(rank 0 holds what {STRIDED} gives it, and no other")):
        ranks[1].agree([rank.to_gather() for rank in ranks])


TOLD: dict[str, Any] = {
    "shapes": {},
    "readings": {},
    "replicas": {},
    "ties": [],
    "patterns": {},
    "firsts": {},
    "allowed": [],
    "membership": 1,
}
JUNK: list[dict[str, Any]] = [
    {"shapes": {"w": ["2:S0", [-1, 4]]}},
    {"shapes": {"w": ["2:S0", [1 << 63]]}},
    {"shapes": {"w": [3, [1]]}},
    {"readings": {"w": 3}},
    {"replicas": {"w": ["part"]}},
    {"patterns": []},
    {"patterns": {"wire": ["w"]}},
    {"patterns": {"wire": {"w": [1]}}},
    {"firsts": {"w": 1}},
    {"allowed": "w"},
    {"membership": 1.5},
    {"membership": float("inf")},
]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        *(json.dumps({name: value for name, value in TOLD.items() if name != left_out}) for left_out in TOLD),
        *(json.dumps(TOLD | junk) for junk in JUNK),
    ],
)
def test_what_no_rank_says_is_refused(text: str) -> None:
    registration = collect((np.zeros((2, 4), np.float32), "2:S0"))
    with pytest.raises(tessera.MismatchError, match="rank 1 published what no Tessera of this release writes"):
        registration.agree([registration.to_gather(), text])
