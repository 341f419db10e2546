"""Modules: names are those of state_dict(), and tensors are looked up again at each transfer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tessera
import torch
import torch.distributed
from loopback import Loopback, move
from tessera._tensors.walk import walk
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrizations


def names(model: nn.Module) -> list[str]:
    skipped: list[str] = []
    found = [name for name, _, _ in walk(model, skipped, lambda _: True)]
    assert not skipped
    return found


class Net(nn.Module):
    """The contents of ordinary modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("none", None)
        self.first = nn.Linear(3, 3, bias=False)  # whose bias is None
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)])
        self.by_name = nn.ModuleDict({"a": nn.Linear(3, 1), "b.c".replace(".", "_"): nn.Linear(1, 3)})
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
        self.keyed = nn.ParameterDict({"x": nn.Parameter(torch.ones(2))})
        self.plain = torch.ones(3)  # an attribute, no parameter


class Shared(nn.Module):
    """A module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.decoder = nn.Sequential(self.encoder, nn.Linear(2, 2))


class Tied(nn.Module):
    """A parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), parametrizations.orthogonal(nn.Linear(3, 3)))


def recurrent() -> nn.Module:
    return nn.LSTM(3, 4, num_layers=2, bidirectional=True)


ORDINARY = {
    "a net": Net,
    "a shared module": Shared,
    "tied weights": Tied,
    "parametrised": normed,
    "recurrent": recurrent,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2),
    "one linear": lambda: nn.Linear(2, 2),
    "empty": lambda: nn.Sequential(nn.ReLU()),
    "wrapped for DDP": lambda: nn.DataParallel(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_names_are_those_of_the_state_dict(kind: str) -> None:
    model = ORDINARY[kind]()
    assert sorted(names(model)) == sorted(model.state_dict())


def test_tied_and_shared_tensors_have_each_of_their_names() -> None:
    assert names(Tied()) == ["embedding.weight", "head.weight"]
    assert "encoder.weight" in names(Shared())
    assert "decoder.0.weight" in names(Shared())


def wrapped() -> nn.Module:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3))))
    model[1] = torch.compile(model[1])
    return model


def test_wrappers_leave_no_trace_in_names() -> None:
    plain = sorted(Net().state_dict())
    assert sorted(names(torch.compile(Net()))) == plain  # type: ignore[arg-type]
    assert sorted(names(checkpoint_wrapper(Net()))) == plain
    assert sorted(names(torch.compile(checkpoint_wrapper(Net())))) == plain  # type: ignore[arg-type]
    assert sorted(names(wrapped())) == ["0.bias", "0.weight", "1.0.bias", "1.0.weight"]
    assert any("_orig_mod" in name for name in wrapped().state_dict())


def test_a_model_moves_into_another(loopback: Loopback) -> None:
    torch.manual_seed(0)
    source, target = Net(), torch.compile(Net())
    with torch.no_grad():
        for tensor in (*source.parameters(), *source.buffers()):
            tensor.copy_(torch.randint(0, 100, tensor.shape))
    loopback.transfer(source, target)
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target._orig_mod.state_dict()[name]), name  # type: ignore[union-attr]


def test_a_tied_model_moves_into_one_that_is_not(loopback: Loopback) -> None:
    source, target = Tied(), Tied()
    target.head.weight = nn.Parameter(torch.zeros(4, 2))
    loopback.transfer(source, target)
    assert torch.equal(target.head.weight, source.head.weight)
    assert torch.equal(target.embedding.weight, source.head.weight)


def test_names_can_be_chosen(loopback: Loopback) -> None:
    with loopback.register(Net(), only=[r"first\..*", r"listed\.\d"], ignore="listed.0") as batch:
        assert set(batch.names) == {"first.weight", "listed.1"}


# --- between transfers


