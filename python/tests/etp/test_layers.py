"""Constructed layers: the bytes of plain torch, on 1, 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import etp_layers_scenarios
import etp_meta_scenarios
import pytest
from etp_models import on_ranks, plainly, scenarios_of

SCENARIOS = scenarios_of(vars(etp_layers_scenarios)) | scenarios_of(vars(etp_meta_scenarios))


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Any]]]:
    return request.param, on_ranks(SCENARIOS, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_are_those_of_plain_torch(found: tuple[int, dict[str, list[Any]]], name: str) -> None:
    size, ranks = found
    expected = plainly(SCENARIOS[name], size)
    for rank in ranks[name]:
        assert rank == expected
