"""torch's meshes and placements in place of Tessera's; what torch may add one day is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tessera
import torch
import torch.distributed
from tessera._tensors.foreign import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    """Rank 5 of 8, without the others: meshes and specs need no communication."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    torch.distributed.destroy_process_group()


def test_axes_names_and_ranks_come_along() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    assert device_mesh(mesh) == tessera.Mesh((2, 4), names=("dp", "tp"))
    assert device_mesh(mesh["tp"]) == tessera.Mesh((4,), names=("tp",), ranks=(4, 5, 6, 7))
    assert device_mesh(mesh["dp"]) == tessera.Mesh((2,), names=("dp",), ranks=(1, 5))
    assert device_mesh(mesh["dp", "tp"]._flatten("all")) == tessera.Mesh((8,), names=("all",))


def test_other_orders_and_no_names() -> None:
    assert device_mesh(DeviceMesh("cpu", [[3, 1], [0, 2]])) == tessera.Mesh((2, 2), ranks=(3, 1, 0, 2))
    assert device_mesh(DeviceMesh("cpu", [6, 7])) == tessera.Mesh((2,), ranks=(6, 7))


def test_names_that_no_text_could_say_are_left_out() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data parallel", "dp_shard_cp", "2"))
    assert device_mesh(mesh).names == ("", "dp_shard_cp", "")
    layout = tessera.Layout(mesh, [Replicate(), Shard(0), Shard(1)])
    assert tessera.Layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ((Shard(0), Replicate()), "S0,R"),
        ((Shard(-1), Shard(1)), "S-1,S1"),
        ((_StridedShard(0, split_factor=4), Shard(0)), "S0*4,S0"),
        ((Partial(), Partial("sum")), "Psum,Psum"),
        ((Partial("avg"), Partial("avg")), "Pavg,Pavg"),
        ((Partial("max"), Replicate()), "Pmax,R"),
        ((Partial("min"), Replicate()), "Pmin,R"),
        ((Partial("product"), Replicate()), "Pproduct,R"),
    ],
)
def test_torchs_placements_are_taken_as_they_are(placements: Any, text: str) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    assert tessera.Layout(mesh, placements) == tessera.Layout(f"dp=2,tp=4:{text}")
    assert str(tessera.Layout(mesh, list(placements))) == f"dp=2,tp=4:{text}"


def test_torchs_and_tesseras_may_be_mixed() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    expected = tessera.Layout("dp=2,tp=4:R,S1")
    assert tessera.Layout(mesh, (tessera.Replicate(), Shard(1))) == expected
    assert tessera.Layout(tessera.Mesh((2, 4), names=("dp", "tp")), (Replicate(), Shard(1))) == expected
    plan = tessera.plan((8, 8), torch.bfloat16, (mesh, (Replicate(), Shard(1))), "tp=2:S0")
    assert plan.src == expected.bind((8, 8))


# --- what torch may add


class Diagonal(Placement):
    """A placement of a later torch."""


class RoundRobin(Shard):
    """One that derives from what is known today, and means something else."""


@pytest.mark.parametrize(
    ("unknown", "named"),
    [
        (Diagonal(), "Diagonal"),
        (RoundRobin(0), "RoundRobin"),
        (_MaskPartial(offset_shape=torch.Size([4])), "_MaskPartial"),
        (Partial("median"), "Partial"),
    ],
)
def test_an_unknown_placement_is_an_error_that_names_it(unknown: Any, named: str) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    with pytest.raises(
        tessera.InvalidArgumentError, match=rf"placement .*{named}.* is not one that Tessera knows: Replicate, Shard"
    ):
        tessera.Layout(mesh, [unknown])


def test_so_it_is_in_a_dtensor(loopback: Any) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    tensor._spec.placements = (RoundRobin(0),)
    with pytest.raises(tessera.InvalidArgumentError, match=r"RoundRobin\) is not one that Tessera knows"):
        tessera.layout_of(tensor)
    with pytest.raises(tessera.InvalidArgumentError, match=r"tensor w: placement .*RoundRobin"):
        loopback.register({"w": tensor})


def test_only_dtensors_have_layouts_of_their_own() -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=r"a torch\.Tensor has no layout of its own"):
        tessera.layout_of(torch.ones(2))  # type: ignore[arg-type]


# --- a DTensor and the job


def spread(whole: torch.Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    local = whole.chunk(8)[5].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def test_torchs_rank_must_be_the_jobs(loopback: Any) -> None:
    """The fixture's job has one rank, 0; torch says 5."""
    with pytest.raises(
        tessera.InvalidArgumentError,
        match=r"tensor w: torch's mesh \(dp=8:S0\) says that this process is its rank 5, its job that it is rank 0: "
        r"connect\(\) with torch's rank and world, or register \(local tensor, layout over the job's ranks, "
        r"global shape\)",
    ):
        loopback.register({"w": spread(torch.ones(16, 2))})


def test_a_rank_that_torch_leaves_out_must_be_left_out(loopback: Any) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    outside = DTensor.from_local(torch.empty(0), mesh, [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1))
    with pytest.raises(
        tessera.InvalidArgumentError, match=r"says that this process is not in it, its job that it is rank 0"
    ):
        loopback.register({"w": outside})


def test_a_dtensor_that_does_not_hold_what_its_placements_say(loopback: Any) -> None:
    tensor = spread(torch.ones(16, 2))
    at = tessera._tensors.tensors.source_of("w", tensor).locate()
    at.check("w", at.layout, (16, 2), 5)
    with pytest.raises(
        tessera.InvalidArgumentError,
        match=r"tensor w: dp=8:S0 gives rank 5 \(3, 2\) of a tensor of shape \(24, 2\); what it holds is \(2, 2\)",
    ):
        at.check("w", at.layout, (24, 2), 5)
