"""Constructed layers whose frozen native weights keep no master: adapters train as in plain torch on a base that has
the values which the planes decode to, and as on a base that keeps its rows."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
import torch.nn.functional as F
from etp_models import HIDDEN, WIDTH, WORDS, Run, adamw, as_bytes, batch, built, loss_of
from tessera import etp
from torch_ranks import launch

RANK, SPLITS = 8, [7, 0, 17]
CASES: dict[str, dict[str, Any]] = {
    "nvfp4": {"weight_format": "nvfp4"},
    "mxfp8 at the first use": {"weight_format": "mxfp8", "publish": "first_use"},
    "fp8 inline": {"weight_format": "fp8_e4m3", "mode": "inline"},
}
ADAPTERS = ("into.weight", "out.weight")
WEIGHTS = (
    "emb.weight",
    "first.weight",
    "perceptron.fc1_weight",
    "perceptron.fc2_weight",
    "experts.weight0",
    "experts.weight1",
    "experts.weight2",
)


class Adapted(torch.nn.Module):
    """One layer of each kind, frozen, and adapters of it."""

    def __init__(self, run: Run, masters: str, **options: Any) -> None:
        super().__init__()
        frozen: Any = run.groups | {"native": True, "masters": masters, "device": "meta"} | options
        self.emb = etp.Embedding(WORDS, WIDTH, **frozen)
        self.first = etp.LayerNormLinear(WIDTH, WIDTH, **frozen)
        self.perceptron = etp.LayerNormMLP(WIDTH, HIDDEN, **frozen)
        self.experts = etp.GroupedLinear(3, WIDTH, WIDTH, **frozen)
        self.head = etp.Linear(WIDTH, WORDS, bias=False, **frozen)
        self.head.weight = self.emb.weight
        self.requires_grad_(False)
        trained: Any = run.groups | {"mode": options.get("mode", "deferred")}
        self.into = etp.Linear(WIDTH, RANK, bias=False, **trained)
        self.out = etp.Linear(RANK, WIDTH, bias=False, **trained)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        x = x + self.out(self.into(x)) + self.first(x)
        x = x + self.perceptron(x)
        return self.head(x + self.experts(x, SPLITS))


class Plain(torch.nn.Module):
    """The same of plain torch, with these values."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.values = values
        for name in ADAPTERS:
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(values[name].clone()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        p = self.values
        norm, perceptron = "layer_norm_weight", "perceptron"
        x = F.embedding(ids, p["emb.weight"])
        normed = F.layer_norm(x, (WIDTH,), p[f"first.{norm}"], p["first.layer_norm_bias"])
        first = F.linear(normed, p["first.weight"], p["first.bias"])
        x = x + F.linear(F.linear(x, self.into_weight), self.out_weight) + first
        hidden = F.layer_norm(x, (WIDTH,), p[f"{perceptron}.{norm}"], p["perceptron.layer_norm_bias"])
        hidden = F.gelu(F.linear(hidden, p["perceptron.fc1_weight"], p["perceptron.fc1_bias"]), approximate="tanh")
        x = x + F.linear(hidden, p["perceptron.fc2_weight"], p["perceptron.fc2_bias"])
        parts = x.flatten(0, 1).split(SPLITS)
        routed = [F.linear(part, p[f"experts.weight{i}"], p[f"experts.bias{i}"]) for i, part in enumerate(parts)]
        return F.linear(x + torch.cat(routed).view_as(x), p["emb.weight"])


def _made(run: Run, masters: str, **options: Any) -> Any:
    return run.sharded(built(lambda: Adapted(run, masters, **options)))


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {name: etp.whole(each).detach().clone() for name, each in model.named_parameters(remove_duplicate=False)}


def _ramp(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-0.25, 0.25, like.numel()).view(like.shape)


def _bytes(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: as_bytes(each) for name, each in values.items()}


def _of_frozen(model: Any) -> int:
    return sum(each.master_bytes + each.shard_bytes for each in etp.report(model.emb).weights if each.frozen)


def _trained(run: Run, masters: str, **options: Any) -> dict[str, Any]:
    model = _made(run, masters, **options)
    run.done = 0
    optimizer = adamw(model.parameters())  # also of what is frozen
    found: dict[str, Any] = {"bytes": _of_frozen(model), "values": _values(model)}
    run.train(model, optimizer, steps=2)
    found["adapters"] = [as_bytes(etp.whole(model.get_parameter(name))) for name in ADAPTERS]
    with torch.no_grad():
        found["out"] = as_bytes(model(batch(9)[0]))
        state = model.state_dict()
        found["state"] = {name: as_bytes(etp.whole(state[name])) for name in WEIGHTS}
        found["copy"] = {name: as_bytes(etp.whole(copy.deepcopy(state[name]))) for name in WEIGHTS}
        with etp.summon(model):
            found["summoned"] = {name: as_bytes(model.get_parameter(name)) for name in WEIGHTS}
        model.load_state_dict({name: _ramp(each) for name, each in found["values"].items()})
        found["loaded"] = as_bytes(model(batch(9)[0]))
        torch.manual_seed(5)
        model.perceptron.reset_parameters()
        found["made again"] = as_bytes(model(batch(9)[0]))
    run.train(model, optimizer, steps=1)
    found["later"] = [as_bytes(etp.whole(model.get_parameter(name))) for name in ADAPTERS]
    found["bytes at the end"] = _of_frozen(model)
    return found


def _on_rank(rank: int, size: int) -> dict[str, dict[str, Any]]:
    with etp.init_group(timeout=60) as group:
        return {
            name: {masters: _trained(Run(size, rank, group), masters, **options) for masters in ("all", "trained")}
            for name, options in CASES.items()
        }


@pytest.fixture(scope="module", params=[1, 2, 4])
def trained(request: pytest.FixtureRequest) -> tuple[int, list[Any]]:
    return request.param, launch(functools.partial(_on_rank, size=request.param), request.param)


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_plain_torch_with_the_decoded_values(trained: tuple[int, list[Any]], name: str) -> None:
    size, ranks = trained
    torch.set_num_threads(1)
    run, plain = Run(size), Plain(ranks[0][name]["trained"]["values"])
    run.train(plain, adamw(plain.parameters()), steps=2)
    for rank in ranks:
        found = rank[name]["trained"]
        assert found["adapters"] == [as_bytes(plain.into_weight), as_bytes(plain.out_weight)]
        with torch.no_grad():
            assert found["out"] == as_bytes(plain(batch(9)[0]))


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_a_base_that_keeps_its_rows(trained: tuple[int, list[Any]], name: str) -> None:
    for rank in trained[1]:
        kept, dropped = rank[name]["all"], rank[name]["trained"]
        for what in ("adapters", "out", "loaded", "made again", "later"):
            assert dropped[what] == kept[what], what
        assert len({dropped[what] for what in ("out", "loaded", "made again")}) == 3


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_what_uses_see(trained: tuple[int, list[Any]], name: str) -> None:
    for rank in trained[1]:
        dropped = rank[name]["trained"]
        expected = _bytes({each: dropped["values"][each] for each in WEIGHTS})
        for way in ("state", "copy", "summoned"):
            assert dropped[way] == expected, way
        assert _bytes(rank[name]["all"]["values"]) != _bytes(dropped["values"])  # which were rounded


@pytest.mark.parametrize("name", CASES)
def test_no_master_is_kept(trained: tuple[int, list[Any]], name: str) -> None:
    for rank in trained[1]:
        assert rank[name]["all"]["bytes"] > 0
        assert rank[name]["trained"]["bytes"] == rank[name]["trained"]["bytes at the end"] == 0


# --- refusals

NATIVE: dict[str, Any] = {"weight_format": "nvfp4", "native": True, "masters": "trained"}
NONE_FROZEN = "masters='trained': no native weight is frozen when it is made: give native=True and device='meta'"


def _frozen() -> etp.Linear:
    layer = etp.Linear(WIDTH, HIDDEN, etp_group=etp.init_group(), device="meta", name="up", **NATIVE)
    layer.requires_grad_(False).reset_parameters()
    return layer


def _not_native() -> None:
    layer = etp.Linear(WIDTH, HIDDEN, etp_group=etp.init_group(), device="meta", masters="trained")
    layer.requires_grad_(False).reset_parameters()


def _train_later() -> None:
    layer = _frozen()
    layer.weight.requires_grad = True
    layer(torch.ones(1, WIDTH))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another word": (lambda: etp.Linear(8, 8, masters="none"), "masters 'none': 'all' and 'trained' are possible"),
    "nothing frozen": (lambda: etp.Linear(WIDTH, HIDDEN, etp_group=etp.init_group(), **NATIVE), NONE_FROZEN),
    "frozen, not native": (_not_native, NONE_FROZEN),
    "training": (
        lambda: _frozen().requires_grad_(True),
        "up.weight is kept as nvfp4 only, without a master that could",
    ),
    "training later": (_train_later, "up.weight is kept as nvfp4 only, without a master that could be trained"),
    "rows": (lambda: etp.local(_frozen().weight), "up.weight is kept as nvfp4 only, and no rows of it are in memory"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(tessera.InvalidArgumentError, match=re.escape(message)):
        call()


def test_the_loss_goes_down() -> None:
    """Of the model that these tests train."""
    model = _made(Run(1, 0, etp.init_group()), "trained", **CASES["nvfp4"])
    optimizer = adamw(model.parameters())
    losses = []
    for _ in range(20):
        loss = loss_of(model, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
