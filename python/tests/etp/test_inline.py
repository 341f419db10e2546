"""mode="inline" gives the bytes of plain torch; ranks whose backwards differ are told so."""

from __future__ import annotations

from typing import Any

import etp_inline_scenarios
import pytest
import tessera
import torch
from etp_models import built, on_ranks, plainly, scenarios_of
from etp_scenarios import Skipping
from tessera import etp
from torch_ranks import launch

SCENARIOS = scenarios_of(vars(etp_inline_scenarios))


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return on_ranks(SCENARIOS, 2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_are_those_of_plain_torch(found: dict[str, list[Any]], name: str) -> None:
    expected = plainly(SCENARIOS[name], 2)
    for rank in found[name]:
        assert rank == expected


def _another_backward(rank: int) -> str:
    with etp.init_group(timeout=10) as group:
        model = etp.shard_module_(built(Skipping), group, mode="inline", min_elements=256)
        x = torch.ones(2, 32)
        with pytest.raises(tessera.Error) as caught:
            (model.experts[0] if rank == 0 else model.experts[1])(x).sum().backward()
        return str(caught.value)


def test_ranks_must_run_the_same_backward() -> None:
    for text in launch(_another_backward, 2):
        assert "the gradient of experts.0.weight" in text and "the gradient of experts.1.weight" in text


def _left_amid_a_reduction(rank: int) -> str:
    group = etp.init_group(timeout=10)
    model = etp.shard_module_(built(Skipping), group, mode="inline", min_elements=256)
    weight = model.experts[0].weight.etp

    def leave(gradient: torch.Tensor) -> None:
        weight.model.core.leave()
        raise RuntimeError("rank 1 leaves")

    if rank == 1:
        weight.send = leave
    with pytest.raises((tessera.Error, RuntimeError)) as caught:
        model.experts[0](torch.ones(2, 32) * (1 + rank)).sum().backward()
    group.abandon()
    return str(caught.value)


def test_a_rank_that_leaves_amid_a_reduction_is_named() -> None:
    told = launch(_left_amid_a_reduction, 2)
    assert "rank 1" in told[0] and "in flight" not in told[0]
    assert "rank 1 leaves" in told[1]


def _hooks_that_differ(rank: int) -> str:
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group, **etp_inline_scenarios.OPTIONS)
        weight = model.down.weight
        weight.register_hook(lambda gradient: torch.full(gradient.shape, 1.0 + rank))
        with pytest.raises(tessera.Error) as caught:
            weight.square().sum().backward()
        return str(caught.value)


def test_gradients_that_hooks_replace_differently_are_refused() -> None:
    for text in launch(_hooks_that_differ, 2):
        assert "down.weight would write different values on different ranks" in text
