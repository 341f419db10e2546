"""Programs that change a model's modules, against the same programs in one process of plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import etp_structure_scenarios
import pytest
import torch
from etp_models import on_grid, on_ranks, plainly, scenarios_of

SCENARIOS = scenarios_of(vars(etp_structure_scenarios))


@pytest.fixture(scope="module", autouse=True)
def deterministic() -> Iterator[None]:
    """Have ranks, and this process for as long as it is compared with them, take algorithms with one order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, deterministic: None) -> tuple[int, dict[str, list[object]]]:
    return request.param, on_ranks(SCENARIOS, request.param)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_the_program_gives_the_bytes_of_one_process(ranks: tuple[int, dict[str, list[object]]], name: str) -> None:
    size, found = ranks
    wanted = plainly(SCENARIOS[name], size)
    if size == 2:
        for own in found[name]:
            assert own == wanted
    else:  # the mean over three is rounded
        assert all(own == found[name][0] for own in found[name])


def test_replicas_change_and_copy_their_models_together() -> None:
    names = ("late_head", "late_head_that_is_sharded", "replaced_layer", "summoned", "averaged", "copied")
    scenarios = {name: SCENARIOS[name] for name in names}
    for name, found in on_grid(scenarios, 2, 2).items():
        wanted = plainly(scenarios[name], 4)
        assert all(own == wanted for own in found), name
