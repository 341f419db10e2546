"""What is refused, by name and with the way out."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tessera
import torch
from etp_models import Tied, adamw, batch, built, loss_of
from tessera import etp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import launch

# Of one rank, with a format: what is refused does not depend on other ranks.
FORMAT = {".*weight": "bf16"}


def sharded(model: Any = None) -> Any:
    group = etp.init_group()
    return etp.shard_module_(built() if model is None else model, group, formats=FORMAT)


def stepped(kind: Callable[..., torch.optim.Optimizer], layer: Any = None) -> Any:
    model = sharded(layer)
    optimizer = kind(model.parameters())
    (loss_of(model, 0) if layer is None else model(torch.ones(2, 64)).sum()).backward()
    optimizer.step(lambda: 0.0) if kind is torch.optim.LBFGS else optimizer.step()


def updated_before_backward() -> None:
    model = sharded()
    loss = loss_of(model, 0)
    with etp.update(model):
        pass
    loss.backward()


def nested_updates() -> None:
    model = sharded()
    with etp.update(model), etp.update(model):
        pass


def of(parameter: torch.Tensor) -> torch.nn.Module:
    """A module of one parameter."""
    module = torch.nn.Module()
    module.matrix = torch.nn.Parameter(parameter, requires_grad=parameter.is_floating_point())
    return module


@contextlib.contextmanager
def alone() -> Iterator[DeviceMesh]:
    """torch.distributed of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def a_dtensor() -> None:
    with alone() as mesh:
        sharded(of(distribute_tensor(torch.ones(64, 64), mesh)))


def wrapped(wrap: Callable[[torch.nn.Module, DeviceMesh], torch.nn.Module]) -> None:
    with alone() as mesh:
        sharded(wrap(built(), mesh))


def gradients_by_name() -> None:
    model = sharded()
    weights = dict(model.named_parameters())
    torch.func.grad(lambda each: torch.func.functional_call(model, each, (batch(0)[0],)).sum())(weights)


def sharded_in_a_closed_group() -> None:
    with etp.init_group() as group:
        pass
    etp.shard_module_(built(), group, formats=FORMAT)


def traced(trace: Callable[[Any], Any]) -> None:
    model = sharded(torch.nn.Linear(64, 64))
    with torch.no_grad():
        trace(model)


def stepped_after_unsharding() -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(etp.unshard_(model), 0).backward()
    optimizer.step()


