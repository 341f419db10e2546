"""FSDP2, tensor parallelism, HSDP and their combinations, made by torch: the layouts that they really have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch_ranks import Held, by_name, check, launch, record

TRAINS = hasattr(torch.cpu.Stream, "record_event")  # else FSDP2 does on GPUs only (torch 2.6)
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 12]])
WORLD = 6  # three data-parallel ranks by two tensor-parallel ones: what is uneven shows
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(),
}
Results = list[dict[str, dict[str, dict[str, Held]]]]  # by rank, way, stage and name


class Block(nn.Module):
    """Sizes with no common divisors, ties, and a norm that no plan mentions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 14)
        self.down = nn.Linear(14, 6)
        self.tail = nn.Linear(6, 7)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.tail(self.down(self.up(self.norm(x)).relu()))


def fill(model: nn.Module) -> None:
    """Every element of every parameter its own, and exact in any sum or product that the tests make."""
    first = 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(first, first + parameter.numel()).reshape(parameter.shape) / 16)
            first += parameter.numel()


def steps(make: Any) -> dict[str, dict[str, Held]]:
    """What the ranks hold of a model: as it was parallelised, after a step with gradients that are known, and after one
    with those of a real backward."""
    torch.manual_seed(0)
    plain = Block()
    fill(plain)
    wholes = {name: parameter.detach().clone() for name, parameter in plain.named_parameters(remove_duplicate=False)}
    model = make(plain)
    found = {"made": held(model, wholes)}

    exact = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    exact.step()
    found["stepped"] = held(model, {name: whole * 0.5 for name, whole in wholes.items()})

    if not TRAINS and any(isinstance(each, FSDPModule) for each in model.modules()):
        with pytest.raises(AttributeError, match="record_event"):
            model(TOKENS)
        return found
    for parameter in model.parameters():
        parameter.grad = None
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    out = model(TOKENS)
    out.square().mean().backward()
    adam.step()
    found["trained"] = held(model, None)
    moments = {name: adam.state[parameter].get("exp_avg") for name, parameter in model.named_parameters()}
    found["moments"] = {
        name: record(moment, gathered(moment)) for name, moment in moments.items() if isinstance(moment, DTensor)
    }
    return found


def held(model: nn.Module, wholes: Mapping[str, torch.Tensor] | None) -> dict[str, Held]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: record(parameter, gathered(parameter) if wholes is None else wholes[name])
        for name, parameter in parameters.items()
        if isinstance(parameter, DTensor)
    }


def gathered(tensor: Any) -> torch.Tensor:
    """The whole tensor, according to torch."""
    whole: torch.Tensor = tensor.full_tensor()
    return whole.detach()


# --- ways to parallelise it


def fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    return shard(model, mesh)


def hsdp(model: nn.Module) -> nn.Module:
    return shard(model, init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard")))


def tp(model: nn.Module) -> nn.Module:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # parallelize_module breaks ties
    return parallelize_module(model, init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))["tp"], PLAN)


def fsdp_tp(model: nn.Module) -> nn.Module:
    return shard_over_tp(model, init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp")), "dp")


def hsdp_tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 3, 2), mesh_dim_names=("replicate", "shard", "tp"))
    return shard_over_tp(model, mesh, ("replicate", "shard"))


def shard_over_tp(model: nn.Module, mesh: DeviceMesh, data: Any) -> nn.Module:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    parallelize_module(model, mesh["tp"], PLAN)
    return shard(model, mesh[data])


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in (model.up, model.down):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WAYS = {"fsdp": fsdp, "hsdp": hsdp, "tp": tp, "fsdp over tp": fsdp_tp, "hsdp over tp": hsdp_tp}
UNEVEN = "FSDP+TP sharding does not support uneven sharding"  # of torch 2.6 to FSDP2 over tensor parallelism
REFUSED = {way: WAYS.pop(way) for way in [*WAYS] if way.endswith("over tp") and UNEVEN in inspect.getsource(FSDPParam)}


def all_ways(rank: int) -> dict[str, dict[str, dict[str, Held]]]:
    return {way: steps(make) for way, make in WAYS.items()}


@pytest.fixture(scope="module")
def results() -> Results:
    return launch(all_ways, WORLD)


def names_in(stages: Sequence[Mapping[str, Held]]) -> list[str]:
    return sorted({name for stage in stages for name in stage})


@pytest.mark.parametrize(
    ("way", "stage"),
    [
        (way, stage)
        for way in WAYS
        for stage in ("made", "stepped", "trained", "moments")
        if TRAINS or way == "tp" or stage in ("made", "stepped")
    ],
)
def test_every_rank_holds_exactly_what_its_layout_says(way: str, stage: str, results: Results) -> None:
    stages = [result[way][stage] for result in results]
    names = names_in(stages)
    assert len(names) >= 7
    for name in names:
        check(by_name(stages, name))


