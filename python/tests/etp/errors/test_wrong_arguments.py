"""Arguments of another type or out of range, of each public call: an error of this package that names what to give, on
all ranks, before anything has changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_wrong_calls import WIDTH, Model
from tessera import etp
from torch_ranks import launch


class Things:
    """A group, a model and its optimiser, for calls."""

    def __init__(self) -> None:
        self.group = etp.init_group(timeout=20)
        self.model: Any = etp.shard_module_(Model(), self.group)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.nothing: Any = None

    def shard(self, **options: Any) -> Any:
        return etp.shard_module_(Model(), self.group, **options)


Call = Callable[[Any], Any]
CALLS: dict[str, tuple[Call, str]] = {
    "no model": (lambda t: etp.shard_module_(t.nothing, t.group), "give a torch.nn.Module as the model, not NoneType"),
    "a list of models": (lambda t: etp.shard_module_([Model()], t.group), "not list"),
    "a parameter": (lambda t: etp.shard_module_(t.model[0].weight, t.group), "not LogicalParameter"),
    "an optimiser": (lambda t: etp.shard_module_(t.optimizer, t.group), "not SGD"),
    "one format": (lambda t: t.shard(formats="nvfp4"), "formats 'nvfp4': give a dict of regular expressions"),
    "a dtype as a format": (lambda t: t.shard(formats={".*": torch.bfloat16}), "formats torch.bfloat16: give a str"),
    "a number as a pattern": (lambda t: t.shard(formats={3: "bf16"}), "formats 3: give a str"),
    "a list of formats": (lambda t: t.shard(formats=[".*"]), "give a dict of regular expressions"),
    "a filter": (lambda t: t.shard(filter=["0.weight"]), "filter ['0.weight']: give a function"),
    "init": (lambda t: t.shard(init=3), "init 3: give a function"),
    "stacks": (lambda t: t.shard(stacks=3), "stacks 3: give a function"),
    "publish": (lambda t: t.shard(publish=1), "'update' and 'first_use' are possible"),
    "compute_dtype": (lambda t: t.shard(compute_dtype="bf16"), "compute_dtype 'bf16': torch.float32, bfloat16 and"),
    "min_elements": (lambda t: t.shard(min_elements=1.5), "min_elements 1.5: give a whole number"),
    "a buffer that is not there": (lambda t: t.shard(buffers={"mean": "own"}), "buffers: 'mean' names no buffer"),
    "a list of buffers": (lambda t: t.shard(buffers=["own"]), "'broadcast' and 'mean' and 'own' are possible"),
    "rows in a list": (lambda t: etp.from_local([1.0], like=t.model[0].weight), "from_local: a list: this rank has"),
    "rows like a number": (lambda t: etp.from_local(torch.ones(3), like=3), "like= is a int that is not sharded"),
    "clipping a module": (lambda t: etp.clip_grad_norm_([t.model[0]], 1.0), "model.parameters(), not Linear"),
    "clipping named ones": (lambda t: etp.clip_grad_norm_(t.model.named_parameters(), 1.0), "not tuple"),
    "clipping nothing": (lambda t: etp.clip_grad_norm_(None, 1.0), "parameters None: give tensors"),
    "clipping to a text": (lambda t: etp.clip_grad_norm_(t.model.parameters(), "1"), "max_norm '1': give a number"),
    "a norm": (lambda t: etp.clip_grad_norm_(t.model.parameters(), 1.0, "fro"), "norm_type 'fro': give a number"),
    "a report": (lambda t: etp.report(t.optimizer), "give a torch.nn.Module as the model, not SGD"),
    "an update": (lambda t: etp.update(t.nothing).__enter__(), "give a torch.nn.Module as the model"),
    "an update of a parameter": (lambda t: etp.update(t.model[0].weight).__enter__(), "not LogicalParameter"),
    "summon": (lambda t: etp.summon("model").__enter__(), "give a torch.nn.Module as the model, not str"),
    "unshard": (lambda t: etp.unshard_(t.nothing), "give a torch.nn.Module as the model"),
    "exactness": (lambda t: etp.exactness(t.optimizer), "give a torch.nn.Module as the model, not SGD"),
    "join": (lambda t: etp.join(t.optimizer, t.model).__enter__(), "give a torch.nn.Module as the model, not SGD"),
    "join without": (lambda t: etp.join(t.model, t.nothing).__enter__(), "give a torch.optim.Optimizer, not NoneType"),
    "a state": (lambda t: etp.optimizer_state_dict(t.model), "give a torch.optim.Optimizer, not Model"),
    "a permission": (lambda t: etp.allow_optimizer(t.optimizer), "give a class of optimisers"),
    "names": (lambda t: etp.tag_etp_params_with_names(t.nothing), "give a torch.nn.Module as the model"),
    "Muon": (lambda t: etp.Muon([t.model[0].weight], lr="fast"), "etp.Muon: lr 'fast': give a number"),
    "a mesh": (lambda t: etp.init_group(mesh=3), "init_group: mesh 3: give a DeviceMesh"),
    "a process group": (lambda t: etp.init_group(process_group=3), "process_group 3: give what torch.distributed."),
    "a timeout": (lambda t: etp.init_group(timeout="long"), "timeout 'long': give seconds"),
}


def _calls(rank: int) -> Any:
    things = Things()
    found = {}
    for name, (call, _) in CALLS.items():
        try:
            call(things)
            found[name] = "", "nothing was raised"
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    things.model(torch.full((2, WIDTH), 1.0 + rank)).square().mean().backward()
    things.optimizer.step()
    return found, float(etp.whole(things.model[0].weight).detach().sum())


@pytest.fixture(scope="module")
def calls() -> list[Any]:
    return launch(_calls, 2)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named_on_all_ranks(calls: list[Any], name: str) -> None:
    for found, _ in calls:
        kind, text = found[name]
        assert kind == tessera.InvalidArgumentError.__name__, text
        assert re.search(re.escape(CALLS[name][1]), text)
        assert "rank 0: " not in text and "rank 1: " not in text


def test_the_model_trains_on_behind_them(calls: list[Any]) -> None:
    (_, first), (_, second) = calls
    assert first == second


def test_a_weight_without_elements_is_left_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(0, 4), torch.nn.Linear(4, 4))
    etp.shard_module_(model, etp.init_group(), min_elements=0, formats={"1.weight": "bf16"})
    assert type(model[0].weight) is torch.nn.Parameter
    assert isinstance(model[1].weight, etp.LogicalTensor)
