"""Constructed layers whose weights travel in a format: the same bytes on 1, 2 and 4 ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from etp_layers_scenarios import Experts, Layers, expert_loss
from etp_models import Run, adamw, batch, built
from tessera import etp
from torch_ranks import launch

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "nvfp4": {"weight_format": "nvfp4"},
    "mxfp8 at the first use": {"weight_format": "mxfp8", "publish": "first_use"},
}
MICRO_BATCHES = 4  # of a step, on all ranks


def _loss(model: Any, number: int) -> torch.Tensor:
    ids, targets = batch(number)
    x = model.emb(ids, is_first_microbatch=number < MICRO_BATCHES)
    x = x + model.down(torch.nn.functional.gelu(model.up(x, is_first_microbatch=True)))
    return torch.nn.functional.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())


def _train(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        for name, options in CASES.items():
            run = Run(size, rank, group)
            model = built(lambda run=run, options=options: Layers(run, **options))
            run.train(model, adamw(model.parameters()), accumulation=MICRO_BATCHES // size, loss=_loss)
            found[name] = run.weights(model)
            if name == "plain":
                continue
            published = etp.report(model).publications
            assert published >= 4 * 3  # weights and versions
            run = Run(size, rank, group)
            experts = built(lambda run=run, options=options: Experts(run, True, **options))
            run.train(experts, adamw(experts.parameters()), accumulation=MICRO_BATCHES // size, loss=expert_loss)
            found[f"{name}, experts"] = run.weights(experts)
    return found


@pytest.fixture(scope="module")
def trained() -> dict[int, list[dict[str, Any]]]:
    return {size: launch(functools.partial(_train, size=size), size) for size in (1, 2, 4)}


def test_every_number_of_ranks_gives_the_same_bytes(trained: dict[int, list[dict[str, Any]]]) -> None:
    expected = trained[1][0]
    assert all(each == expected for size in (2, 4) for each in trained[size])


def test_formats_give_other_bytes(trained: dict[int, list[dict[str, Any]]]) -> None:
    assert len({trained[1][0][name]["up.weight"] for name in CASES}) == len(CASES)