def test_what_an_optimiser_writes_is_what_moves(loopback: Loopback) -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    optimiser = torch.optim.SGD(source.parameters(), lr=0.1)
    sender, receiver = loopback.batches(source, target)
    with sender, receiver:
        for _ in range(3):
            optimiser.zero_grad()
            source(torch.ones(1, 2)).sum().backward()
            optimiser.step()
            move(sender, receiver)
            assert torch.equal(source.weight, target.weight)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model.to(torch.bfloat16), "its dtype has changed from f32 to bf16"),
        (
            lambda model: setattr(model, "weight", nn.Parameter(torch.ones(3, 2))),
            r"its shape has changed from \(2, 2\) to",
        ),
        (lambda model: setattr(model, "weight", None), "the module has no weight any more"),
        (lambda model: model._parameters.pop("weight"), "the module has no weight any more"),
        (lambda model: model.to("meta"), "it is on the meta device and has no memory"),
    ],
)
def test_what_was_replaced_is_noticed(change: Any, why: str, loopback: Loopback) -> None:
    """(Tensors of a dict cannot be looked up again: that is why a module is the better thing to register.)"""
    source, target = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    sender, receiver = loopback.batches(source, target)
    with sender, receiver:
        move(sender, receiver)
        change(source)
        with pytest.raises(tessera.InvalidArgumentError, match=f"tensor weight: {why}"):
            sender.send(timeout=5)


class Deep(nn.Module):
    """Parameters at several depths."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(scale)


def replace_leaf(model: Deep) -> None:
    model.layers[1][0] = nn.Linear(2, 2)  # type: ignore[operator]


def replace_first(model: Deep) -> None:
    model.embed = nn.Embedding(3, 2)


def replace_inner(model: Deep) -> None:
    model.layers[2] = Deep().layers[0]


def replace_all(model: Deep) -> None:
    model.layers = Deep().layers


def exchange(model: Deep) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


REPLACEMENTS = [replace_leaf, replace_first, replace_inner, replace_all, exchange]


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_modules_that_were_replaced_are_sent_as_they_are_now(replace: Any, loopback: Loopback) -> None:
    source, target = Deep(), Deep(0.0)
    sender, receiver = loopback.batches(source, target)
    with sender, receiver:
        for _ in range(2):
            move(sender, receiver)
        replace(source)
        for value in (2.0, 3.0):
            with torch.no_grad():
                for number, parameter in enumerate(source.parameters()):
                    parameter.fill_(value + 10 * number)
            move(sender, receiver)
            for name, tensor in source.state_dict().items():
                assert torch.equal(tensor, target.state_dict()[name]), name


@pytest.mark.parametrize("dropped", [{"embed.weight"}, {"embed.weight", "layers.0.0.weight", "layers.0.0.bias"}])
def test_modules_that_were_replaced_are_noticed_whatever_a_batch_holds(dropped: set[str], loopback: Loopback) -> None:
    """One tensor asks for all: whichever it is."""
    source, target = Deep(), Deep(0.0)
    sender, receiver = loopback.batches(source, {n: t for n, t in target.state_dict().items() if n not in dropped})
    with sender, receiver:
        move(sender, receiver)
    held = {name: tensor for name, tensor in source.state_dict().items() if name not in dropped}
    sender, receiver = loopback.batches(held, target, missing_ok=True)
    with sender, receiver:
        move(sender, receiver)
        move(sender, receiver)
        target.layers[2] = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        with pytest.raises(tessera.InvalidArgumentError, match=r"tensor layers\.2\..*: its memory has moved"):
            move(sender, receiver)


class AllAlike(nn.Linear):
    """Which equals every other, as one that compares its settings does."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AllAlike)

    def __hash__(self) -> int:
        return 1


