"""Ranks that hold other parts than rows of all tensors: tensor parallelism of etp's layers, replicas, stages."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import tessera
import torch
from etp_models import WIDTH
from saved_files import bytes_of, optimizer_index, require_nothing_but_elements, tensors_of
from tessera import checkpoint, etp
from test_layers_parallel import TP, Model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import launch

ACTIVATIONS = ("gelu", "swiglu")


def _random(model: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def _step(model: nn.Module) -> torch.optim.Optimizer:
    """With gradients that are exact."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def _same(one: pathlib.Path, other: pathlib.Path) -> None:
    assert bytes_of(tensors_of(one)) == bytes_of(tensors_of(other))
    assert bytes_of(tensors_of(one, optimizer_index(one))) == bytes_of(tensors_of(other, optimizer_index(other)))
    assert require_nothing_but_elements(one) == require_nothing_but_elements(other)


# --- tensor parallelism


def _over_tp_and_etp(rank: int, folder: pathlib.Path) -> None:
    """Loads the plain model, makes a step, saves; loads that again, into another."""
    tp_group = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])][rank // TP]
    etp_group = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])][rank % TP]
    with etp.init_group(etp_group, timeout=60) as group:
        for activation in ACTIVATIONS:
            model = Model(activation, False, tp_group, group)
            checkpoint.load(model, None, folder / activation)
            optimizer = _step(model)
            checkpoint.save(model, optimizer, folder / f"{activation}-stepped")
            again = Model(activation, False, tp_group, group)
            its_optimizer = torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.5)
            checkpoint.load(again, its_optimizer, folder / f"{activation}-stepped")
            checkpoint.save(again, its_optimizer, folder / f"{activation}-again")


def test_tensor_parallelism_of_layers(tmp_path: pathlib.Path) -> None:
    for activation in ACTIVATIONS:
        checkpoint.save(_random(Model(activation, False, None, None), 1), None, tmp_path / activation)
    launch(functools.partial(_over_tp_and_etp, folder=tmp_path), 4)
    for activation in ACTIVATIONS:
        model = _random(Model(activation, False, None, None), 1)
        assert model.third.fc1_weight.shape[1] == WIDTH
        checkpoint.save(model, _step(model), tmp_path / f"{activation}-expected")
        for found in ("stepped", "again"):
            _same(tmp_path / f"{activation}-{found}", tmp_path / f"{activation}-expected")


# --- stages and replicas


def _stage(rank: int) -> nn.Module:
    """Of a pipeline: the parameters that a rank has, under the names of the whole model."""
    layers = nn.ModuleDict({f"layer{number}": nn.Linear(3 + number, 4) for number in range(3)})
    for number in range(3):
        if number % 2 != rank:
            del layers[f"layer{number}"]
    return layers


def _stages(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    model = _random(_stage(rank), rank)
    optimizer = _step(model)
    checkpoint.save(model, optimizer, folder / "stages")
    again = _stage(rank)
    its_optimizer = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.5)
    checkpoint.load(again, its_optimizer, folder / "stages")
    assert bytes_of(again.state_dict()) == bytes_of(model.state_dict())
    assert its_optimizer.param_groups[0]["lr"] == 0.5
    replicas = DistributedDataParallel(_random(nn.Linear(30, 40), 5))
    checkpoint.save(replicas, _step(replicas), folder / "replicas")
    found: dict[str, Any] = {"stage": bytes_of(model.state_dict())}
    # What only some ranks save is no whole model.
    with pytest.raises(tessera.MismatchError) as caught:
        checkpoint.save(_cut(rank), None, folder / "cut")
    found["not whole"] = str(caught.value)
    return found


def _cut(rank: int) -> nn.Module:
    """A DTensor over both ranks, which only one of them gives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Module()
    tensor = distribute_tensor(torch.ones(6, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    if rank == 0:
        model.register_parameter("cut", nn.Parameter(tensor))
    return model


def test_stages_and_replicas(tmp_path: pathlib.Path) -> None:
    results = launch(functools.partial(_stages, folder=tmp_path), 2)
    stages = results[0]["stage"] | results[1]["stage"]
    assert bytes_of(tensors_of(tmp_path / "stages")) == dict(sorted(stages.items()))
    whole = nn.ModuleDict({f"layer{number}": nn.Linear(3 + number, 4) for number in range(3)})
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.5)
    checkpoint.load(whole, optimizer, tmp_path / "stages")
    assert bytes_of(whole.state_dict()) == dict(sorted(stages.items()))
    assert len(optimizer.state_dict()["state"]) == 6
    expected = _random(nn.Linear(30, 40), 5)
    checkpoint.save(expected, _step(expected), tmp_path / "expected")
    _same(tmp_path / "replicas", tmp_path / "expected")
    for each in results:
        assert "tensor cut of shape (6, 2): the ranks hold 6 elements of 12" in each["not whole"]