def stepped_with_an_older_optimiser() -> None:
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    graph = loss_of(model, 0)  # which leads to the parameters, so that others take their places
    etp.shard_module_(model, etp.init_group(), formats={"up.weight": "nvfp4"})
    loss_of(model, 0).backward()
    optimizer.step()
    del graph


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a sparse parameter": (lambda: sharded(of(torch.eye(64).to_sparse())), "matrix is torch.sparse_coo: only strided"),
    "a DTensor": (a_dtensor, "matrix is a DTensor: ETP shards plain parameters"),
    "a model in DDP": (
        lambda: wrapped(lambda model, _: DistributedDataParallel(model)),
        "is a DistributedDataParallel",
    ),
    "a model in FSDP2": (lambda: wrapped(lambda model, mesh: fully_shard(model, mesh=mesh)), "is a FSDPModule"),
    "a gradient by torch.func": (
        lambda: torch.func.grad(lambda x, model: model.block(x).sum())(torch.ones(2, 32), sharded()),
        "up.weight is sharded, and transforms of torch.func.*unshard_",
    ),
    "gradients of weights by torch.func": (gradients_by_name, "emb.weight is sharded, and transforms of torch.func"),
    "vmap": (lambda: torch.func.vmap(sharded().block)(torch.ones(2, 3, 32)), "up.weight .*transforms of torch.func"),
    "forward derivatives": (
        lambda: torch.func.jvp(sharded().block, (torch.ones(2, 32),), (torch.ones(2, 32),)),
        "up.weight is sharded, and transforms of torch.func",
    ),
    "vmap of another module": (
        lambda: torch.func.vmap(sharded(torch.nn.Conv1d(64, 64, 1)))(torch.ones(2, 64, 8)),
        "weight is sharded, and transforms of torch.func",
    ),
    "another device": (lambda: sharded().to("meta"), r"cannot be moved to meta: move the model before.*unshard_"),
    "another device, empty": (
        lambda: sharded().to_empty(device="meta"),
        r"emb.weight is sharded and cannot become torch.float32 of \(203, 32\) on meta",
    ),
    "an unknown option": (lambda: etp.update_config(depth=1), "Unknown ETP config option: depth"),
    "a format that no weight has": (
        lambda: etp.shard_module_(built(), etp.init_group(), formats={"ump": "bf16"}),
        r"formats: 'ump' \(bf16\) gives no weight its format: weights are emb.weight, .*patterns are for whole names",
    ),
    "a group that is closed": (sharded_in_a_closed_group, "ETP group etp is closed: init_group.. again"),
    "a group of another kind": (lambda: etp.shard_module_(built(), None), "give what etp.init_group"),  # type: ignore[arg-type]
    "a mode": (lambda: etp.shard_module_(built(), etp.init_group(), mode="x"), "'deferred' and 'inline'"),
    "dp": (lambda: etp.shard_module_(built(), etp.init_group(), dp=1), "dp 1: give what etp.init_group"),
    "a sharded model": (lambda: etp.shard_module_(sharded(), etp.init_group()), "sharded already"),
    "a lazy module": (lambda: sharded(torch.nn.LazyLinear(3)), "weight is not initialised yet"),
    "float8": (lambda: sharded(torch.nn.Linear(64, 64).to(torch.float8_e5m2)), "of torch.float8_e5m2"),
    "rows that a forward clamps": (lambda: sharded(torch.nn.Embedding(64, 64, max_norm=1.0)), "with max_norm, which"),
    "assigned weights": (
        lambda: sharded().load_state_dict(built().state_dict(), assign=True),
        r"emb.weight is sharded, and load_state_dict\(assign=True\)",
    ),
    "another dtype": (lambda: sharded().half(), "emb.weight is sharded and cannot become torch.float16"),
    "a stale backward": (updated_before_backward, "weight"),
    "a nested update": (nested_updates, "an update is under way"),
    "a second derivative": (
        lambda: loss_of(sharded(), 0).backward(create_graph=True),
        "weight: a backward with create_graph=True.*filter=",
    ),
    "an optimiser from before": (
        stepped_with_an_older_optimiser,
        r"AdamW was made before shard_module_\(\) and holds .*: make optimisers after",
    ),
    "an optimiser of a model that is unsharded": (
        stepped_after_unsharding,
        r"AdamW was made before etp.unshard_\(\) and holds emb.weight as it was sharded.*: make optimisers after",
    ),
    "a trace": (
        lambda: traced(lambda model: torch.jit.trace(model, torch.ones(1, 64))),
        r"weight is sharded, and torch.jit.trace\(\) would keep its present values .*: trace the model within",
    ),
    "a trace of a weight": (
        lambda: traced(lambda model: torch.jit.trace(lambda x: x + model.weight.sum(), torch.ones(1))),
        r"weight is sharded, and torch.jit.trace\(\) would keep",
    ),
    "a graph of make_fx": (
        lambda: traced(lambda model: make_fx(model)(torch.ones(1, 64))),
        r"weight is sharded, and make_fx\(\) would keep its present values .*: trace the model within etp.summon",
    ),
    "allow_optimizer of no class": (lambda: etp.allow_optimizer(3), "give a class of optimisers"),  # type: ignore[arg-type]
    "two sources of a group": (lambda: etp.init_group(mesh=1, store="auto"), "not several of them"),
    "a rank without a store": (lambda: etp.init_group(rank=1), "rank and size go with a store"),
    "a rank of a store that nobody gives": (lambda: etp.init_group(store="auto"), "RANK is ''"),
    "a rank beyond the size": (lambda: etp.init_group(store="auto", rank=2, size=2), "rank 2 of 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    call, message = REFUSED[what]
    with pytest.raises(tessera.Error) as caught:
        call()
    assert re.search(message, str(caught.value).replace("\n", " ")), caught.value


def test_a_script_of_a_model_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"Linear is sharded, and torch.jit.script\(\) cannot compile it"):
        torch.jit.script(sharded(torch.nn.Linear(64, 64)))


