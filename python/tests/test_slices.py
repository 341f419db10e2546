"""Slices of sharded tensors against brute force: each rank views what it owns of the slice under its new layout."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import tessera
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tessera._bus.slices import Cut, cut, entries, index_text, view
from tessera._tensors.location import Location


def cut_at(layout: tessera.Layout, shape: tuple[int, ...], index: Any, rank: int) -> Cut:
    return cut(layout, shape, rank, entries(index, shape))


def local_of(layout: tessera.Layout, whole: np.ndarray, rank: int) -> np.ndarray | None:
    """The part of an array that `rank` holds; None for a rank outside the mesh."""
    if rank not in layout.mesh:
        return None
    owned = layout.bind(whole.shape).owned(whole.shape, rank)
    if owned is None:
        return np.zeros(layout.local_shape(whole.shape, rank), whole.dtype)
    elements = [[i for a, b in intervals for i in range(a, b)] for intervals in owned]
    return whole[np.ix_(*elements)] if elements else whole


def numpy_index(taken: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        each if isinstance(each, int) else slice(each.start, max(each.stop, each.start), each.step) for each in taken
    )


def check(layout: tessera.Layout, shape: tuple[int, ...], index: Any, world: int) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    expected = whole[index]
    for rank in range(world):
        found = cut_at(layout, shape, index, rank)
        assert found.shape == expected.shape
        part = local_of(found.layout, expected, rank)
        here = local_of(layout, whole, rank)
        if found.local is None:
            assert part is None, f"rank {rank} is in the mesh of {found.layout}, but has no view"
        else:
            assert here is not None
            assert part is not None
            np.testing.assert_array_equal(here[numpy_index(found.local)], part)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tessera.Layout, tuple[int, ...], Any, int]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    world = math.prod(sizes) + draw(st.integers(0, 1))
    ranks = draw(st.permutations(range(world)))[: math.prod(sizes)]
    placements: list[Any] = []
    for size in sizes:
        dim = draw(st.integers(0, len(shape) - 1))
        free = not any(getattr(other, "dim", None) == dim for other in placements)
        kind = draw(st.sampled_from(["R", "S", "S", "*", "G"]))
        if kind == "S":
            placements.append(tessera.Shard(dim))
        elif kind == "*":
            placements.append(tessera.StridedShard(dim, draw(st.integers(1, 2))))
        elif kind == "G" and free:
            inner = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=size - 1, max_size=size - 1)))
            placements.append(tessera.RaggedShard(dim, [0, *inner, shape[dim]]))
        else:
            placements.append(tessera.Replicate())
    layout = tessera.Layout(tessera.Mesh(sizes, ranks=ranks), placements)
    try:
        layout.bind(shape)
    except tessera.InvalidArgumentError:
        assume(False)
    index: list[Any] = []
    for size in shape[: draw(st.integers(1, len(shape)))]:
        if draw(st.booleans()):
            index.append(draw(st.integers(-size, size - 1)))
        else:
            begin = draw(st.integers(0, size))
            index.append(slice(begin, draw(st.integers(begin, size)), draw(st.sampled_from([None, 1, 2]))))
    return layout, shape, tuple(index), world


@settings(max_examples=400, deadline=None)
@given(cases())
def test_any_slice_of_any_layout_is_what_its_ranks_hold(case: Any) -> None:
    layout, shape, index, world = case
    try:
        check(layout, shape, index, world)
    except tessera.UnimplementedError:
        # Only where no single axis cuts the dim into blocks.
        cuts = [
            (dim, each)
            for dim, each in enumerate(index)
            if isinstance(each, slice) and len(range(*each.indices(shape[dim]))) < shape[dim]
        ]
        sharders = [[p for p in layout.placements if getattr(p, "dim", None) == dim] for dim, _ in cuts]
        assert any(
            ps and (len(ps) > 1 or isinstance(ps[0], tessera.StridedShard) or each.step == 2)
            for (_, each), ps in zip(cuts, sharders, strict=True)
        )


@pytest.mark.parametrize(("size", "ranks"), [(8, 2), (8, 3), (5, 4), (3, 4)])
def test_a_fused_dim_in_blocks_splits_into_ragged_parts(size: int, ranks: int) -> None:
    layout = tessera.Layout(f"{ranks}:S0")
    for begin, end in itertools.combinations_with_replacement(range(size + 1), 2):
        check(layout, (size, 2), slice(begin, end), ranks)
        found = cut_at(layout, (size, 2), slice(begin, end), 0)
        if end - begin < size:
            (placement,) = found.layout.placements
            assert isinstance(placement, tessera.RaggedShard)
            held = [len(range(max(begin, a), min(end, b))) for a, b in blocks(size, ranks)]
            assert [b - a for a, b in itertools.pairwise(placement.bounds)] == held


def blocks(size: int, ranks: int) -> list[tuple[int, int]]:
    length = -(-size // ranks)
    return [(min(rank * length, size), min((rank + 1) * length, size)) for rank in range(ranks)]


def test_an_expert_is_on_the_ranks_that_hold_it() -> None:
    found = cut_at(tessera.Layout("dp=2,fsdp=2,tp=2:R,S0,S1"), (4, 6, 8), 3, 6)
    assert found.layout == tessera.Layout("dp=2,tp=2@2,3,6,7:R,S0")
    assert found.local == (1, range(3), range(8))


def test_an_axis_that_cuts_a_dim_finely_refuses_a_slice_and_names_the_way_out() -> None:
    with pytest.raises(tessera.UnimplementedError, match=r"slice \[0:4\] cuts dim 0.*local=, layout= and shape="):
        cut_at(tessera.Layout("fsdp=2,tp=2:S0*2,S0"), (8,), slice(0, 4), 0)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (4, r"index \[4\] of a dim of 4: 4 is outside"),
        (slice(0, 5), r"index \[0:5\] of a dim of 4: 5 is outside"),
        ((0, 1, 2), r"index \[0, 1, 2\] has 3 dims, the tensor has 2"),
        (slice(3, None, -1), r"its step -1 is not positive"),
        (None, None),
        ("0:2", r"index '0:2' \(builtins.str\): give an int, a slice"),
        (slice("a", "b"), r"'a' is not a whole number"),
        ((True,), r"index True"),
    ],
)
def test_an_index_that_is_none_is_refused(index: Any, why: str | None) -> None:
    if why is None:
        assert entries(index, (4, 2)) == (range(4), range(2))
        return
    with pytest.raises(tessera.InvalidArgumentError, match=why):
        entries(index, (4, 2))


@pytest.mark.parametrize("index", [1, slice(1, 3), (slice(0, 4, 2), 1), (-1, slice(None)), (0, 0), slice(2, 2)])
def test_a_view_lies_where_numpy_has_it(index: Any) -> None:
    array = np.arange(12, dtype=np.int32).reshape(4, 3)
    location = Location(array.ctypes.data, "i32", (4, 3), (3, 1), None, None)
    found, expected = (
        view(location, entries(index, (4, 3))),
        array[(*(index if isinstance(index, tuple) else (index,)), ...)],
    )
    assert found.shape == expected.shape
    if expected.size:
        assert found.address == expected.ctypes.data
        assert [4 * stride for stride in found.strides] == list(expected.strides)
    else:
        assert found.address == 0


def test_a_view_of_four_bit_elements_begins_at_a_byte() -> None:
    location = Location(1 << 20, "f4", (4, 8), (8, 1), None, None)
    assert view(location, entries((1, slice(2, 4)), (4, 8))).address == (1 << 20) + 5
    with pytest.raises(tessera.InvalidArgumentError, match="inside a byte"):
        view(location, entries((1, slice(3, 5)), (4, 8)))


def test_an_index_is_shown_as_it_is_written() -> None:
    assert index_text((3, slice(None, 4), slice(1, None, 2))) == "3, :4, 1::2"