@pytest.mark.parametrize("way", WAYS)
def test_the_layout_outlives_an_optimiser_step(way: str, results: Results) -> None:
    for result in results:
        before, after = result[way]["made"], result[way].get("trained", result[way]["stepped"])
        assert {name: held.layout for name, held in before.items()} == {
            name: held.layout for name, held in after.items()
        }
        changed = [name for name in before if not (before[name].whole == after[name].whole).all()]
        assert "tail.weight" in changed or way == "tp"


# What torch says, and the layouts that follow, of all ranks.
STRIDED = "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
EXPECTED = [
    ("fsdp", "up.weight", "(Shard(dim=0),)", {"dp=6:S0"}),
    ("hsdp", "up.weight", "(Replicate(), Shard(dim=0))", {"replicate=2,shard=3:R,S0"}),
    ("tp", "up.weight", "(Shard(dim=0),)", {"tp=2:S0", "tp=2@2-3:S0", "tp=2@4-5:S0"}),
    ("tp", "down.weight", "(Shard(dim=1),)", {"tp=2:S1", "tp=2@2-3:S1", "tp=2@4-5:S1"}),
    ("tp", "norm.weight", "(Replicate(),)", {"tp=2:R", "tp=2@2-3:R", "tp=2@4-5:R"}),
    ("fsdp over tp", "up.weight", STRIDED, {"dp=3,tp=2:S0*2,S0"}),
    ("fsdp over tp", "up.bias", STRIDED, {"dp=3,tp=2:S0*2,S0"}),
    ("fsdp over tp", "down.weight", "(Shard(dim=0), Shard(dim=1))", {"dp=3,tp=2:S0,S1"}),
    ("fsdp over tp", "down.bias", "(Shard(dim=0), Replicate())", {"dp=3,tp=2:S0,R"}),
    # A module that no plan mentions is sharded on the mesh of only those ranks that share it.
    ("fsdp over tp", "tail.weight", "(Shard(dim=0),)", {"dp=3@0,2,4:S0", "dp=3@1,3,5:S0"}),
    (
        "hsdp over tp",
        "up.weight",
        "(Replicate(), _StridedShard(dim=0, sf=2), Shard(dim=0))",
        {"replicate=1,shard=3,tp=2:R,S0*2,S0"},
    ),
    # 13 rows: what FSDP2 cuts is not what distribute_tensor() cuts for the same placements. 7 and 6 rows are cut by dp,
    # not three pieces of 3 + 2, 3 + 2 and 1 + 2 rows by tp.
    ("fsdp over tp", "embedding.weight", STRIDED, {"tp=2,dp=3@0,2,4,1,3,5:S0,S0"}),
]


def _refused(rank: int, way: str) -> str:
    with pytest.raises(NotImplementedError) as caught:
        steps(REFUSED[way])
    return str(caught.value)


@pytest.mark.skipif(not REFUSED, reason="this torch refuses none of these ways")
@pytest.mark.parametrize("way", ["fsdp over tp", "hsdp over tp"])
def test_what_torch_refuses(way: str) -> None:
    assert all(UNEVEN in each for each in launch(functools.partial(_refused, way=way), WORLD))


@pytest.mark.parametrize(("way", "name", "placements", "layouts"), [each for each in EXPECTED if each[0] in WAYS])
def test_torchs_placements_come_as_they_are(
    way: str, name: str, placements: str, layouts: set[str], results: Results
) -> None:
    held = [result[way]["made"][name] for result in results]
    assert {each.placements for each in held} == {placements}
    assert {each.layout for each in held} == layouts


def test_how_many_ranks_hold_an_element(results: Results) -> None:
    for way, name, holders in (
        ("fsdp", "up.weight", 1),
        ("hsdp", "up.weight", 2),
        ("tp", "up.weight", 3),
        ("tp", "norm.weight", 6),
        ("fsdp over tp", "up.weight", 1),
        ("fsdp over tp", "down.bias", 2),
        ("fsdp over tp", "tail.bias", 2),
        ("fsdp over tp", "embedding.weight", 1),
        ("hsdp over tp", "embedding.weight", 1),
    ):
        if way in REFUSED:
            continue
        check(by_name([result[way]["made"] for result in results], name), holders=holders)


def test_fsdp2_keeps_ties(results: Results) -> None:
    for result in results:
        made = result["fsdp"]["made"]
        assert (made["head.weight"].elements == made["embedding.weight"].elements).all()
        assert made["head.weight"].layout == made["embedding.weight"].layout
