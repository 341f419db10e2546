"""All optimisers: 20 steps on 1, 2 and 3 ranks, bit for bit those of plain torch in one process."""

from __future__ import annotations

from typing import Any

import etp_optim_scenarios
import pytest
import torch
from etp_models import on_grid, on_ranks, plainly, scenarios_of

SCENARIOS = scenarios_of(vars(etp_optim_scenarios))
# They go by norms of gradients, whose sums are in f64 and do not depend on the number of ranks (etp.exactness()).
NEAR = {
    "hooks_and_averages",
    "layerwise",
    "resumed",
    "scaled",
    "sharpness_aware",
    "sharpness_aware_of_one_that_is_promised",
}
if not hasattr(torch.optim, "Muon"):
    del SCENARIOS["torchs_muon"]


@pytest.fixture(scope="module", params=(1, 2, 3))
def found(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Any]]]:
    """Return what each scenario gives on each rank."""
    return request.param, on_ranks(SCENARIOS, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_steps_are_those_of_one_process(found: tuple[int, dict[str, list[Any]]], name: str) -> None:
    size, ranks = found
    expected = plainly(SCENARIOS[name], size)
    for rank in ranks[name]:
        assert rank == ranks[name][0]
        if name not in NEAR:
            assert rank == expected
        else:
            assert_near(rank, expected)


def assert_near(found: Any, expected: Any) -> None:
    """Compare what trainings return, with elements of tensors up to rounding."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for own, other in zip(found, expected, strict=True):
            assert_near(own, other)
    elif isinstance(found, bytes):
        own, other = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (found, expected))
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    else:
        assert found == expected


def test_replicas_make_the_steps_of_one_process() -> None:
    names = ("adamw", "adafactor", "lookahead", "sharpness_aware", "hooks_and_averages")
    scenarios = {name: SCENARIOS[name] for name in names}
    for name, ranks in on_grid(scenarios, 2, 2).items():
        expected = plainly(scenarios[name], 4)
        for rank in ranks:
            assert rank == ranks[0]
            assert_near(rank, expected)
