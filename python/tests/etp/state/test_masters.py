"""Frozen native weights without a master: only what travels stays in memory. Adapters train as on a base that keeps its
rows, and what is read of the base are the values that uses of it see."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from etp_models import HIDDEN, WIDTH, WORDS, Run, adamw, as_bytes, built, loss_of, on_grid
from tessera import checkpoint, etp
from tessera._tensors.tensors import source_of
from torch_ranks import launch

EXPERTS, RANK = 3, 8
BASE = ("emb.weight", "up.weight", "experts")
PATTERN = r"emb\.weight|up\.weight|experts"


class Adapted(torch.nn.Module):
    """Adapters on a frozen base: a tied embedding, a layer, and a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 8)
        self.requires_grad_(False)
        self.into = torch.nn.Linear(WIDTH, RANK, bias=False)
        self.out = torch.nn.Linear(RANK, HIDDEN, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        hidden = F.gelu(self.up(x) + self.out(self.into(x)))
        for expert in range(EXPERTS):
            x = x + F.linear(hidden, self.experts[expert])
        return F.linear(x, self.emb.weight)


CASES: dict[str, dict[str, Any]] = {
    "nvfp4": {"format": "nvfp4"},
    "mxfp8 at the first use": {"format": "mxfp8", "publish": "first_use"},
    "fp8 inline": {"format": "fp8_e4m3", "mode": "inline"},
    "nvfp4, checked": {"format": "nvfp4", "check": True},
}


def _options(masters: str, format: str, **others: Any) -> dict[str, Any]:
    return {"formats": {PATTERN: format}, "native": [PATTERN], "min_elements": 256, "masters": masters, **others}


def _alone(masters: str = "trained", format: str = "nvfp4") -> Any:
    """On one rank."""
    return etp.shard_module_(built(Adapted), etp.init_group(), **_options(masters, format))


def _values(tensor: torch.Tensor) -> bytes:
    """A product makes no negative zeros."""
    return as_bytes(tensor.detach() + 0.0)


def _seen(model: Any) -> dict[str, bytes]:
    """What products with these weights see."""
    experts = torch.stack([F.linear(torch.eye(HIDDEN), model.experts[each]).t() for each in range(EXPERTS)])
    return {
        "emb.weight": _values(F.linear(torch.eye(WIDTH), model.emb.weight).t()),
        "up.weight": _values(F.linear(torch.eye(WIDTH), model.up.weight).t()),
        "experts": _values(experts),
    }


def _read(model: Any, folder: pathlib.Path) -> dict[str, dict[str, bytes]]:
    """By all ways."""
    state = model.state_dict()
    found = {
        "logical": {name: _values(etp.whole(model.get_parameter(name))) for name in BASE},
        "state": {name: _values(etp.whole(state[name])) for name in BASE},
        "copy": {name: _values(etp.whole(copy.deepcopy(state[name]))) for name in BASE},
    }
    with etp.summon(model):
        found["summoned"] = {name: _values(model.get_parameter(name)) for name in BASE}
    dcp.save(state, checkpoint_id=folder / "dcp")
    checkpoint.save(model, None, folder / "tessera")
    for name, load in (("dcp", _load_dcp), ("tessera", _load_tessera)):
        plain = load(folder / name)
        found[name] = {each: _values(plain.get_parameter(each)) for each in BASE}
    return found


def _load_dcp(folder: pathlib.Path) -> Any:
    plain = built(Adapted, seed=3)
    dcp.load(plain.state_dict(), checkpoint_id=folder)
    return plain


def _load_tessera(folder: pathlib.Path) -> Any:
    plain = built(Adapted, seed=3)
    checkpoint.load(plain, None, folder)
    return plain


def _trained(run: Run, folder: pathlib.Path, masters: str, **options: Any) -> dict[str, Any]:
    before = etp.config.config.check
    etp.update_config(check=options.pop("check", None))
    model = run.sharded(built(Adapted), **_options(masters, **options))
    etp.update_config(check=before)
    run.done = 0
    optimizer = adamw(model.parameters())  # also of what is frozen
    run.train(model, optimizer, steps=2, accumulation=4 // run.size)
    found: dict[str, Any] = {"figures": _figures(model), "seen": _seen(model)}
    with etp.update(model), torch.no_grad():  # of adapters
        etp.local(model.out.weight).mul_(0.5)
    assert _seen(model) == found["seen"]
    model.load_state_dict({name: each for name, each in model.state_dict().items() if name not in BASE}, strict=False)
    assert _seen(model) == found["seen"]
    model.load_state_dict(model.state_dict())  # what it has already is not quantised again
    assert _seen(model) == found["seen"]
    if masters == "trained":
        found["read"] = _read(model, folder)
    run.train(model, optimizer, steps=1, accumulation=4 // run.size)
    model.load_state_dict(built(Adapted, seed=9).state_dict())
    found["loaded"] = _seen(model)
    run.train(model, optimizer, steps=1, accumulation=4 // run.size)
    found["adapters"] = [as_bytes(run.whole(each)) for each in (model.into.weight, model.out.weight)]
    etp.unshard_(model)
    found["whole"] = {name: _values(model.get_parameter(name)) for name in BASE}
    return found


def _figures(model: Any) -> dict[str, int]:
    report, forecast = etp.report(model), etp.forecast(model)
    frozen = [each for each in report.weights if each.frozen]
    return {
        "rows": sum(each.local.numel() * 4 for each in {id(w): w for w in map(_weight, BASE, [model] * 3)}.values()),
        "masters": report.master_bytes,
        "of frozen": sum(each.master_bytes + each.shard_bytes for each in frozen),
        "forecast": forecast.masters,
        "planes": sum(each.publication_bytes for each in frozen),
        "total": forecast.total,
    }


def _weight(name: str, model: Any) -> etp.Weight:
    found: etp.Weight = model.get_parameter(name).etp
    return found


def _on_rank(rank: int, size: int, folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    with etp.init_group(timeout=30) as group:
        return {
            name: {
                masters: _trained(Run(size, rank, group), folder / name.replace(" ", ""), masters, **options)
                for masters in ("all", "trained")
            }
            for name, options in CASES.items()
        }


@pytest.fixture(scope="module", params=[1, 2, 4])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("masters")
    return launch(functools.partial(_on_rank, size=request.param, folder=folder), request.param)


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_a_base_that_keeps_its_rows(trained: list[Any], name: str) -> None:
    for rank in trained:
        kept, dropped = rank[name]["all"], rank[name]["trained"]
        for what in ("seen", "loaded", "adapters"):
            assert dropped[what] == kept[what], what
        assert dropped["loaded"] != dropped["seen"]


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_what_uses_see(trained: list[Any], name: str) -> None:
    for rank in trained:
        kept, dropped = rank[name]["all"], rank[name]["trained"]
        for way, found in dropped["read"].items():
            assert found == dropped["seen"], way
        assert dropped["whole"] == dropped["loaded"] != kept["whole"]


@pytest.mark.parametrize("name", CASES)
def test_figures(trained: list[Any], name: str) -> None:
    for rank in trained:
        kept, dropped = (rank[name][masters]["figures"] for masters in ("all", "trained"))
        assert kept["masters"] == kept["of frozen"] == kept["forecast"] == kept["rows"] > 0
        assert (dropped["masters"], dropped["of frozen"], dropped["forecast"]) == (0, 0, 0)
        assert dropped["planes"] == kept["planes"] > 0
        assert dropped["total"] == kept["total"]


# --- memory


def _held(rank: int, masters: str) -> tuple[int, int]:
    """Bytes of this process, its part of what it shares with the other rank included, and those of its rows. Files are
    left out: how much of torch's libraries counts depends on what else runs."""
    with etp.init_group(timeout=30) as group:
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 2048, bias=False).requires_grad_(False) for _ in range(4)])
        for layer in model:
            torch.nn.init.constant_(layer.weight, 0.5)
        etp.shard_module_(model, group, {".*": "nvfp4"}, native=[".*"], masters=masters)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/smaps_rollup") as fields:
            pss = sum(int(line.split()[1]) * 1024 for line in fields if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        rows = sum(each.etp.shape[0] * each.etp.shape[1] * 4 // 2 for each in model.parameters())
        group.core.exchange("measured", b"")
        return pss, rows


def test_a_process_holds_less_by_the_rows() -> None:
    kept = launch(functools.partial(_held, masters="all"), 2)
    dropped = launch(functools.partial(_held, masters="trained"), 2)
    for (before, rows), (after, _) in zip(kept, dropped, strict=True):
        assert rows == 4 * 1024 * 1024 * 4
        assert 0.85 * rows < before - after < 1.15 * rows


# --- replicas, the meta device, verify


def by_masters(run: Run) -> list[Any]:
    found = []
    for masters in ("all", "trained"):
        run.done = 0
        model = run.sharded(built(Adapted), **_options(masters, "nvfp4"))
        run.train(model, adamw(model.parameters()))
        found.append([as_bytes(run.whole(each)) for each in (model.into.weight, model.out.weight)])
    return found


def test_replicas() -> None:
    ranks = on_grid({"masters": by_masters}, 2, 2)["masters"]
    assert all(each == ranks[0] for each in ranks)
    assert ranks[0][0] == ranks[0][1]


def _from_meta(rank: int) -> list[dict[str, bytes]]:
    """The base gets its values after it is sharded."""
    values = built(Adapted, seed=5).state_dict()
    found = []
    with etp.init_group(timeout=30) as group:
        for masters in ("all", "trained"):
            with torch.device("meta"):
                model = Adapted()
            etp.shard_module_(model, group, init=_fill, **_options(masters, "nvfp4"))
            model.load_state_dict(values)
            found.append(_seen(model))
            assert etp.report(model).master_bytes == 0 or masters == "all"
    return found


def _fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        torch.nn.init.normal_(parameter)


def test_a_model_on_the_meta_device() -> None:
    for kept, dropped in launch(_from_meta, 2):
        assert kept == dropped


def _verified(rank: int) -> str:
    with etp.init_group(timeout=30) as group:
        return str(
            etp.verify(
                built(Adapted),
                2,
                group=group,
                batch=lambda number: number,
                loss=loss_of,
                optimizer=adamw,
                **_options("trained", "nvfp4"),
            )
        )


def test_verify_finds_no_difference() -> None:
    assert all("are equal, bit for bit" in each for each in launch(_verified, 2))


@pytest.mark.parametrize("format", ["mxfp8", "fp8_block_128x128", "nvfp4", "fp8_e4m3"])
def test_values_that_were_decoded_stay_when_they_are_loaded(format: str) -> None:
    model = _alone(format=format)
    with torch.no_grad():
        values = {name: etp.whole(model.get_parameter(name)) for name in BASE}
    again = etp.shard_module_(built(Adapted, seed=3), etp.init_group(), **_options("trained", format))
    again.load_state_dict(values, strict=False)
    for name, expected in values.items():
        rtol = 0 if format in ("mxfp8", "fp8_block_128x128") else 1e-6
        torch.testing.assert_close(etp.whole(again.get_parameter(name)), expected, rtol=rtol, atol=0)


# --- operations of torch


def _operated(rank: int, format: str) -> dict[str, bool]:
    """With decoded values, and writes, which are quantised again: a factor of 2 is exact."""
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(Adapted), group, **_options("trained", format))
        weight, experts = model.up.weight, model.experts
        values, stacked = etp.whole(weight).detach().clone(), etp.whole(experts).detach().clone()
        found = {
            "a copy": torch.equal(etp.whole(weight.detach().clone()), values),
            "a sum": torch.equal(experts.data.sum(), stacked.sum()),
            "another dtype": torch.equal(etp.whole(weight.detach().double()), values.double()),
            "an expert": torch.equal(experts[1] * 2, stacked[1] * 2),
            "rows": torch.equal(weight[3:5].norm(), values[3:5].norm()),
        }
        with torch.no_grad():
            weight.mul_(2)
            with etp.update(model):
                experts.mul_(2)
                weight.mul_(2)
        found["a write"] = torch.equal(etp.whole(weight), 4 * values)
        found["a write of a stack"] = torch.equal(etp.whole(experts), 2 * stacked)
        found["a product"] = _seen(model)["up.weight"] == _values(4 * values)
        found["no master"] = etp.report(model).master_bytes == 0
        with torch.no_grad():
            weight.data.copy_(torch.ones_like(values))
        found["an assignment"] = torch.equal(etp.whole(weight), torch.ones_like(values))
        return found


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "fp8_e4m3"])
def test_operations_take_and_give_decoded_values(format: str) -> None:
    for size in (1, 2):
        for found in launch(functools.partial(_operated, format=format), size):
            assert all(found.values()), found


# --- refusals


def test_what_changes_nothing_is_possible() -> None:
    model = _alone()
    before = _seen(model)
    model.to("cpu").float().requires_grad_(False)
    assert model.up.weight.shape == (HIDDEN, WIDTH) and model.up.weight.dtype is torch.float32
    assert torch.zeros_like(model.experts).shape == (EXPERTS, WIDTH, HIDDEN)
    assert "kept as nvfp4 only" in repr(model.up.weight)
    assert set(model.state_dict(keep_vars=True)) == set(model.state_dict())
    with etp.update(model):
        pass
    assert _seen(model) == before


def _train_later() -> None:
    model = _alone()
    model.up.weight.requires_grad = True
    loss_of(model, 0)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "training": (
        lambda: _alone().requires_grad_(True),
        "experts is kept as nvfp4 only, without a master that could",
    ),
    "training later": (_train_later, "up.weight is kept as nvfp4 only, without a master that could be trained: shard"),
    "rows": (lambda: etp.local(_alone().up.weight), "up.weight is kept as nvfp4 only, and no rows of it are in memory"),
    "padded rows": (lambda: _alone().up.weight.get_padded_shard(), "up.weight is kept as nvfp4 only, and no rows"),
    "another dtype": (
        lambda: _alone().to(torch.float64),
        "experts is sharded and cannot become torch.float64 of (3, 32, 80)",
    ),
    "the bus": (
        lambda: source_of("w", _alone().up.weight).locate(),
        "up.weight is kept as nvfp4 only, and no rows of it are in memory",
    ),
    "the bus, by state": (
        lambda: [source_of("w", each).locate() for each in (_alone().state_dict()["experts"],)],
        "experts is kept as nvfp4 only, and no rows of it are in memory",
    ),
    "another word": (lambda: _alone("none"), "masters 'none': 'all' and 'trained' are possible"),
    "nothing frozen": (
        lambda: etp.shard_module_(
            built(Adapted).requires_grad_(True), etp.init_group(), **_options("trained", "nvfp4")
        ),
        "masters='trained': no native weight is frozen: name some in native=, and freeze them",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(tessera.InvalidArgumentError, match=re.escape(message)):
        call()
