"""Who writes what, as a pure function of what ranks tell."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy
import pytest
import tessera
import torch
from tessera import _core
from tessera._tensors.layouts import _in_order
from tessera.checkpoint._parts import Part, Region, size_of
from tessera.checkpoint._plan import heard, plan, told

NOTHING = torch.empty(0)


def _layout_part(name: str, layout: _core.Layout, shape: tuple[int, ...], rank: int) -> Part:
    owned = layout.owned(shape, rank)
    return Part(name, "f32", shape, [] if owned is None else [tuple(owned)], NOTHING)


def _as_sent(parts: list[Part]) -> Any:
    return json.loads(json.dumps(told(parts)))


def _cover(regions: list[Region], shape: tuple[int, ...]) -> numpy.ndarray[Any, Any]:
    counts = numpy.zeros(shape, int)
    for region in regions:
        counts[numpy.ix_(*([i for begin, end in dim for i in range(begin, end)] for dim in region))] += 1
    return counts


LAYOUTS = (
    "6:R",
    "6:S0",
    "6:S1",
    "a=2,b=3:S0,S1",
    "a=2,b=3:R,S0",
    "a=3,b=2:S0*2,S0",
    "6:G0[0;0;1;5;5;5;13]",
    "2@1-2:S0",
    "1@4:R",
)


def test_every_element_is_written_once_and_by_one_that_holds_it() -> None:
    shapes = {f"{number}": (13, 7) for number in range(3 * len(LAYOUTS))} | {"scalar": ()}
    ranks = [
        [
            _layout_part(
                name, _core.Layout("6:R" if name == "scalar" else LAYOUTS[int(name) % len(LAYOUTS)]), shape, rank
            )
            for name, shape in shapes.items()
        ]
        for rank in range(6)
    ]
    held, _ = heard([_as_sent(parts) for parts in ranks])
    made = plan(held, 6)
    for name, shape in shapes.items():
        written = [region for rank in range(6) for region in made.writes[rank].get(name, [])]
        assert (_cover(written, shape) == 1).all()
    for rank, parts in enumerate(ranks):
        for part in parts:
            assert set(made.writes[rank].get(part.name, [])) <= set(part.regions)
    assert sorted(name for file in made.files for name, _, _ in file) == sorted(shapes)
    assert all(made.file_of[name] == number for number, file in enumerate(made.files) for name, _, _ in file)
    loads = [sum(size_of(each) for regions in writes.values() for each in regions) for writes in made.writes]
    only_by_one = 13 * 7 * 3  # the most that nobody can take over: three tensors on one rank
    assert max(loads) - min(loads) <= only_by_one


def test_replicas_share_the_work() -> None:
    generator = random.Random(5)
    parts = [
        _layout_part(f"w{number}", _core.Layout("4:R"), (generator.randrange(1, 500), 3), 0) for number in range(50)
    ]
    made = plan(heard([_as_sent(parts)] * 4)[0], 4)
    loads = [sum(size_of(each) for regions in writes.values() for each in regions) for writes in made.writes]
    assert max(loads) <= 1.05 * sum(loads) / 4


def test_all_ranks_make_the_same_plan_whatever_the_order_of_their_tensors() -> None:
    parts = [_layout_part(f"w{number}", _core.Layout("2:R"), (5, number % 3 + 1), 0) for number in range(20)]
    plans = [plan(heard([_as_sent(parts), _as_sent(other)])[0], 2) for other in (parts, parts[::-1])]
    assert plans[0] == plans[1]


def test_ranks_agree_on_the_cut_of_placements_that_may_stand_for_two() -> None:
    """Here local shapes of some ranks fit both, and the cuts differ."""
    mesh = _core.Mesh([2, 2, 2])
    placed = _core.Layout(mesh, [_core.StridedShard(0, 4), _core.Shard(0), _core.Shard(0)])
    nested = _in_order(mesh, [_core.Shard(0)] * 3, [1, 2, 0])
    fitting = 0
    for rows in range(1, 40):
        shape = (rows, 3)
        parts = []
        for rank in range(8):
            as_placed = _layout_part("w", placed, shape, rank)
            if nested.local_shape(shape, rank) == placed.local_shape(shape, rank):
                as_nested = _layout_part("w", nested, shape, rank)
                fitting += as_nested.regions != as_placed.regions
                parts.append(as_nested._replace(others=as_placed.regions))
            else:
                parts.append(as_placed._replace(says=True))
        if not any(part.says for part in parts):
            continue
        held, cut = heard([_as_sent([part]) for part in parts])
        assert cut == {"w"}
        for rank in range(8):
            expected = _layout_part("w", placed, shape, rank).regions
            assert list(held[rank][0].regions) == expected
            assert parts[rank].as_said(cut).regions == expected
    assert fitting > 0


def test_what_nobody_holds_is_named() -> None:
    rows = [_layout_part("w", _core.Layout("3:S0"), (7, 2), rank) for rank in range(3)]
    with pytest.raises(tessera.MismatchError, match=r"tensor w of shape \(7, 2\): the ranks hold 8 elements of 14"):
        plan(heard([_as_sent([rows[0]]), _as_sent([]), _as_sent([rows[2]])])[0], 3)
    overlapping = [rows[0]._replace(regions=[((each,), ((0, 2),))]) for each in ((0, 4), (3, 6))]
    with pytest.raises(tessera.MismatchError, match="by different cuts"):
        plan(heard([_as_sent([part]) for part in overlapping])[0], 2)


HOSTILE: list[Any] = [
    7,
    [7],
    [["w"]],
    [[7, "f32", [2], [None], None, False]],
    [["w", "f99", [2], [None], None, False]],
    [["w", [], [2], [None], None, False]],
    [["w", "f32", [-2], [None], None, False]],
    [["w", "f32", ["2"], [None], None, False]],
    [["w", "f32", [1 << 70], [None], None, False]],
    [["w", "f32", [2], 7, None, False]],
    [["w", "f32", [2], [[[[0, 3]]]], None, False]],
    [["w", "f32", [2], [[[[1, 1]]]], None, False]],
    [["w", "f32", [2], [[[[1, 2], [0, 1]]]], None, False]],
    [["w", "f32", [2], [[]], None, False]],
    [["w", "f32", [2], [[[[0, True]]]], None, False]],
    [["w", "f32", [2], [None], [7], False]],
]


@pytest.mark.parametrize("value", HOSTILE)
def test_lists_that_no_rank_tells(value: Any) -> None:
    with pytest.raises(tessera.MismatchError, match="rank 1 tells no list of tensors"):
        heard([[], value])
