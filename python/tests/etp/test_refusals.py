"""What is refused, by name and with the way out."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import Tied, adamw, batch, built, loss_of
from tessera import etp
from torch.nn.utils.parametrizations import weight_norm
from torch_ranks import launch

# Of one rank, with a format: what is refused does not depend on other ranks.
FORMAT = {".*weight": "bf16"}


def sharded(model: Any = None) -> Any:
    group = etp.init_group()
    return etp.shard_module_(built() if model is None else model, group, formats=FORMAT)


def stepped(kind: Callable[..., torch.optim.Optimizer]) -> Any:
    model = sharded()
    optimizer = kind(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step(lambda: 0.0) if kind is torch.optim.LBFGS else optimizer.step()


def moved() -> None:
    model = sharded()
    model.up.weight.data = torch.zeros_like(model.up.weight)
    loss_of(model, 0).backward()
    adamw(model.parameters()).step()


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


def written_while_summoned() -> None:
    model = sharded()
    with etp.summon(model), torch.no_grad():
        model.up.weight.zero_()


class Muon(torch.optim.Optimizer):
    """An optimiser of another package."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        raise AssertionError("not reached")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an unknown option": (lambda: etp.update_config(depth=1), "Unknown ETP config option: depth"),
    "a format that no weight has": (
        lambda: etp.shard_module_(built(), etp.init_group(), formats={"ump": "bf16"}),
        r"formats: 'ump' \(bf16\) gives no weight its format: weights are emb.weight, .*patterns are for whole names",
    ),
    "a group of another kind": (lambda: etp.shard_module_(built(), None), "give what etp.init_group"),  # type: ignore[arg-type]
    "a mode": (lambda: etp.shard_module_(built(), etp.init_group(), mode="x"), "'deferred' and 'inline'"),
    "inline mode": (lambda: etp.shard_module_(built(), etp.init_group(), mode="inline"), "not in this version"),
    "dp": (lambda: etp.shard_module_(built(), etp.init_group(), dp=1), "dp= is not in this version"),
    "a sharded model": (lambda: etp.shard_module_(sharded(), etp.init_group()), "sharded already"),
    "a lazy module": (lambda: sharded(torch.nn.LazyLinear(3)), "weight is not initialised yet"),
    "a model without values": (lambda: sharded(torch.nn.Linear(64, 64, device="meta")), "meta device"),
    "f64": (lambda: sharded(torch.nn.Linear(64, 64).double()), "of torch.float64"),
    "a parametrised module": (lambda: sharded(weight_norm(torch.nn.Linear(64, 64))), "parametrised"),
    "a sparse embedding": (lambda: sharded(torch.nn.Embedding(64, 64, sparse=True)), "sparse=True or max_norm"),
    "a copy": (lambda: copy.deepcopy(sharded()), "emb.weight is sharded and cannot be copied.*summon"),
    "a pickle": (lambda: pickle.dumps(sharded().emb.weight), "emb.weight is sharded and cannot be pickled.*summon"),
    "another dtype": (lambda: sharded().half(), "emb.weight is sharded and cannot become torch.float16"),
    "memory that was replaced": (moved, "up.weight: the parameter's memory has been replaced"),
    "a stale backward": (updated_before_backward, "weight"),
    "a nested update": (nested_updates, "an update is under way"),
    "a write to what is summoned": (written_while_summoned, "up.weight was written within summon.*etp.update"),
    "a second derivative": (
        lambda: loss_of(sharded(), 0).backward(create_graph=True),
        "weight: a backward with create_graph=True.*filter=",
    ),
    "LBFGS": (lambda: stepped(torch.optim.LBFGS), "LBFGS holds emb.weight.*elementwise optimiser"),
    "Adafactor": (lambda: stepped(torch.optim.Adafactor), "Adafactor holds emb.weight"),
    "another package's optimiser": (lambda: stepped(Muon), "Muon holds emb.weight.*allow_optimizer"),
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
