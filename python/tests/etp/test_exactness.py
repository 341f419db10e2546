"""Every scenario, of modules that the package knows and of others, gives the bytes of plain torch on 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import etp_features_scenarios
import etp_generic_scenarios
import etp_scenarios
import pytest
from etp_models import on_ranks, plainly, scenarios_of

SCENARIOS = {
    name: scenario
    for each in (etp_scenarios, etp_generic_scenarios, etp_features_scenarios)
    for name, scenario in scenarios_of(vars(each)).items()
}


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Any]]]:
    return request.param, on_ranks(SCENARIOS, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_are_those_of_plain_torch(found: tuple[int, dict[str, list[Any]]], name: str) -> None:
    size, ranks = found
    expected = plainly(SCENARIOS[name], size)
    for rank in ranks[name]:
        assert rank == expected
