"""Constructed layers: the bytes of plain torch, on 1, 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import etp_layers_scenarios
import etp_meta_scenarios
import pytest
import tessera
import torch
from etp_models import Run, adamw, batch, built, on_ranks, plainly, scenarios_of
from tessera import etp
from torch_ranks import launch

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


def _mixed(run: Run) -> dict[str, bytes]:
    model = run.sharded(built(lambda: etp_meta_scenarios.Mixed(run)))
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


def _one_fails(rank: int) -> tuple[str, dict[str, bytes]]:
    def fails(gradient: torch.Tensor) -> None:
        raise RuntimeError("a user's hook")

    with etp.init_group(timeout=30) as group:
        run = Run(2, rank, group)
        model = run.sharded(built(lambda: etp_meta_scenarios.Mixed(run)))
        optimizer = adamw(model.parameters())
        x = model.emb(batch(7)[0])
        if rank == 0:
            x.register_hook(fails)
        said = ""
        try:
            model.head(x + model.down(model.norm(model.up(x)))).sum().backward()
        except (RuntimeError, tessera.CancelledError) as error:
            said = str(error)
        optimizer.zero_grad()
        run.train(model, optimizer)
        return said, run.weights(model)


def test_a_backward_of_both_kinds_of_layers_that_fails_on_one_rank() -> None:
    """Two runtimes, whose meetings all ranks keep."""
    (first, weights), (second, others) = launch(_one_fails, 2)
    assert first == "a user's hook"
    assert "rank 0: RuntimeError: a user's hook (in a backward)" in second
    assert weights == others == plainly(_mixed, 2)
