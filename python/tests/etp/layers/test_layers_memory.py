"""What constructed layers, and models that are made on the meta device, keep in memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import tessera
import torch
from etp_layers_scenarios import Layers
from etp_models import Run, adamw, built
from tessera import etp
from torch_ranks import launch


def test_a_model_of_layers_goes_with_its_layers() -> None:
    with etp.init_group() as group:
        seen = []
        for _ in range(2):
            run = Run(1, 0, group)
            model = built(lambda run=run: Layers(run, weight_format="bf16"))
            run.train(model, adamw(model.parameters()))
            seen.append(weakref.ref(model.up.weight.etp.model))
        assert seen[0]() is not seen[1]()
        del model
        gc.collect()
        assert [each() for each in seen] == [None, None]


def test_layers_of_a_group_are_one_model_until_an_update() -> None:
    with etp.init_group() as group:
        first, second = (etp.Linear(8, 8, etp_group=group, weight_format="bf16") for _ in range(2))
        assert first.weight.etp.model is second.weight.etp.model
        assert [each.name for each in etp.report(first).weights] == ["Linear0.weight", "Linear1.weight"]
        with etp.update(first):
            pass
        third = etp.Linear(8, 8, etp_group=group, weight_format="bf16", name="third")
        assert third.weight.etp.model is not first.weight.etp.model
        assert third.weight.etp.name == "third.weight"


def _whole_at_a_time(rank: int) -> tuple[int, int, list[int]]:
    """How many whole weights are there when the next one is filled."""
    made: list[weakref.ref[torch.nn.Parameter]] = []
    alive = []

    def init(module: torch.nn.Module) -> None:
        alive.append(sum(each() is not None for each in made))
        weight: Any = module.weight
        made.append(weakref.ref(weight))
        weight.fill_(1)

    with etp.init_group(timeout=30) as group, torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)])
        etp.shard_module_(model, group, init=init)
        rows = sum(etp.local(parameter).numel() for parameter in model.parameters())
        return rows, sum(parameter.numel() for parameter in model.parameters()), alive


def test_one_module_is_whole_at_a_time() -> None:
    for rows, elements, alive in launch(_whole_at_a_time, 2):
        assert elements == 4 * 64 * 64 == 2 * rows
        assert alive == [0, 0, 0, 0]


def _kept_for_backward(rank: int) -> list[int]:
    """Whole weights of eight at a time, in forward and backward."""
    peaks = []
    with etp.init_group(timeout=30) as group:
        for mode in ("deferred", "inline"):
            model = torch.nn.Sequential(*[etp.Linear(64, 64, etp_group=group, mode=mode) for _ in range(8)])
            model(torch.ones(4, 64)).sin().sum().backward()
            peaks.append(etp.report(model).gathered_peak_bytes // (64 * 64 * 4))
    return peaks


def test_the_graph_keeps_no_whole_weights() -> None:
    for deferred, inline in launch(_kept_for_backward, 2):
        assert 1 <= deferred <= 3 and 1 <= inline <= 3  # the next one may be prefetched


def test_a_closed_group_takes_no_layers() -> None:
    group = etp.init_group()
    group.close()
    with pytest.raises(tessera.InvalidArgumentError, match="is closed"):
        etp.Linear(8, 8, etp_group=group, weight_format="bf16")
