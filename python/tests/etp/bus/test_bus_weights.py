"""Sharded models on the tensor bus, as they are: into jobs of other layouts, and back within an update."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tessera
import torch
from jobs import Jobs, Rank
from tessera import etp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch_ranks import join_group

WAIT = 300


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(3, -1, -1), self.up.mT).sum()


class Model(nn.Module):
    """Sizes that divide by no number of ranks, one row, a stack, ties and what stays whole; the convolution is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 4)
        self.head = nn.Linear(4, 13, bias=False)
        self.head.weight = self.emb.weight
        self.up = nn.Linear(4, 17)
        self.one = nn.Linear(17, 1)
        self.conv = nn.Conv1d(4, 5, 3)
        self.low = nn.Linear(4, 7, bias=False, dtype=torch.bfloat16)
        self.experts = Experts()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        out = self.one(self.up(x).relu()).sum() + self.head(x).square().mean() + self.experts(x[0])
        return out + self.low(x.bfloat16()).float().sum()


def built() -> Model:
    torch.manual_seed(5)
    return Model()


def trained(model: nn.Module, steps: int = 1) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(step, step + 12).view(2, 6) % 13).backward()
        optimizer.step()
    return model


def expected(steps: int = 1) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in trained(built(), steps).state_dict().items()}


