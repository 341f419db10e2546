"""Data parallelism of constructed layers over a second group: the bytes of one process of plain torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import etp_layers_scenarios
import etp_meta_scenarios
import pytest
import tessera
import torch
from etp_models import HIDDEN, WIDTH, Run, adamw, built, on_grid, plainly, scenarios_of
from tessera import etp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import launch

SCENARIOS = scenarios_of(vars(etp_layers_scenarios)) | scenarios_of(vars(etp_meta_scenarios))


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return on_grid(SCENARIOS, 2, 2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_are_those_of_plain_torch(found: dict[str, list[Any]], name: str) -> None:
    expected = plainly(SCENARIOS[name], 4)
    for rank in found[name]:
        assert rank == expected


def replicas_only(run: Run) -> Any:
    """ETP groups of one rank: nothing is gathered."""
    model = built(lambda: etp_layers_scenarios.Layers(run))
    run.train(model, adamw(model.parameters()), accumulation=2)
    gathered = 0 if run.group is None else etp.report(model).bytes_gathered
    return run.weights(model), gathered


def test_groups_of_one_rank() -> None:
    expected = plainly(replicas_only, 2)
    assert on_grid({"replicas": replicas_only}, 2, 1)["replicas"] == [expected] * 2


def _said(act: Callable[[], Any]) -> str:
    with pytest.raises((tessera.InvalidArgumentError, tessera.MismatchError)) as caught:
        act()
    return str(caught.value)


def _refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "etp"))
    with (
        etp.init_group(mesh=mesh["etp"], timeout=20) as group,
        etp.init_group(mesh=mesh["etp"], name="along", timeout=20) as along,
        etp.init_group(mesh=mesh["dp"], name="dp", timeout=20) as dp,
    ):

        def of_another_seed() -> None:
            torch.manual_seed(rank // 2)
            etp.Linear(8, 8, etp_group=group, dp=dp, name="seeded")

        def with_a_layer(**options: Any) -> Any:
            torch.manual_seed(0)
            return torch.nn.Sequential(etp.Linear(8, 8, etp_group=group, **options), torch.nn.Linear(64, 64))

        return [
            _said(lambda: etp.Linear(8, 8, etp_group=group, dp=mesh["dp"])),
            _said(lambda: etp.Linear(8, 8, etp_group=group, dp=along)),
            _said(lambda: etp.Linear(8, 8, dp=dp)),
            _said(of_another_seed),
            _said(lambda: etp.shard_module_(with_a_layer(), group, dp=dp)),
            _said(lambda: etp.shard_module_(with_a_layer(dp=dp), group)),
        ]


def test_what_dp_may_not_be() -> None:
    expected = [
        "Linear: dp=.*: give what etp.init_group",
        "is not orthogonal to",
        "Linear: dp=Group.* needs an etp_group=",
        "seeded.weight differs between ranks",
        "layer 0 was constructed with 1 replicas, and the rest of the model would have 2: give both",
        "layer 0 was constructed with 2 replicas, and the rest of the model would have 1: give both",
    ]
    for rank in launch(_refused, 4):
        for text, pattern in zip(rank, expected, strict=True):
            assert re.search(pattern, text), text


def _train(run: Run, wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
    """A layer with whole parameters and sharded ones."""

    def loss(model: Any, number: int) -> torch.Tensor:
        return model(torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(number))).sin().sum()

    model = built(lambda: torch.nn.Sequential(etp.LayerNormMLP(WIDTH, HIDDEN, etp_group=run.group)))
    run.train(wrap(model), torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    return [run.whole(each).detach().clone() for each in model.parameters()]


def _in_ddp(rank: int) -> tuple[str, list[torch.Tensor]]:
    with etp.init_group(timeout=30) as group:

        def wrap(model: torch.nn.Module) -> torch.nn.Module:
            return DistributedDataParallel(etp.shard_module_(model, group))

        refused = _said(lambda: DistributedDataParallel(etp.Linear(WIDTH, HIDDEN, etp_group=group)))
        return refused, _train(Run(2, rank, group), wrap)


def test_in_distributed_data_parallel() -> None:
    torch.set_num_threads(1)
    expected = _train(Run(2), lambda model: model)
    for refused, found in launch(_in_ddp, 2):
        assert "give the model to shard_module_() first, which leaves such layers as they are" in refused
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
