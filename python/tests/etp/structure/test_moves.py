"""Module.to() and its like of a sharded model: no move where it is there already, else refused before anything has
changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from tessera import etp
from torch_ranks import launch

SAME: dict[str, Callable[[torch.nn.Module], Any]] = {
    "cpu:0": lambda model: model.to("cpu:0"),
    "device": lambda model: model.to(torch.device("cpu")),
    "dtype": lambda model: model.to(torch.float32),
    "both": lambda model: model.to("cpu", torch.float32, non_blocking=True),
    "tensor": lambda model: model.to(torch.zeros(1)),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "part": lambda model: model[1].to("cpu:0"),
}
OTHER: dict[str, Callable[[torch.nn.Module], Any]] = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "device and dtype": lambda model: model.to("cpu:0", torch.bfloat16),
    "meta": lambda model: model.to("meta"),
    "shared": lambda model: model.share_memory(),
}


def _facts(model: torch.nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    return [(each.dtype, each.device.type, etp.whole(each).detach().sum().item()) for each in tensors]


def _moved(rank: int) -> dict[str, str]:
    found = {}
    with etp.init_group(timeout=20) as group:
        # What is whole comes first: torch would have converted it before it comes to a sharded parameter.
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        etp.shard_module_(model, group, buffers="own")
        before = _facts(model)
        for name, move in (SAME | OTHER).items():
            try:
                move(model)
                found[name] = "taken"
            except tessera.InvalidArgumentError as error:
                found[name] = str(error)
            if _facts(model) != before:
                found[name] += ", and changed"
        model(torch.randn(8, 64)).sum().backward()
    return found


@pytest.fixture(scope="module")
def moved() -> list[dict[str, str]]:
    return launch(_moved, 2)


@pytest.mark.parametrize("name", SAME)
def test_there_already(moved: list[dict[str, str]], name: str) -> None:
    assert [each[name] for each in moved] == ["taken", "taken"]


@pytest.mark.parametrize("name", OTHER)
def test_refused_before_anything_has_changed(moved: list[dict[str, str]], name: str) -> None:
    for each in moved:
        assert "1.weight" in each[name]
        assert not each[name].endswith("changed")
