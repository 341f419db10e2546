"""etp.Muon: bit for bit torch.optim.Muon in one process, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import etp_muon_scenarios
import pytest
import tessera
import torch
from etp_models import on_grid, on_ranks, plainly, scenarios_of
from tessera import etp
from tessera.etp import muon
from torch_ranks import launch

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
SCENARIOS = scenarios_of(vars(etp_muon_scenarios))


@pytest.fixture(scope="module", params=(1, 2, 3))
def found(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Any]]]:
    """Return what each scenario gives on each rank."""
    return request.param, on_ranks(SCENARIOS, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_its_steps_are_those_of_torchs_in_one_process(found: tuple[int, dict[str, list[Any]]], name: str) -> None:
    size, ranks = found
    expected = plainly(SCENARIOS[name], size)
    for rank in ranks[name]:
        assert rank == expected


def test_its_steps_on_replicas_are_those_of_torchs_in_one_process() -> None:
    scenarios = {name: SCENARIOS[name] for name in ("muon", "groups_and_missing_gradients")}
    ranks = on_grid(scenarios, 2, 2)
    for name, scenario in scenarios.items():
        expected = plainly(scenario, 4)
        assert all(rank == expected for rank in ranks[name])


def test_plain_parameters_are_stepped_as_by_torch() -> None:
    torch.manual_seed(0)
    plain = [torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 33), (33, 7), (16, 16))]
    own = copy.deepcopy(plain)
    optimizers = [torch.optim.Muon(plain, lr=torch.tensor(0.1)), etp.Muon(own, lr=torch.tensor(0.1))]
    for _ in range(3):
        for first, second in zip(plain, own, strict=True):
            first.grad = torch.randn(first.shape)
            second.grad = first.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(first, second) for first, second in zip(plain, own, strict=True))
    assert pickle.loads(pickle.dumps(optimizers[1])).param_groups[0]["ns_steps"] == 5


def test_work_is_shared_evenly() -> None:
    matrices = [torch.empty(rows, 64) for rows in (64, 64, 64, 16, 16, 16, 16)]
    plan = muon._Plan(matrices, 3, 0)
    assert [matrix.owner for matrix in plan.matrices] == [0, 1, 2, 0, 1, 2, 0]
    assert plan.results == [4096 + 2 * 1024, 4096 + 1024, 4096 + 1024]


REFUSED = {
    "a vector": (lambda: etp.Muon([torch.nn.Parameter(torch.ones(3))]), r"a parameter is \(3,\).*AdamW"),
    "a learning rate": (
        lambda: etp.Muon([torch.nn.Parameter(torch.ones(3, 3))], lr=-1.0),
        "lr is -1.0: give 0 or more",
    ),
    "rates": (
        lambda: etp.Muon([torch.nn.Parameter(torch.ones(3, 3))], lr=torch.ones(2)),
        "lr has 2 elements: give one number",
    ),
    "iterations": (lambda: etp.Muon([torch.nn.Parameter(torch.ones(3, 3))], ns_steps=100), "less than 100 steps"),
    "a function": (
        lambda: etp.Muon([torch.nn.Parameter(torch.ones(3, 3))], adjust_lr_fn="x"),
        "give 'original' or 'match_rms_adamw'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(tessera.InvalidArgumentError, match=message):
        call()


def _owners(rank: int) -> Any:
    """Return how many matrices this rank has orthogonalised."""
    counts = []
    original = muon._orthogonalised

    def counted(matrix: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        counts.append(tuple(matrix.shape))
        return original(matrix, options)

    muon._orthogonalised = counted
    with etp.init_group(timeout=20) as group:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(8)])
        etp.shard_module_(model, group)
        optimizer = etp.Muon(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        return len(counts)


def test_each_matrix_is_orthogonalised_by_one_rank() -> None:
    assert launch(_owners, 2) == [4, 4]
