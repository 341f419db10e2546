"""load_state_dict() of optimisers that hold sharded parameters: by name where names are at hand, and the state of
another optimiser, model or rank is refused on all ranks when it is loaded."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import Tied, as_bytes, built, loss_of
from tessera import etp
from tessera.etp import state_kinds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_ranks import launch

Maker = Callable[[Any], torch.optim.Optimizer]


def _step(model: Any, optimizer: torch.optim.Optimizer, number: int, rank: int, ranks: int = 2) -> None:
    loss_of(model, number * ranks + rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def _facts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _facts(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_facts(each) for each in value]
    return (tuple(value.shape), as_bytes(etp.whole(value))) if isinstance(value, torch.Tensor) else value


def _by_name(optimizer: torch.optim.Optimizer, model: Any) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: _facts(entry) for parameter, entry in optimizer.state.items()}


def _filed(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream)


LISTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "named, reversed": (
        lambda model: list(model.named_parameters()),
        lambda model: list(model.named_parameters())[::-1],
    ),
    "named, groups exchanged": (
        lambda model: [
            {"params": [each for each in model.named_parameters() if each[1].dim() > 1], "lr": 1e-2},
            {"params": [each for each in model.named_parameters() if each[1].dim() == 1], "lr": 1e-3},
        ],
        lambda model: [
            {"params": [each for each in model.named_parameters() if each[1].dim() == 1][::-1], "lr": 1e-3},
            {"params": [each for each in model.named_parameters() if each[1].dim() > 1], "lr": 1e-2},
        ],
    ),
    "etp's state, without names": (
        lambda model: list(model.parameters()),
        lambda model: list(model.parameters())[::-1],
    ),
}


def _goes_by_name(rank: int, how: str) -> Any:
    first, second = LISTS[how]
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group)
        optimizer = torch.optim.AdamW(first(model), lr=1e-2)
        for number in range(2):
            _step(model, optimizer, number, rank)
        wanted = _by_name(optimizer, model)
        rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
        given = etp.optimizer_state_dict if how.startswith("etp") else torch.optim.Optimizer.state_dict
        wrong = []
        for what, state in {"logical": given(optimizer), "in a file": _filed(given(optimizer))}.items():
            other = torch.optim.AdamW(second(model), lr=0.5)
            other.load_state_dict(state)
            if _by_name(other, model) != wanted:
                wrong.append(what)
            if {id(p): g["lr"] for g in other.param_groups for p in g["params"]} != rates:
                wrong.append(f"{what}: options")
            names = [name for g in other.param_groups for name in g.get("param_names", [])]
            if names != [each[0] for each in second(model) if isinstance(each, tuple)] and "groups" not in how:
                wrong.append(f"{what}: names {names}")
        return wrong


@pytest.mark.parametrize("how", LISTS)
def test_states_go_by_name(how: str) -> None:
    assert launch(functools.partial(_goes_by_name, how=how), 2) == [[], []]


def _refusals(rank: int) -> dict[str, str]:
    """What each load says; afterwards a right one is taken, and training goes on."""
    found: dict[str, str] = {}
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)

        def made(kind: Any = torch.optim.AdamW, **options: Any) -> Any:
            return kind(model.parameters(), **{"lr": 1e-2, **options})

        def stepped(kind: Any = torch.optim.AdamW, **options: Any) -> Any:
            optimizer = made(kind, **options)
            _step(model, optimizer, 0, rank)
            return optimizer

        def says(what: str, optimizer: Any, state: Any) -> None:
            before = _facts(optimizer.state_dict())
            try:
                optimizer.load_state_dict(state)
            except tessera.Error as error:
                found[what] = f"{type(error).__name__}: {error}"
            if _facts(optimizer.state_dict()) != before:
                found[what] = "it was loaded"

        adamw = stepped()
        right = _filed(adamw.state_dict())

        def changed(place: Any, key: str, value: Any) -> Any:
            state = copy.deepcopy(right)
            state["state"][place][key] = value
            return state

        says("SGD's", made(), _filed(stepped(torch.optim.SGD, momentum=0.9).state_dict()))
        says("without momentum", made(), _filed(stepped(torch.optim.SGD).state_dict()))
        says("Adamax's", made(), _filed(stepped(torch.optim.Adamax).state_dict()))
        says("into SGD", made(torch.optim.SGD, momentum=0.9), right)
        says("NAdam into Adam", made(torch.optim.Adam), _filed(stepped(torch.optim.NAdam).state_dict()))
        says("Adam into AdamW", made(), _filed(stepped(torch.optim.Adam).state_dict()))
        says("fewer", made(), {**right, "param_groups": [{**right["param_groups"][0], "params": [0, 1, 2]}]})
        says("two groups", made(), {**right, "param_groups": right["param_groups"] * 2})
        says("no state", made(), {"param_groups": right["param_groups"]})
        says("rows", made(), changed(1, "exp_avg", etp.local(adamw.state[model.up.weight]["exp_avg"]).clone()))
        says("another shape", made(), changed(1, "exp_avg", torch.zeros(3, 5)))
        says("another shape of a bias", made(), changed(2, "exp_avg", torch.zeros(3)))
        says("one rank's rows", made(), changed(1, "exp_avg", torch.zeros(3, 5)) if rank == 1 else right)
        says("different values", made(), changed(1, "exp_avg", torch.full((80, 32), float(rank))))
        says("different biases", made(), changed(2, "exp_avg", torch.full((80,), float(rank))))
        says("different steps", made(), changed(1, "step", torch.tensor(float(rank))))
        says("different rates", made(), {**right, "param_groups": [{**right["param_groups"][0], "lr": 0.1 + rank}]})
        says("only on one rank", made(), right if rank == 0 else adamw.state_dict())
        named = torch.optim.AdamW(list(model.named_parameters()), lr=1e-2)
        groups = [{**named.state_dict()["param_groups"][0]}]
        groups[0]["param_names"] = ["up.weight", "emb.weight", *groups[0]["param_names"][2:-1], "strange"]
        says("strange names", named, {"state": right["state"], "param_groups": groups})
        again = made()
        again.load_state_dict(right)
        _step(model, again, 1, rank)
        found["goes on"] = str(len(again.state))
    return found


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    return launch(_refusals, 2)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("SGD's", "another kind of optimiser than AdamW"),
        ("without momentum", "another kind of optimiser than AdamW: param_groups[0] lacks betas"),
        ("Adamax's", "that of emb.weight lacks exp_avg_sq and has exp_inf"),
        ("into SGD", "another kind of optimiser than SGD"),
        ("NAdam into Adam", "has mu_product"),
        ("Adam into AdamW", "Adam and AdamW are two kinds"),
        ("fewer", "[3] parameters, and this optimiser's [6]"),
        ("two groups", "[6, 6] parameters"),
        ("no state", "give what state_dict() returns"),
        ("rows", ", 32), and the parameter (80, 32): load whole tensors"),
        ("another shape", "state 'exp_avg' of up.weight is (3, 5), and the parameter (80, 32)"),
        ("another shape of a bias", "state 'exp_avg' of up.bias is (3,), and the parameter (80,)"),
        ("one rank's rows", "state 'exp_avg' of up.weight is (3, 5), and the parameter (80, 32)"),
        ("different values", "ranks 0 and 1 give it different states: state 'exp_avg' of up.weight differs"),
        ("different biases", "state 'exp_avg' of up.bias differs"),
        ("different steps", "state 'step' of up.weight differs"),
        ("different rates", "param_groups differs"),
        ("only on one rank", "state 'exp_avg' of emb.weight differs"),
        ("strange names", "it has up.weight where this optimiser has emb.weight"),
    ],
)
def test_refused_when_it_is_loaded(refusals: list[dict[str, str]], what: str, says: str) -> None:
    for each in refusals:
        assert says in each.get(what, "it was taken")
        assert each["goes on"] == "6"


def _takes(rank: int) -> list[str]:
    wrong = []
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        _step(model, optimizer, 0, rank)
        wanted = _facts(optimizer.state_dict())
        mesh = init_device_mesh("cpu", (2,))
        whole = _filed(optimizer.state_dict())

        def distributed(value: Any) -> Any:
            return distribute_tensor(value, mesh, [Shard(0)]) if value.dim() > 0 else value

        dtensors = {number: {k: distributed(v) for k, v in e.items()} for number, e in whole["state"].items()}
        for name, state in {
            "logical": optimizer.state_dict(),
            "a deep copy": copy.deepcopy(optimizer.state_dict()),
            "whole": whole,
            "DTensors": {**whole, "state": dtensors},
            "by etp": etp.optimizer_state_dict(optimizer),
            "by etp, whole": etp.optimizer_state_dict(optimizer, full=True),
        }.items():
            again = torch.optim.AdamW(model.parameters(), lr=0.5)
            again.load_state_dict(state)
            if _facts(again.state_dict()) != wanted:
                wrong.append(name)
            _step(model, again, 1, rank)  # which changes what it has loaded only
            if _facts(optimizer.state_dict()) != wanted:
                wrong.append(f"{name}: shares memory")
        # Parts: what has not been stepped has no state, and a hook of the user's comes first.
        part = {"state": {1: whole["state"][1]}, "param_groups": whole["param_groups"]}
        again = torch.optim.AdamW(model.parameters(), lr=0.5)
        again.register_load_state_dict_pre_hook(lambda _, state: {**state, "state": part["state"]})
        again.load_state_dict(whole)
        if [id(each) for each in again.state] != [id(model.up.weight)]:
            wrong.append("a part")
        # Moments follow the parameter's dtype, as in plain torch; steps do not.
        half = etp.shard_module_(built(Tied).bfloat16(), group)
        its = torch.optim.AdamW(half.parameters(), lr=1e-2)
        its.load_state_dict(whole)
        kinds = {key: value.dtype for key, value in its.state[half.up.weight].items()}
        if kinds != {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}:
            wrong.append(f"dtypes {kinds}")
    return wrong


def test_takes_states_of_every_type() -> None:
    assert launch(_takes, 2) == [[], []]


@pytest.mark.parametrize("kind", [each for each in torch.optim.__all__ if each[0].isupper() and each != "Optimizer"])
def test_each_class_of_torch_is_a_kind_of_its_own(kind: str) -> None:
    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(3, 3))])
    assert state_kinds.kind_of(optimizer) == kind


class Signed(torch.optim.Optimizer):
    """A user's own, with one option and one state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.1)
                parameter.sub_(mean.sign(), alpha=group["lr"])


