"""That the random cases are what the oracle is for."""

from __future__ import annotations

import pytest
import tessera

from .cases import CASES, FLOATS, LAUNCHES, SEED, Case, Launch, Side, draw_case, draw_cases
from .reference import DTYPES, asks_for_full, asks_for_redistribute, whole


@pytest.fixture(scope="module")
def drawn() -> list[tuple[Launch, Case]]:
    return [(launch, case) for launch in LAUNCHES for case in draw_cases(SEED, launch)]


def _uneven(side: Side, shape: tuple[int, ...]) -> bool:
    return any(shape[dim] % side.cuts(dim, len(shape)) for dim in range(len(shape)))


def _has_empty_shard(side: Side, case: Case) -> bool:
    layout = side.layout()
    return all(case.shape) and any(layout.owned(case.elements_shape, rank) is None for rank in side.grid.processes)


def test_the_cases_are_what_was_asked_for(drawn: list[tuple[Launch, Case]]) -> None:
    cases = [case for _, case in drawn]
    assert len(cases) >= 3000
    assert len(LAUNCHES) * CASES == len(cases)
    at_least = {
        "uneven sizes": (600, [_uneven(case.src, case.shape) or _uneven(case.dst, case.shape) for case in cases]),
        "empty shards": (200, [_has_empty_shard(case.src, case) or _has_empty_shard(case.dst, case) for case in cases]),
        "strided shards": (700, ["*" in case.src.text + case.dst.text for case in cases]),
        "dtype changes": (500, [case.dtype != case.target for case in cases]),
        "partial": (600, [case.src.reduce_op is not None for case in cases]),
        "partial floats": (200, [case.content == "floats" for case in cases]),
        "partial floats of three terms and more": (
            100,
            [case.content == "floats" and case.src.terms > 2 for case in cases],
        ),
        "partial floats that do not ascend with their coordinates": (
            5,
            [case.content == "floats" and case.src.term_orders() != {tuple(range(case.src.terms))} for case in cases],
        ),
        "ranks on both sides": (
            1000,
            [bool({*case.src.grid.processes} & {*case.dst.grid.processes}) for case in cases],
        ),
        "one world size": (700, [len(launch.trainers) == len(launch.inference) for launch, _ in drawn]),
        "two world sizes": (700, [len(launch.trainers) != len(launch.inference) for launch, _ in drawn]),
        "destinations that are not contiguous": (600, [case.scattered_dst for case in cases]),
        "reduced or gathered by torch": (1800, [asks_for_full(case) for case in cases]),
        "redistributed by torch": (250, [asks_for_redistribute(case) for case in cases]),
        "large": (30, [len(case.shape) > 0 and whole(case).numel() >= 50_000 for case in cases]),
    }
    counts = {what: sum(found) for what, (_, found) in at_least.items()}
    assert not {what: counts[what] for what, (least, _) in at_least.items() if counts[what] < least}, counts


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_meshes_of_one_to_three_axes_meet_each_other(drawn: list[tuple[Launch, Case]], axes: int) -> None:
    met = {len(case.dst.grid.shape) for _, case in drawn if len(case.src.grid.shape) == axes}
    assert met == {1, 2, 3}


def test_every_dtype_and_every_cast_occurs(drawn: list[tuple[Launch, Case]]) -> None:
    assert {case.dtype for _, case in drawn} == set(DTYPES) == set(tessera._core.dtypes())
    casts = {(case.dtype, case.target) for _, case in drawn if case.dtype != case.target}
    assert casts == {(one, other) for one in FLOATS for other in FLOATS if one != other}


def test_a_case_does_not_depend_on_the_others() -> None:
    launch = LAUNCHES[3]
    assert draw_case(SEED, launch, 40) == draw_cases(SEED, launch)[40]
    assert draw_case(SEED, launch, 40) != draw_case(SEED + 1, launch, 40)
