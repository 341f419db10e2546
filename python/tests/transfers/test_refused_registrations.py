"""What one rank refuses before the core registers anything reaches every rank of both jobs, at once. Nothing of it is
left once that rank registers what fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tessera
from jobs import Jobs, Rank

LATE = 15  # seconds: a rank that hears nothing waits as long
ROWS = 8


def layout_of(rank: Rank) -> tessera.Layout:
    return tessera.Layout(f"{rank.world}:S0")


def rows(rank: Rank) -> Any:
    """This rank's rows of a tensor of ROWS x 3; for a receiver zeros."""
    whole = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
    part = np.array_split(whole, rank.world)[rank.rank].copy()
    return part if rank.job == "trainer" else np.zeros_like(part)


def fitting(rank: Rank) -> dict[str, Any]:
    return {"tensors": {"w": (rows(rank), layout_of(rank), (ROWS, 3))}}


def a_row_short(rank: Rank) -> dict[str, Any]:
    return {"tensors": {"w": (rows(rank)[1:], layout_of(rank), (ROWS, 3))}}


def of_another_shape(rank: Rank) -> dict[str, Any]:
    return {"tensors": {"w": (rows(rank)[1:], layout_of(rank))}}


def of_a_dtype_that_nobody_moves(rank: Rank) -> dict[str, Any]:
    return {"tensors": {"w": (rows(rank).astype(object), layout_of(rank), (ROWS, 3))}}


def lazy(rank: Rank) -> dict[str, Any]:
    import torch

    return {"tensors": torch.nn.LazyLinear(3)}


def with_a_map_that_raises(rank: Rank) -> dict[str, Any]:
    def fails(name: str, tensor: Any) -> str:
        raise KeyError(f"no name for {name}")

    return {**fitting(rank), "map": fails}


def of_a_wrong_mode(rank: Rank) -> dict[str, Any]:
    return {**fitting(rank), "mode": "stagged"}


def with_nothing_left(rank: Rank) -> dict[str, Any]:
    return {**fitting(rank), "only": ["v"]}


def read_only(rank: Rank) -> dict[str, Any]:
    part = rows(rank)
    part.flags.writeable = False
    return {"tensors": {"w": (part, layout_of(rank), (ROWS, 3))}}


KINDS: list[tuple[Callable[[Rank], dict[str, Any]], str, str]] = [
    (a_row_short, "trainer", "w"),
    (a_row_short, "engine", "w"),
    (of_another_shape, "trainer", "tensor w"),
    (of_a_dtype_that_nobody_moves, "trainer", "dtype('O')"),
    (lazy, "trainer", "weight"),
    (with_a_map_that_raises, "engine", "no name for w"),
    (of_a_wrong_mode, "engine", "stagged"),
    (with_nothing_left, "trainer", "only="),
    (read_only, "engine", "w"),
]


def attempt(rank: Rank, options: dict[str, Any]) -> str:
    """Registers and transfers; returns the error, if there is one."""
    bus: tessera.Bus = rank.bus  # type: ignore[attr-defined]
    tensors = options.pop("tensors")
    try:
        batch = bus.register(tensors, **options)
    except (tessera.Error, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    try:
        (batch.send if rank.job == "trainer" else batch.recv)(timeout=LATE)
    except tessera.Error as error:
        return f"{type(error).__name__}: {error}"
    finally:
        batch.close()
    return ""


def take_part(rank: Rank, refuses: tuple[str, int], kind: Callable[[Rank], dict[str, Any]]) -> list[str]:
    """One rank registers what is refused, the others what fits; then all of them what fits."""
    with rank.connect("weights", peer="engine" if rank.job == "trainer" else "trainer", timeout=LATE) as bus:
        rank.bus = bus  # type: ignore[attr-defined]
        first = attempt(rank, kind(rank) if (rank.job, rank.rank) == refuses else fitting(rank))
        rank.tell()
        rank.hear()
        return [first, attempt(rank, fitting(rank))]


@pytest.mark.parametrize(("kind", "job", "cause"), KINDS, ids=[f"{kind.__name__}-{job}" for kind, job, _ in KINDS])
def test_what_one_rank_refuses_is_told_to_all(
    forked_jobs: Jobs, kind: Callable[[Rank], dict[str, Any]], job: str, cause: str
) -> None:
    processes = [
        process
        for name in ("trainer", "engine")
        for process in forked_jobs.start(name, take_part, (job, 1), kind, world=2)
    ]
    for process in processes:
        process.hear()
    for process in processes:
        process.tell()
    outcomes = {process.name: process.result() for process in processes}
    assert all(cause in first and "DeadlineExceeded" not in first for first, _ in outcomes.values()), outcomes
    assert all(second == "" for _, second in outcomes.values()), outcomes


def refuse_and_mend(rank: Rank, refuses: bool) -> str:
    """The rank that refuses mends it at once. A rank that comes in between hears of it, and calls again."""
    with rank.connect("weights", peer="engine" if rank.job == "trainer" else "trainer", timeout=LATE) as bus:
        rank.bus = bus  # type: ignore[attr-defined]
        if refuses:
            assert attempt(rank, a_row_short(rank)) != ""
        outcome = "not called"
        for _ in range(20):
            outcome = attempt(rank, fitting(rank))
            if "gave up" not in outcome:
                break
        rank.tell()
        rank.hear()  # so that nobody leaves while others call again
        return outcome


def test_what_was_mended_hinders_nobody(forked_jobs: Jobs) -> None:
    processes = forked_jobs.start("trainer", refuse_and_mend, True, world=2, ranks=[1])
    processes += forked_jobs.start("trainer", refuse_and_mend, False, world=2, ranks=[0])
    processes += forked_jobs.start("engine", refuse_and_mend, False, world=2)
    for process in processes:
        process.hear()
    for process in processes:
        process.tell()
    outcomes = {process.name: process.result() for process in processes}
    assert set(outcomes.values()) == {""}, outcomes
