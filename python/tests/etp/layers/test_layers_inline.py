"""mode="inline" of constructed layers: the bytes of plain torch, and its second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
from etp_layers_inline_scenarios import OF_LAYERS, gradients_as_values, penalties
from etp_models import on_grid, on_ranks, plainly

SCENARIOS = OF_LAYERS | {"gradients_as_values": gradients_as_values}


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Any]]]:
    return request.param, on_ranks(SCENARIOS | {"penalties": penalties}, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_are_those_of_plain_torch(found: tuple[int, dict[str, list[Any]]], name: str) -> None:
    size, ranks = found
    expected = plainly(SCENARIOS[name], size)
    for rank in ranks[name]:
        assert rank == expected


def _are_close(ranks: list[list[list[float]]], expected: list[list[float]]) -> None:
    """Second derivatives add in another order: to 1e-4 of the largest."""
    assert sum(any(each) for each in expected) >= len(expected) - 2  # one rank uses two of four experts
    for rank in ranks:
        for mine, theirs in zip(rank, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4 * max(map(abs, theirs)))


def test_a_penalty_on_gradients_is_that_of_plain_torch(found: tuple[int, dict[str, list[Any]]]) -> None:
    size, ranks = found
    _are_close(ranks["penalties"], plainly(penalties, size))


def test_with_data_parallelism() -> None:
    """Over a second group."""
    both = {"gradients": gradients_as_values, "penalties": penalties, "tied": OF_LAYERS["tied"]}
    grid = on_grid(both, 2, 2)
    assert grid["gradients"] == [plainly(gradients_as_values, 4)] * 4
    assert grid["tied"] == [plainly(OF_LAYERS["tied"], 4)] * 4
    _are_close(grid["penalties"], plainly(penalties, 4))