class InDisguise(nn.Module):
    """A module that shows its modules under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_modules(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        yield "shown", self.inner


@pytest.mark.parametrize("kind", [nn.Linear, AllAlike])
def test_a_module_that_equals_the_old_one_is_another(kind: type[nn.Linear], loopback: Loopback) -> None:
    source, target = nn.Sequential(kind(2, 2)), nn.Linear(2, 2)
    sender, receiver = loopback.batches(source, {"0.weight": target.weight, "0.bias": target.bias})
    with sender, receiver:
        for _ in range(2):
            source[0] = kind(2, 2)
            for _ in range(2):
                move(sender, receiver)
                assert torch.equal(source[0].weight, target.weight)  # type: ignore[arg-type]


def test_a_model_with_other_names_for_its_modules(loopback: Loopback) -> None:
    source, target = InDisguise(), InDisguise()
    sender, receiver = loopback.batches(source, target)
    with sender, receiver:
        assert sender.names == ("shown.weight", "shown.bias")
        move(sender, receiver)
        source.inner.weight = nn.Parameter(torch.zeros(2, 2))
        move(sender, receiver)
        assert torch.equal(source.inner.weight, target.inner.weight)


def delete_leaf(model: Deep) -> None:
    del model.layers[2][0]  # type: ignore[operator]


def delete_inner(model: Deep) -> None:
    del model.layers[2]


def no_module(model: Deep) -> None:
    model.layers = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (delete_leaf, r"tensor layers\.2\.0\.weight: its shape has changed from \(2, 2\) to \(2,\)"),
        (delete_inner, r"tensor layers\.2\.0\.weight: the model has no module layers\.2\.0 any more: close the batch"),
        (no_module, r"tensor layers\.0\.0\.weight: the model has no module layers\.0\.0 any more: close the batch"),
    ],
)
def test_modules_that_were_deleted_are_noticed(change: Any, why: str, loopback: Loopback) -> None:
    source, target = Deep(), Deep()
    sender, receiver = loopback.batches(source, target)
    with sender, receiver:
        move(sender, receiver)
        change(source)
        with pytest.raises(tessera.InvalidArgumentError, match=why):
            sender.send(timeout=5)


# --- sharded


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of one rank: this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    torch.distributed.destroy_process_group()


def sharded(mesh: Any, *, over_tp: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if over_tp:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def test_names_of_a_sharded_model(mesh: Any) -> None:
    assert names(sharded(mesh)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("over_tp", [False, True])
def test_a_gathered_model_is_told_to_reshard(over_tp: bool, mesh: Any, loopback: Loopback) -> None:
    model: Any = sharded(mesh, over_tp=over_tp)
    target = sharded(mesh)
    sender, receiver = loopback.batches(model, target)
    words = r"FSDP has gathered it, and will free what is there now: call reshard\(\) on the FSDP module first"
    with sender, receiver:
        move(sender, receiver)
        model[0].unshard()
        with pytest.raises(tessera.InvalidArgumentError, match=rf"tensor 0\.weight: {words}"):
            sender.send(timeout=5)
        with pytest.raises(tessera.InvalidArgumentError, match=rf"tensor 0\.weight: {words}"):
            loopback.register(model)
        model[0].reshard()
        move(sender, receiver)
        assert torch.equal(model[0].weight.full_tensor(), target[0].weight.full_tensor())  # type: ignore[operator]


def test_forward_leaves_the_root_gathered_and_backward_does_not(mesh: Any, loopback: Loopback) -> None:
    """torch's default: what is gathered for forward() stays so for backward(), at the root."""
    model: Any = sharded(mesh)
    loss = model(torch.ones(1, 2)).sum()
    with pytest.raises(tessera.InvalidArgumentError, match=r"tensor 1\.weight: FSDP has gathered it"):
        loopback.register(model)
    loss.backward()
    loopback.register(model).close()


def test_what_arrives_is_what_fsdp_computes_with(mesh: Any, loopback: Loopback) -> None:
    model: Any = sharded(mesh)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    loopback.transfer({name: torch.full_like(p.to_local(), 0.5) for name, p in model.named_parameters()}, model)
    assert model(x).tolist() == [[2.0, 2.0]]  # 0.5 * (1.5 + 1.5) + 0.5


def test_a_replaced_module_is_asked_whether_fsdp_has_gathered_it(mesh: Any, loopback: Loopback) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sender, receiver = loopback.batches(model, sharded(mesh))
    with sender, receiver:
        move(sender, receiver)
        model[0] = fully_shard(nn.Linear(2, 2), mesh=mesh["dp"])
        model[0].unshard()
        with pytest.raises(tessera.InvalidArgumentError, match=r"tensor 0\.weight: FSDP has gathered it"):
            sender.send(timeout=5)


def test_flat_parameters_are_refused(mesh: Any, loopback: Loopback) -> None:
    with torch.no_grad():
        model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(
        tessera.InvalidArgumentError, match=r"module \(the model\): FullyShardedDataParallel .*fully_shard\(\)"
    ):
        loopback.register(model)