@pytest.mark.parametrize("trace", [lambda model, x: torch.jit.trace(model, x), lambda model, x: make_fx(model)(x)])
def test_traces_within_summon_follow_what_is_written_there(trace: Callable[[Any, Any], Any]) -> None:
    model, x = sharded(torch.nn.Linear(64, 64)), torch.ones(1, 64)
    with torch.no_grad(), etp.summon(model):
        found = trace(model, x)
        model.weight.mul_(2)
        torch.testing.assert_close(found(x), model(x))


def test_an_optimiser_that_is_allowed() -> None:
    class Elementwise(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= parameter.grad

    etp.allow_optimizer(Elementwise)
    model = sharded()
    before = model.up.weight.detach().clone()
    loss_of(model, 0).backward()
    Elementwise(model.parameters()).step()
    assert torch.equal(model.up.weight, before - model.up.weight.grad)


class Writes(torch.nn.Linear):
    """A forward that changes its weight, or a view of it, before it is used, as BinaryConnect does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
            self.weight.t().add_(1)
        return super().forward(x)


def test_a_write_in_a_forward_is_seen_by_its_uses() -> None:
    plain = Writes(64, 64)
    model = sharded(copy.deepcopy(plain))
    x = torch.ones(2, 64)
    with torch.no_grad():
        model(x), plain(x)
    assert torch.equal(etp.whole(model.weight), plain.weight)


def test_data_that_is_assigned_is_a_write() -> None:
    model = sharded()
    model.up.weight.data = torch.full((80, 32), 0.5)
    model.up.weight.data += 1
    assert torch.equal(etp.whole(model.up.weight).detach(), torch.full((80, 32), 1.5))
    loss_of(model, 0).backward()
    adamw(model.parameters()).step()


def test_a_state_has_the_algebra_of_the_whole_weight() -> None:
    model, plain = sharded(), built()
    state, expected = model.state_dict()["up.weight"], plain.state_dict()["up.weight"]
    assert torch.equal(state * 2, expected * 2)
    assert torch.equal(torch.zeros(80, 32).copy_(state), expected)
    assert (state.numpy() == expected.numpy()).all()
    assert not state.numpy().flags.writeable
    assert torch.equal(pickle.loads(pickle.dumps(model.emb.weight)), plain.emb.weight)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert {name: type(each) for name, each in loaded.items()} == dict.fromkeys(loaded, torch.Tensor)
    assert all(torch.equal(each, plain.state_dict()[name]) for name, each in loaded.items())


def test_one_rank_without_a_format_is_left_alone() -> None:
    model = built()
    before = dict(model.named_parameters())
    etp.shard_module_(model, etp.init_group())
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert type(model.up) is torch.nn.Linear


def _different_models(rank: int) -> str:
    with etp.init_group(timeout=30) as group, pytest.raises(tessera.MismatchError) as caught:
        etp.shard_module_(built(seed=rank), group)
    return str(caught.value)


def test_ranks_with_different_models_are_told_so() -> None:
    assert all("emb.weight differs between ranks" in each for each in launch(_different_models, 2))


def test_tensor_hooks_see_the_gradient_before_it_is_added() -> None:
    model, plain = sharded(), built(Tied)
    for each in (model, plain):
        each.up.weight.register_hook(lambda gradient: gradient * 2)
    with torch.no_grad():
        expected = model(batch(0)[0])
    for _ in range(2):
        loss_of(model, 0).backward()
    assert expected.shape == (4, 6, 203)
    first = etp.local(model.up.weight.grad).clone()
    model.up.weight.grad = None
    model.up.weight._backward_hooks.clear()
    for _ in range(2):
        loss_of(model, 0).backward()
    assert torch.equal(first, model.up.weight.grad * 2)


def test_what_an_operation_saves_may_not_change_before_its_backward() -> None:
    model = sharded(torch.nn.Conv1d(64, 64, 1))
    x = torch.ones(1, 64, 8)
    loss = model(x).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_copied_state_is_what_the_weights_were() -> None:
    model = sharded()
    best = copy.deepcopy(model.state_dict())
    before = etp.whole(model.up.weight).clone()
    assert best["up.weight"].shape == (80, 32) and "up.weight" in repr(best["up.weight"])
    loss_of(model, 0).backward()
    adamw(model.parameters()).step()
    assert not torch.equal(etp.whole(model.up.weight), before)
    assert torch.equal(etp.whole(best["up.weight"]), before)
    model.load_state_dict(best)
    assert torch.equal(etp.whole(model.up.weight), before)


def test_a_failed_step_leaves_weights_whole_for_the_next_forward() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise KeyError("a user's optimiser")

    etp.allow_optimizer(Fails)
    model = sharded(torch.nn.MultiheadAttention(64, 4))
    x = torch.ones(2, 1, 64)
    model(x, x, x)[0].sum().backward()
    with pytest.raises(KeyError):
        Fails(model.parameters(), lr=0.1).step()
    model(x, x, x)[0].sum().backward()
    assert model.in_proj_weight.shape == (192, 64)


def _of_another_dtype(rank: int) -> list[str]:
    x, said = torch.ones(4, 32, dtype=torch.bfloat16), []
    with etp.init_group(timeout=30) as group:
        linear = etp.Linear(32, 64, etp_group=group, name="linear")
        grouped = etp.GroupedLinear(2, 32, 64, etp_group=group, name="grouped")
        model = etp.shard_module_(built(), group)
        for call in (lambda: model.up(x), lambda: linear(x), lambda: grouped(x, [1, 3])):
            with pytest.raises(tessera.InvalidArgumentError) as caught:
                call()
            said.append(str(caught.value))
            with torch.autocast("cpu", torch.bfloat16):
                assert call().dtype is torch.bfloat16
    return said


def test_an_input_of_another_dtype_is_refused_as_with_one_rank() -> None:
    for said in launch(_of_another_dtype, 2):
        for name, text in zip(("up.weight", "linear.weight", "grouped.weight0"), said, strict=True):
            assert text.startswith(f"{name}: an input of torch.bfloat16 and a weight of torch.float32: convert")


@pytest.mark.parametrize("options", [{}, {"allow_unused": True}])
def test_gradients_as_values_of_deferred_weights_are_refused(options: dict[str, bool]) -> None:
    model = sharded()
    with pytest.raises(tessera.UnimplementedError, match=r"^up.weight is sharded.*shard with mode='inline'"):
        torch.autograd.grad(loss_of(model, 0), [model.up.weight], **options)


def test_batched_gradients_of_activations() -> None:
    model = sharded()
    x, directions = torch.ones(2, 32, requires_grad=True), torch.randn(3, 2, 32)
    out = model.block(x)
    (found,) = torch.autograd.grad(out, x, directions, is_grads_batched=True, retain_graph=True)
    for direction, each in zip(directions, found, strict=True):
        assert torch.allclose(torch.autograd.grad(out, x, direction, retain_graph=True)[0], each, atol=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def _no_tensors(rank: int) -> list[str]:
    torch.manual_seed(3)
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(torch.nn.Sequential(torch.nn.Linear(64, 64)), group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        odd = torch.nn.Sequential(torch.nn.Linear(41, 64))
        found = []
        for call in (
            lambda: setattr(model[0].weight, "grad", 3),
            lambda: etp.LogicalTensor(torch.ones(3)),
            lambda: etp.load_optimizer_state_dict(optimizer, None),
            lambda: etp.shard_module_(odd, group, formats={".*": "nvfp4"}, min_elements=1),
        ):
            with pytest.raises((TypeError, tessera.Error)) as caught:
                call()
            found.append(f"{type(caught.value).__name__}: {caught.value}")
        return found


def test_what_is_no_tensor_or_state_is_named() -> None:
    for gradient, made, state, odd in launch(_no_tensors, 2):
        assert gradient == "TypeError: assigned grad expected to be a Tensor or None but got grad of type int"
        assert made.startswith("InvalidArgumentError: LogicalTensor(Tensor)")
        assert "the state is NoneType" in state
        assert "0.weight: " in odd and "odd" in odd
