"""What FSDP2, tensor parallelism and their combinations hold: saved, and loaded in any other way, ETP and plain torch
among them."""

from __future__ import annotations

import functools
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import as_bytes
from saved_files import bytes_of, optimizer_index, require_nothing_but_elements, tensors_of
from tessera import checkpoint, etp
from test_torch_parallel import WAYS, WORLD, Block, fill
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch_ranks import launch

Make = Callable[[nn.Module], nn.Module]


def _untied(filled: bool) -> Block:
    torch.manual_seed(0)
    model = Block()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # parallelize_module() breaks the tie, too
    if filled:
        fill(model)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """With gradients that are exact, so that every way gives the same bytes."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def _made(make: Make, filled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(_untied(filled))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """Weights and moments, gathered by torch or etp."""

    def gathered(tensor: Any, parameter: Any) -> bytes:
        if isinstance(parameter, etp.LogicalTensor):
            return as_bytes(etp.whole(tensor))
        return as_bytes(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    found = {}
    for name, parameter in model.named_parameters():
        found[name] = gathered(parameter, parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = gathered(value, parameter)
    return found


def _with_etp(group: etp.Group) -> Make:
    return lambda model: etp.shard_module_(model, group, min_elements=2)


def _everywhere(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    with etp.init_group(timeout=60) as group:
        ways = {**WAYS, "etp": _with_etp(group)}
        for way, make in ways.items():
            model, optimizer = _made(make, filled=True)
            _step(model, optimizer)
            checkpoint.save(model, optimizer, folder / way.replace(" ", "-"))
        found: dict[str, Any] = {}
        for number, (way, make) in enumerate(ways.items()):
            model, optimizer = _made(make, filled=False)
            source = [*ways][number - 1]  # each from another
            checkpoint.load(model, optimizer, folder / source.replace(" ", "-"))
            found[way] = _whole(model, optimizer)
            checkpoint.load(model, optimizer, folder / "plain")
            assert _whole(model, optimizer) == found[way]
            _step(model, optimizer)
            found[f"{way}, stepped"] = _whole(model, optimizer)
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[dict[str, bytes]]]:
    """After one step and two, in plain torch; after one, saved."""
    folder = tmp_path_factory.mktemp("ways")
    model, optimizer = _made(lambda model: model, filled=True)
    found = []
    for each in (True, False):
        _step(model, optimizer)
        found.append(_whole(model, optimizer))
        if each:
            checkpoint.save(model, optimizer, folder / "plain")
    return folder, found


@pytest.fixture(scope="module")
def results(expected: Any) -> list[dict[str, Any]]:
    return launch(functools.partial(_everywhere, folder=expected[0]), WORLD)


@pytest.mark.parametrize("way", [*WAYS, "etp"])
def test_it_is_saved_as_the_plain_model(way: str, results: Any, expected: Any) -> None:
    folder, plain = expected[0] / way.replace(" ", "-"), expected[0] / "plain"
    assert bytes_of(tensors_of(folder)) == bytes_of(tensors_of(plain))
    states = [bytes_of(tensors_of(each, optimizer_index(each))) for each in (folder, plain)]
    assert states[0] == states[1]
    assert require_nothing_but_elements(folder) == require_nothing_but_elements(plain)


@pytest.mark.parametrize("way", [*WAYS, "etp"])
def test_it_is_loaded_from_another_way_and_goes_on(way: str, results: Any, expected: Any) -> None:
    assert [each[way] for each in results] == [expected[1][0]] * WORLD
    assert [each[f"{way}, stepped"] for each in results] == [expected[1][1]] * WORLD


def _strided(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    """Placements that may stand for two cuts: local shapes of some ranks fit both."""
    mesh = init_device_mesh("cpu", (3, 2))
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    found: dict[str, Any] = {"layouts": []}
    model, again = nn.Module(), nn.Module()
    for rows in range(3, 16):
        whole = torch.arange(rows * 3.0).view(rows, 3)
        for each, full in ((model, whole), (again, torch.zeros_like(whole))):
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            parameter: Any = nn.Parameter(tensor)
            parameter._spec.use_strided_shard_as_shard_order = True  # as torch before 2.11 always took them
            each.register_parameter(f"rows{rows}", parameter)
        found["layouts"].append(str(tessera.layout_of(model.get_parameter(f"rows{rows}"))))
    checkpoint.save(model, None, folder)
    checkpoint.load(again, None, folder)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        found[name] = torch.equal(one._local_tensor, other._local_tensor)
    return found


@pytest.mark.skipif(
    "src_data_rank" not in inspect.signature(distribute_tensor).parameters, reason="each rank cannot cut its own tensor"
)
def test_placements_that_may_stand_for_two_cuts(tmp_path: pathlib.Path) -> None:
    results = launch(functools.partial(_strided, folder=tmp_path), WORLD)
    layouts = [each.pop("layouts") for each in results]
    assert any(each != layouts[0] for each in layouts)  # some ranks cannot know
    assert all(all(each.values()) for each in results)
    for rows in range(3, 16):
        expected = torch.arange(rows * 3.0).view(rows, 3)
        assert torch.equal(tensors_of(tmp_path)[f"rows{rows}"], expected), rows