def sharded(rank: Rank, replicas: int, **options: Any) -> Any:
    join_group(rank)
    mesh = init_device_mesh("cpu", (replicas, rank.world // replicas), mesh_dim_names=("dp", "etp"))
    dp = etp.init_group(mesh=mesh["dp"]) if replicas > 1 else None
    return etp.shard_module_(built(), etp.init_group(mesh=mesh["etp"]), dp=dp, min_elements=0, **options)


def train(rank: Rank, replicas: int, mode: str) -> dict[str, Any]:
    """Sends after each of three steps, then takes back what the other job has made of it."""
    model = sharded(rank, replicas)
    with rank.connect("weights", peer="engine") as bus:
        batch = bus.register(model, "there", mode=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.arange(step, step + 12).view(2, 6) % 13).backward()
            optimizer.step()
            batch.send(timeout=WAIT)
            batch.wait_peers(version=step + 1, timeout=WAIT)
        batch.close()
        back = bus.register(model, "back", mode=mode)
        if rank.world > 1:
            with pytest.raises(tessera.InvalidArgumentError, match=r"receive within etp.update\(model\)"):
                back.recv(timeout=WAIT)
        if mode == "staged":
            back.stage(timeout=WAIT)
        with etp.update(model):
            back.commit() if mode == "staged" else back.recv(timeout=WAIT)
        stats = back.stats
        assert stats.bytes_moved == stats.bytes_lower_bound
    weights = {name: etp.whole(parameter).detach() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        out = model(torch.arange(12).view(2, 6)).item()
    torch.distributed.barrier()  # forwards are not collective: others may still read this rank's rows
    torch.distributed.destroy_process_group()
    return {"weights": weights, "out": out}


def serve(rank: Rank, layouts: dict[str, str]) -> dict[str, Any]:
    """Takes three versions, and sends the last one back with each weight doubled."""
    torch.set_num_threads(1)
    shapes = {name: (tuple(each.shape), each.dtype) for name, each in built().state_dict().items()}
    held = {}
    for name, (shape, dtype) in shapes.items():
        layout = tessera.Layout(layouts.get(name, f"tp={rank.world}:R"))
        held[name] = (torch.zeros(layout.local_shape(shape, rank.rank), dtype=dtype), layout, shape)
    taken = []
    with rank.connect("weights", peer="trainer") as bus:
        batch = bus.register(held, "there")
        for version in range(1, 4):
            assert batch.recv(min_version=version, timeout=WAIT) == version
            taken.append({name: each[0].clone() for name, each in held.items()})
            assert batch.stats.bytes_moved == version * batch.stats.bytes_lower_bound // version
        for each, _, _ in held.values():
            each.mul_(2)
        bus.register(held, "back").send(timeout=WAIT)
    return {"taken": taken, "owned": {name: each[1].owned(each[2], rank.rank) for name, each in held.items()}}


LAYOUTS = [
    (1, {}),
    (2, {"up.weight": "tp=2:S1", "emb.weight": "tp=2:S0", "experts.up": "ep=2:S0", "conv.weight": "tp=2:S2"}),
]


@pytest.mark.parametrize(
    ("world", "replicas", "engine", "mode"),
    [(1, 1, 1, "inplace"), (2, 1, 0, "inplace"), (2, 1, 1, "staged"), (4, 1, 1, "inplace"), (4, 2, 1, "staged")],
)
def test_every_version_arrives_and_comes_back(
    forked_jobs: Jobs, world: int, replicas: int, engine: int, mode: str
) -> None:
    engines, layouts = LAYOUTS[engine]
    forked_jobs.start("trainer", train, replicas, mode, world=world)
    forked_jobs.start("engine", serve, layouts, world=engines)
    results = forked_jobs.results()
    for version in range(3):
        whole = expected(version + 1)
        for rank in results["engine"]:
            for name, tensor in rank["taken"][version].items():
                assert_is_part(tensor, whole[name], rank["owned"][name], f"{name} of version {version + 1}")
    model = trained(built(), 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
        out = model(torch.arange(12).view(2, 6)).item()
    for rank in results["trainer"]:
        for name, parameter in model.named_parameters():
            assert torch.equal(rank["weights"][name], parameter), name
        assert rank["out"] == out


def assert_is_part(part: torch.Tensor, whole: torch.Tensor, owned: Any, where: str) -> None:
    index = [[i for begin, end in dim for i in range(begin, end)] for dim in owned]
    assert torch.equal(part, whole[tuple(torch.meshgrid(*map(torch.tensor, index), indexing="ij"))]), where


# --- states, ties and holds


def offer(rank: Rank, hold: str, what: str) -> Any:
    model = sharded(rank, 1)
    tensors = model if what == "model" else model.state_dict()
    with rank.connect("weights", peer="engine") as bus:
        batch = bus.register(tensors, hold=hold)
        batch.send(timeout=WAIT)
        names = batch.names
    torch.distributed.destroy_process_group()
    return names


def take(rank: Rank) -> dict[str, torch.Tensor]:
    held = {name: torch.zeros_like(tensor) for name, tensor in built().state_dict().items()}
    with rank.connect("weights", peer="trainer") as bus:
        bus.register(held).recv(timeout=WAIT)
    return held


@pytest.mark.parametrize(("hold", "what"), list(itertools.product(["strong", "weak"], ["model", "state"])))
def test_models_and_states_however_they_are_held(forked_jobs: Jobs, hold: str, what: str) -> None:
    forked_jobs.start("trainer", offer, hold, what, world=2)
    forked_jobs.start("engine", take)
    results = forked_jobs.results()
    whole = built().state_dict()
    for name, tensor in results["engine"][0].items():
        assert torch.equal(tensor, whole[name]), name
    assert set(results["trainer"][0]) == set(whole)


# --- refusals


class Sliced(nn.Module):
    """63 rows in three slices of 21: two ranks share the second slice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 21, 8))


def refused(rank: Rank) -> dict[str, str]:
    join_group(rank)
    group = etp.init_group()
    sliced = etp.shard_module_(Sliced(), group, min_elements=0, stacks=lambda name, parameter: False)
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "etp"))
    tp, one = alone["tp"].get_group(), etp.init_group(mesh=alone["etp"], name="one")
    column = etp.Linear(4, 6, parallel_mode="column", tp_group=tp, etp_group=one, weight_format="bf16")
    plain = etp.Linear(4, 6, parallel_mode="column", tp_group=tp)
    found = {}
    with rank.connect("weights", peer="engine") as bus:
        cases = {"sliced": sliced, "column": column, "plain": plain}
        cut = etp.shard_module_(nn.Linear(4, 40), group, min_elements=0)
        tensors = {"layout": {"w": (cut.weight, "etp=2:S0", (40, 4))}}
        for name, case in (cases | tensors).items():
            try:
                bus.register(case, name).close()
            except tessera.InvalidArgumentError as error:
                found[name] = str(error)
        matrix = {"weight": (etp.local(sliced.weight), sliced.weight.etp.layout, sliced.weight.etp.matrix)}
        bus.register(matrix, "matrix").send(timeout=WAIT)
    torch.distributed.destroy_process_group()
    return found


def take_matrix(rank: Rank) -> torch.Tensor:
    held = torch.zeros(63, 8)
    with rank.connect("weights", peer="trainer") as bus:
        bus.register({"weight": held}, "matrix").recv(timeout=WAIT)
    return held


def test_what_no_layout_describes_is_refused_with_the_way_out(forked_jobs: Jobs) -> None:
    forked_jobs.start("trainer", refused, world=2)
    forked_jobs.start("engine", take_matrix)
    results = forked_jobs.results()
    for rank in results["trainer"]:
        assert "ranks have rows [0, 32, 63] of (3, 21, 8), which begin within a slice of dim 0" in rank["sliced"]
        assert "tensor parallelism cuts it along dim 0, and the ETP group's layout does not" in rank["column"]
        assert "tensor parallelism cuts along dim 0, and nothing says which part" in rank["plain"]
        assert "it has a layout of its own, dp=1,etp=2:R,G0[0;32;40]" in rank["layout"]
    assert results["engine"][0].shape == (63, 8)
    assert results["engine"][0].any(dim=1).all()
