"""Data parallelism over a second group: the bytes of one process that does all micro-batches."""

from __future__ import annotations

from typing import Any

import etp_inline_scenarios
import etp_scenarios
import pytest
import tessera
import torch
from etp_models import Run, adamw, batch, built, loss_of, on_grid, plainly, scenarios_of
from tessera import etp
from torch_ranks import launch


def inline(run: Run) -> Any:
    return etp_inline_scenarios.training(run), etp_inline_scenarios.second_derivatives(run)


SCENARIOS = scenarios_of(vars(etp_scenarios)) | {"inline": inline}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return on_grid(SCENARIOS, 2, 2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_are_those_of_plain_torch(found: dict[str, list[Any]], name: str) -> None:
    expected = plainly(SCENARIOS[name], 4)
    for rank in found[name]:
        assert rank == expected
