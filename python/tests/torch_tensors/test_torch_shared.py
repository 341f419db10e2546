"""share_() moves the storages of a model that FSDP2 shards, whatever has been done with it, and nobody notices."""

from __future__ import annotations

from typing import Any

import pytest
import tessera
import torch
from tessera import _core
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_ranks import launch

WORLD = 2
STEPS = 3
# When it is shared: before anything, with a backward pending, after the step of the optimiser.
MOMENTS = ["never", "made", "pending", "stepped"]


class Model(nn.Module):
    """Tied weights, an uneven dim, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.down(self.up(self.embedding(tokens)).relu())) * self.scale
        return out


def plain(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def is_shared(tensor: Any) -> bool:
    held = local(tensor)
    return held.numel() == 0 or _core.in_shared_memory(held.data_ptr(), held.numel() * held.itemsize)


def trained(moment: str) -> dict[str, Any]:
    torch.manual_seed(5)
    model = Model()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    if moment == "made":
        tessera.share_(model)
    losses = []
    for step in range(STEPS):
        loss = model(torch.tensor([[1, 2, 3, 12]])).square().mean()
        if moment == "pending" and step == 1:
            tessera.share_(model)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if moment == "stepped" and step == 1:
            tessera.share_(model)
        losses.append(loss.item())
    return {
        "losses": losses,
        "weights": {name: plain(tensor) for name, tensor in model.state_dict().items()},
        "moments": [plain(state["exp_avg"]) for state in optimiser.state.values()],
        "tied": model.head.weight is model.embedding.weight,
        "shared": {name: is_shared(tensor) for name, tensor in model.state_dict().items()},
    }


def every_moment(rank: int) -> dict[str, dict[str, Any]]:
    return {moment: trained(moment) for moment in MOMENTS}


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    return launch(every_moment, WORLD)


@pytest.mark.parametrize("moment", MOMENTS[1:])
def test_training_goes_on_as_if_nothing_had_moved(moment: str, results: list[dict[str, dict[str, Any]]]) -> None:
    for result in results:
        moved, left = result[moment], result["never"]
        assert moved["losses"] == left["losses"]
        for name, tensor in left["weights"].items():
            assert torch.equal(moved["weights"][name], tensor), name
        for one, other in zip(moved["moments"], left["moments"], strict=True):
            assert torch.equal(one, other)
        assert moved["tied"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_all_storages_are_shared_from_then_on(moment: str, results: list[dict[str, dict[str, Any]]]) -> None:
    for result in results:
        assert set(result[moment]["shared"].values()) == {moment != "never"}