def _loads_twice(rank: int) -> list[str]:
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)
        optimizer = Signed(model.parameters(), 1e-2)
        _step(model, optimizer, 0, rank)
        wanted = _facts(optimizer.state_dict())
        state = _filed(optimizer.state_dict())
        again = Signed(model.parameters(), 0.5)
        again.load_state_dict(again.state_dict())  # as accelerate does; torch adds to its defaults
        again.load_state_dict(state)
        return [] if _facts(again.state_dict()) == wanted else ["it is another state"]


def test_an_optimiser_is_loaded_again() -> None:
    assert launch(_loads_twice, 2) == [[], []]


def _loads_behind_a_new_group(rank: int) -> bool:
    """torch adds to the defaults of an optimiser that is loaded, and gives them to groups that are added later."""
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)
        optimizer = torch.optim.Adafactor(model.up.parameters())
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({"params": [model.down.weight]})
        _step(model, optimizer, 0, rank)
        wanted = _facts(optimizer.state_dict())
        optimizer.load_state_dict(_filed(optimizer.state_dict()))
        return bool(_facts(optimizer.state_dict()) == wanted)


def test_an_optimiser_with_a_new_group_is_loaded_again() -> None:
    assert launch(_loads_behind_a_new_group, 2) == [True, True]


def _loads_with_one_row(rank: int) -> bool:
    """Rank 1 has one row, of the shape of col_var."""
    with etp.init_group(timeout=20) as group:
        torch.manual_seed(0)
        model = etp.shard_module_(torch.nn.Sequential(torch.nn.Linear(8, 17)), group, min_elements=0)
        optimizer = torch.optim.Adafactor(model.parameters())
        torch.manual_seed(rank)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        wanted = _facts(optimizer.state_dict())
        again = torch.optim.Adafactor(model.parameters())
        again.load_state_dict(_filed(optimizer.state_dict()))
        return bool(_facts(again.state_dict()) == wanted and etp.local(model[0].weight).shape == (16 - 15 * rank, 8))


def test_states_that_have_the_shape_of_rows_by_chance() -> None:
    assert launch(_loads_with_one_row, 2) == [True, True]


def _loads_into_a_plain_one(rank: int) -> bool:
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        _step(model, optimizer, 0, rank)
        plain = built()
        plain.load_state_dict({name: etp.whole(each) for name, each in model.state_dict().items()})
        own = torch.optim.Adam(plain.parameters(), lr=0.01)
        own.load_state_dict(optimizer.state_dict())
        right = [
            type(own.state[mine][key]) is torch.Tensor and torch.equal(own.state[mine][key], etp.whole(value))
            for theirs, mine in zip(model.parameters(), plain.parameters(), strict=True)
            for key, value in optimizer.state[theirs].items()
        ]
        loss_of(plain, rank).backward()
        own.step()
        return all(right) and len(right) == 3 * len(list(plain.parameters()))


def test_a_plain_optimiser_takes_whole_tensors() -> None:
    assert all(launch(_loads_into_a_plain_one, 2))
