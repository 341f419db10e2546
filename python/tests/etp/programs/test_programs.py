"""Random programs on 2 and 3 ranks see what they see in one process, or are refused by name on all ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import pytest
import torch
from etp_models import Run
from etp_programs import Outcome, differences, play
from tessera import etp
from tessera.etp import norms, store
from torch_ranks import launch

SEEDS = range(24)
MANY = range(1000, 1000 + int(os.environ.get("TESSERA_ETP_PROGRAMS", "5000")))
AT_ONCE = 50
MOST_REFUSED = 0.1


def _plant_nothing() -> None: ...


def _play_all(rank: int, size: int, seeds: range, plant: Callable[[], None] = _plant_nothing) -> list[Outcome]:
    plant()
    with etp.init_group(timeout=30) as group:
        return [play(Run(size, rank, group), seed) for seed in seeds]


def _faults(size: int, seeds: range, plant: Callable[[], None] = _plant_nothing) -> tuple[list[str], list[str]]:
    """Return what is wrong, and what was refused."""
    torch.set_num_threads(1)
    ranks = launch(functools.partial(_play_all, size=size, seeds=seeds, plant=plant), size)
    wrong, refused = [], []
    for seed, outcomes in zip(seeds, zip(*ranks, strict=True), strict=True):
        plain = play(Run(size), seed)
        wrong += [f"program {seed} on {size} ranks: {text}" for text in differences(plain, list(outcomes))]
        if plain.error is None and outcomes[0].refused:
            refused.append(f"program {seed}, behind {outcomes[0].actions}: {outcomes[0].error}")
    return wrong, refused


@pytest.mark.parametrize("size", [2, 3])
def test_programs_see_what_they_see_in_one_process(size: int) -> None:
    wrong, refused = _faults(size, SEEDS)
    assert not wrong, "\n".join(wrong)
    assert len(refused) <= MOST_REFUSED * len(SEEDS), "\n".join(refused)


def _lose_writes() -> None:
    store.Store.take = lambda self, whole: None  # type: ignore[method-assign]


def _mistake_norms() -> None:
    right = norms._norms
    norms._norms = lambda *args, **options: [2 * norm for norm in right(*args, **options)]


@pytest.mark.parametrize("plant", [_lose_writes, _mistake_norms])
def test_a_planted_fault_is_found(plant: Callable[[], None]) -> None:
    assert _faults(2, SEEDS, plant)[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_many_programs(size: int) -> None:
    own = [seed for seed in MANY if seed % 2 == size % 2]
    wrong: list[str] = []
    for first in range(0, len(own), AT_ONCE):
        some = own[first : first + AT_ONCE]
        wrong += _faults(size, range(some[0], some[-1] + 1, 2))[0]
    assert not wrong, "\n".join(wrong)
