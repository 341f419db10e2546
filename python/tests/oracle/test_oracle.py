"""torch distributes, redistributes and gathers; Tessera has to put the same bits on every rank.

python -m pytest python/tests/oracle                                    # 3,000 cases of a fixed seed
TESSERA_ORACLE_SEED=random python -m pytest python/tests/oracle         # or a number
TESSERA_ORACLE_CASE=4to2/17 python -m pytest python/tests/oracle        # one case
python -m pytest -m slow python/tests/oracle                            # 3,000 cases of a random seed
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import tessera

from .cases import LAUNCHES, SEED, Case, Grid, Side, draw_case, draw_cases
from .launching import Outcome, launch_cases
from .verdict import bus_failures, simulate_failures, torch_failures

SHOWN = 10  # failures of a launch


def _seed() -> int:
    chosen = os.environ.get("TESSERA_ORACLE_SEED", str(SEED))
    return random.SystemRandom().getrandbits(31) if chosen == "random" else int(chosen)


FIXED_SEED = _seed()
RANDOM_SEED = random.SystemRandom().getrandbits(31)


def _runs() -> Iterator[object]:
    chosen = os.environ.get("TESSERA_ORACLE_CASE")
    if chosen is not None:
        name, _, index = chosen.partition("/")
        launch = next(each for each in LAUNCHES if each.name == name)
        yield pytest.param((launch, [draw_case(FIXED_SEED, launch, int(index))]), id=chosen)
        return
    for launch in LAUNCHES:
        yield pytest.param((launch, draw_cases(FIXED_SEED, launch)), id=launch.name)
    for launch in LAUNCHES:
        yield pytest.param(
            (launch, draw_cases(RANDOM_SEED, launch)), id=f"{launch.name}-random", marks=pytest.mark.slow
        )


@pytest.fixture(scope="module", params=_runs())
def outcome(request: pytest.FixtureRequest) -> Outcome:
    launch, cases = request.param
    return launch_cases(launch, cases)


def _report(failures: list[str]) -> str:
    more = [f"... and {len(failures) - SHOWN} more"] if len(failures) > SHOWN else []
    return "\n".join([f"{len(failures)} failures", *failures[:SHOWN], *more])


def test_torch_agrees_with_itself(outcome: Outcome) -> None:
    failures = torch_failures(outcome)
    assert not failures, _report(failures)


def test_the_bus_gives_torchs_bits(outcome: Outcome) -> None:
    failures = bus_failures(outcome)
    assert not failures, _report(failures)


def test_simulate_gives_torchs_bits(outcome: Outcome) -> None:
    failures = simulate_failures(outcome)
    assert not failures, _report(failures)


def test_every_rank_was_compared(outcome: Outcome) -> None:
    for case in outcome.cases:
        for process, record in outcome.records[case.index].items():
            assert (record.source is not None) == (process in case.src.grid.processes), case
            assert (record.expected is not None) == (process in case.dst.grid.processes), case


# --- that it can fail


def _grid(*processes: int) -> Grid:
    return Grid((len(processes),), processes)


def _case(index: int, placement: str) -> Case:
    src, dst = Side(_grid(0, 1), ("S0",)), Side(_grid(2, 3), (placement,))
    return Case(SEED, LAUNCHES[0].name, index, (8, 6), "f32", "f32", src, dst, "bits")


def swap_two_ranks(layout: tessera.Layout) -> tessera.Layout:
    first, second, *others = layout.mesh.ranks
    return layout.with_ranks([second, first, *others])


def test_a_layout_with_two_ranks_swapped_is_noticed() -> None:
    cases = [_case(0, "S0"), _case(1, "S1"), _case(2, "R")]
    outcome = launch_cases(LAUNCHES[0], cases, swap_two_ranks)
    failures = bus_failures(outcome)
    assert [failure.count("24 of 24 elements differ") for failure in failures] == [1] * 4, failures
    assert [case.index for failure in failures for case in cases if str(case) in failure] == [0, 0, 1, 1]
    assert not torch_failures(outcome)
    assert not simulate_failures(outcome)  # it was given the right layouts


def test_a_failure_says_how_to_see_it_again() -> None:
    case = draw_case(SEED, LAUNCHES[1], 17)
    said = str(case)
    assert f"TESSERA_ORACLE_SEED={SEED} TESSERA_ORACLE_CASE=4to2/17" in said
    assert case.src.text in said
    assert case.dst.text in said


def test_one_wrong_bit_is_noticed() -> None:
    outcome = launch_cases(LAUNCHES[0], [_case(0, "S1")])
    assert not bus_failures(outcome)
    record = outcome.records[0][3]
    assert record.received is not None
    data = bytearray(record.received.data)
    data[-1] ^= 0x80
    record.received = type(record.received)(bytes(data), record.received.shape)
    (failure,) = bus_failures(outcome)
    assert "process 3: 1 of 24 elements differ, first at [7, 2]" in failure
    record.received = None
    assert "process 3: nothing came" in bus_failures(outcome)[0]
    source = outcome.records[0][1].source
    assert source is not None
    outcome.records[0][1].source = type(source)(bytes(len(source.data)), source.shape)
    assert len(simulate_failures(outcome)) == 2


def test_a_process_that_fails_ends_the_launch_and_says_why() -> None:
    """Shapes that do not fit are refused by one process; nobody waits for it."""
    case = _case(0, "S0")
    with pytest.raises(RuntimeError, match="process 2: Traceback") as caught:
        launch_cases(LAUNCHES[0], [case], wrong_layout)
    assert "what it holds is (4, 6)" in str(caught.value)


def wrong_layout(layout: tessera.Layout) -> tessera.Layout:
    return tessera.Layout(layout.mesh, [tessera.Replicate()])
