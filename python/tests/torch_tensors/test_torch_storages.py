"""What hold="weak" keeps of torch's tensors: their storages weakly, no memory, no graph. And the version counters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import tessera
import torch
import torch.distributed
from loopback import Loopback, move
from tessera._tensors.tensors import source_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

CHANGED = "modified (by an )?inplace"


def gone(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


# --- storages


def test_a_registered_storage_may_be_freed(loopback: Loopback) -> None:
    tensor = torch.ones(5)
    watched = gone(tensor)
    with loopback.register({"w": tensor}, hold="weak") as batch:
        del tensor
        gc.collect()
        assert watched.expired()
        assert batch.names == ("w",)


def test_a_freed_storage_is_an_error_at_the_next_transfer(loopback: Loopback) -> None:
    state, taken = {"w": torch.ones(5)}, {"w": torch.zeros(5)}
    sender, receiver = loopback.batches(state, taken, "weak")
    with sender, receiver:
        move(sender, receiver)
        state.clear()
        with pytest.raises(
            tessera.InvalidArgumentError,
            match=r"tensor w: its memory was freed; keep the tensor, or register it with hold='strong'",
        ):
            sender.send()


def test_what_one_view_keeps_is_not_freed(loopback: Loopback) -> None:
    whole = torch.arange(6.0)
    state = {"w": whole[2:4]}
    taken = torch.zeros(2)
    sender, receiver = loopback.batches(state, {"w": taken}, "weak")
    with sender, receiver:
        state.clear()
        move(sender, receiver)
    assert taken.tolist() == [2, 3]


@pytest.mark.parametrize("size", [0, 8, 400])
def test_a_resized_storage_is_an_error(size: int, loopback: Loopback) -> None:
    tensor, taken = torch.ones(5), torch.zeros(5)
    sender, receiver = loopback.batches({"w": tensor}, {"w": taken}, "weak")
    with sender, receiver:
        move(sender, receiver)
        tensor.untyped_storage().resize_(size)
        with pytest.raises(
            tessera.InvalidArgumentError,
            match=f"tensor w: its storage was resized from 20 to {size} bytes .*; register it",
        ):
            sender.send()


def test_a_receiver_is_told_too(loopback: Loopback) -> None:
    sent, state = torch.ones(5), {"w": torch.ones(5)}
    sender, receiver = loopback.batches({"w": sent}, state, "weak")
    with sender, receiver:
        move(sender, receiver)
        state.clear()
        with pytest.raises(tessera.InvalidArgumentError, match="tensor w: its memory was freed"):
            receiver.recv(timeout=5)


def test_a_storage_that_moves_is_followed(loopback: Loopback) -> None:
    """As share_memory_() moves one: aliases follow, and so does a batch."""
    tensor = torch.arange(5.0)
    before = tensor.data_ptr()
    source = source_of("w", tensor[1:])
    tensor.share_memory_()
    assert tensor.data_ptr() != before
    assert source.locate().address == tensor.data_ptr() + 4


def test_a_transfer_keeps_memory_until_it_ends(loopback: Loopback) -> None:
    tensor, taken = torch.arange(5.0), torch.zeros(5)
    watched = gone(tensor)
    sender, receiver = loopback.batches({"w": tensor}, {"w": taken}, "weak")
    with sender, receiver:
        move(sender, receiver)
        taken.zero_()
        handle = sender.send(blocking=False)
        del tensor
        gc.collect()
        assert not watched.expired()
        receiver.recv()
        handle.wait()
        assert taken.tolist() == [0, 1, 2, 3, 4]
        del handle
        gc.collect()
        assert watched.expired()


def test_tied_names_are_one_tensor(loopback: Loopback) -> None:
    """Two names of one storage arrive in two tensors, or in one; and one name does for two that are tied there."""
    tied = torch.arange(4.0)
    sent = {"embedding": tied, "head": tied.view(4)}
    apart = {"embedding": torch.zeros(4), "head": torch.zeros(4)}
    loopback.transfer(sent, apart)
    assert apart["embedding"].tolist() == apart["head"].tolist() == [0, 1, 2, 3]
    together = torch.zeros(4)
    loopback.transfer(sent, {"embedding": together, "head": together})
    assert together.tolist() == [0, 1, 2, 3]
    together.zero_()
    sender, receiver = loopback.batches({"embedding": tied}, {"embedding": together, "head": together})
    with sender, receiver:
        move(sender, receiver)
        assert receiver.names == ("embedding",)
        assert receiver.skipped == ("head",)
    assert together.tolist() == [0, 1, 2, 3]


# --- version counters


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Of one rank: this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    torch.distributed.destroy_process_group()


def leaf() -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(4, 4))


def spread(mesh: Any) -> torch.Tensor:
    return torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))


def forward(weight: Any) -> Any:
    """A loss whose backward needs the weight."""
    x: Any = torch.ones(2, 4, requires_grad=True)
    if isinstance(weight, DTensor):
        x = distribute_tensor(x, weight.device_mesh, [Replicate()])
    return torch.nn.functional.linear(x, weight).sum()


def state_of(weight: torch.Tensor) -> dict[str, Any]:
    """What state_dict() would give: detached, and gone once it is registered."""
    return {"w": weight.detach()}


def module_of(weight: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    module.w = weight
    return module


@pytest.mark.parametrize("kind", ["plain", "DTensor"])
@pytest.mark.parametrize("register", [lambda w: {"w": w}, state_of, module_of])
def test_a_pending_backward_raises_after_a_receive(kind: str, register: Any, mesh: Any, loopback: Loopback) -> None:
    weight, sent = leaf() if kind == "plain" else spread(mesh), torch.full((4, 4), 3.0)
    sender, receiver = loopback.batches({"w": sent}, register(weight))
    with sender, receiver:
        forward(weight).backward()
        pending = forward(weight)
        move(sender, receiver)
        with pytest.raises(RuntimeError, match=CHANGED):
            pending.backward()
        forward(weight).backward()  # with the new values
    whole: Any = weight.detach()
    assert (whole.to_local() if kind == "DTensor" else whole).tolist() == [[3.0] * 4] * 4


def test_also_one_that_went_through_the_local_tensor(mesh: Any, loopback: Loopback) -> None:
    weight: Any = spread(mesh)
    sent = torch.zeros(4, 4)
    sender, receiver = loopback.batches({"w": sent}, {"w": weight})
    with sender, receiver:
        pending = (weight.to_local() ** 2).sum()
        move(sender, receiver)
        with pytest.raises(RuntimeError, match=CHANGED):
            pending.backward()


@pytest.mark.parametrize("kind", ["plain", "DTensor"])
def test_registering_and_sending_harm_no_backward(kind: str, mesh: Any, loopback: Loopback) -> None:
    weight = leaf() if kind == "plain" else spread(mesh)
    taken = torch.zeros(4, 4)
    pending = forward(weight)
    sender, receiver = loopback.batches({"w": weight}, {"w": taken})
    with sender, receiver:
        move(sender, receiver)
        with loopback.register(module_of(weight)):
            pending.backward()
    assert weight.grad is not None
    assert (taken == 1).all()


@pytest.mark.parametrize("kind", ["plain", "DTensor"])
def test_a_receivers_registration_alone_harms_no_backward(kind: str, mesh: Any, loopback: Loopback) -> None:
    weight = leaf() if kind == "plain" else spread(mesh)
    pending = forward(weight)
    with loopback.inference.register({"w": weight}, "harmless"):
        pending.backward()
    assert weight.grad is not None


@pytest.mark.parametrize("kind", ["plain", "DTensor"])
def test_the_counter_keeps_no_storage(kind: str, mesh: Any) -> None:
    weight: Any = leaf() if kind == "plain" else spread(mesh)
    local = weight._local_tensor if kind == "DTensor" else weight
    watched, version = gone(local), weight._version
    source = source_of("w", weight)
    source.written()
    assert weight._version == version + 1
    assert local._version >= 1
    for counter in source._counters:  # type: ignore[attr-defined]
        assert getattr(counter, "_local_tensor", counter).untyped_storage().data_ptr() == 0
    there = weakref.ref(weight)
    del weight, local
    gc.collect()
    assert watched.expired()
    assert there() is None
    source.written()  # nobody's any more


def test_inference_tensors_have_no_counter_and_need_none(mesh: Any, loopback: Loopback) -> None:
    with torch.inference_mode():
        plain, module = torch.zeros(4, 4), torch.nn.Linear(4, 4, bias=False)
        sharded = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])
    sent = torch.full((4, 4), 2.0)
    for target in ({"w": plain}, {"w": sharded}, module_of(module.weight)):
        loopback.transfer({"w": sent}, target)
    assert (plain == 2).all()
    assert (sharded.to_local() == 2).all()
    assert (module.weight == 2).all()


def test_registering_in_inference_mode(mesh: Any, loopback: Loopback) -> None:
    """Of tensors that are none: their counters are bumped as ever."""
    weight, sharded, sent = leaf(), spread(mesh), torch.zeros(4, 4)
    pending = forward(weight)
    with torch.inference_mode():
        loopback.transfer({"w": sent}, {"w": weight})
        loopback.transfer({"w": sent}, {"w": sharded})
    with pytest.raises(RuntimeError, match=CHANGED):
        pending.backward()
