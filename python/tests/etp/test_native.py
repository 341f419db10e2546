"""Native shards: ranks share what travels and nothing else, and the training has the same bytes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import Run, Tied, adamw, as_bytes, built, configured, on_grid
from tessera import etp
from torch_ranks import launch

CASES: dict[str, dict[str, Any]] = {
    "mxfp8": {"formats": {".*": "mxfp8"}},
    "nvfp4 at the first use": {"formats": {".*": "nvfp4"}, "publish": "first_use"},
    "fp8 inline": {"formats": {".*": "fp8_e4m3"}, "mode": "inline"},
    "nvfp4, checked": {"formats": {".*": "nvfp4"}, "check": True},
}
EVERY = [r".*\.weight"]
GLOBAL = 4  # micro-batches of a step, on all ranks


def _weights_of(model: torch.nn.Module) -> list[etp.Weight]:
    found = {each.etp.number: each.etp for each in model.parameters() if isinstance(each, etp.ShardedParameter)}
    return list(found.values())


def _mapped_from(address: int) -> str:
    """The file that a byte of this process is mapped from; empty: memory of its own."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, _, _, _, _, *path = line.split(maxsplit=5)
            begin, end = (int(each, 16) for each in place.split("-"))
            if begin <= address < end:
                return path[0].strip() if path and path[0].startswith("/") else ""
    raise AssertionError(f"{address:#x} is not mapped")


def _figures(model: torch.nn.Module) -> dict[str, Any]:
    report, forecast = etp.report(model), etp.forecast(model)
    held = [each for each in _weights_of(model) if each.local.numel()]
    return {
        "rows": sum(each.local.numel() * each.local.element_size() for each in held),
        "shards": report.shard_bytes,
        "masters": report.master_bytes,
        "planes": report.publication_bytes,
        "forecast": (forecast.parameters, forecast.masters, forecast.publication, forecast.total),
        "mapped": [bool(_mapped_from(each.local.data_ptr())) for each in held],
    }


def _trained(run: Run, options: dict[str, Any], native: Any) -> dict[str, Any]:
    model = built()
    model.down.weight.requires_grad_(False)
    with configured(check=options.get("check")):
        run.sharded(model, native=native, **{name: each for name, each in options.items() if name != "check"})
    optimizer = adamw(each for each in model.parameters() if each.requires_grad)
    found = {"before": _figures(model)}
    accumulation = GLOBAL // run.size
    run.train(model, optimizer, steps=2, accumulation=accumulation)
    with etp.update(model), torch.no_grad():  # a writer that is no optimiser
        for each in _weights_of(model):
            each.local.mul_(0.5)
    model.load_state_dict(built(seed=9).state_dict())
    run.train(model, optimizer, steps=2, accumulation=accumulation)
    found["weights"] = run.weights(model)
    found["states"] = [
        as_bytes(each["exp_avg"]) for each in etp.optimizer_state_dict(optimizer, full=True)["state"].values()
    ]
    found["after"] = _figures(model)
    with etp.summon(model):
        found["summoned"] = as_bytes(model.up.weight)
    etp.unshard_(model)
    found["whole"] = as_bytes(model.up.weight)
    return found


def _on_rank(rank: int, size: int) -> dict[str, list[dict[str, Any]]]:
    with etp.init_group(timeout=30) as group:
        return {
            name: [_trained(Run(size, rank, group), options, native) for native in ((), EVERY)]
            for name, options in CASES.items()
        }


@pytest.fixture(scope="module", params=[1, 2, 4])
def trained(request: pytest.FixtureRequest) -> list[dict[str, list[dict[str, Any]]]]:
    return launch(functools.partial(_on_rank, size=request.param), request.param)


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_a_shard_that_is_not_native(
    trained: list[dict[str, list[dict[str, Any]]]], name: str
) -> None:
    for rank in trained:
        plain, native = rank[name]
        for what in ("weights", "states", "summoned", "whole"):
            assert native[what] == plain[what], what
        assert native["whole"] == native["summoned"] == native["weights"]["up.weight"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_ranks_share_planes_and_no_rows(trained: list[dict[str, list[dict[str, Any]]]], name: str, when: str) -> None:
    for rank in trained:
        plain, native = (each[when] for each in rank[name])
        rows = plain["rows"]
        assert rows == native["rows"]
        assert (plain["shards"], plain["masters"]) == (rows, 0)
        assert (native["shards"], native["masters"]) == (0, rows)
        assert native["planes"] == plain["planes"]
        assert all(plain["mapped"]) and not any(native["mapped"])
        parameters, masters, planes, total = plain["forecast"]
        assert (parameters, masters, planes) == (rows, 0, plain["planes"])
        assert native["forecast"] == (0, rows, planes, total - rows)


def _as_layers(rank: int) -> list[dict[str, bytes]]:
    found = []
    with etp.init_group(timeout=30) as group:
        for native in (False, True):
            torch.manual_seed(3)
            options: dict[str, Any] = {"etp_group": group, "weight_format": "nvfp4", "native": native}
            model = torch.nn.Sequential(etp.Linear(32, 80, **options), torch.nn.GELU(), etp.Linear(80, 32, **options))
            optimizer = adamw(model.parameters())
            for step in range(3):
                x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert (etp.report(model).shard_bytes == 0) == native
            found.append({name: as_bytes(etp.logical(each)) for name, each in model.named_parameters()})
    return found


def test_constructed_layers() -> None:
    for plain, native in launch(_as_layers, 2):
        assert plain == native


def by_native(run: Run) -> list[dict[str, bytes]]:
    found = []
    for native in ((), EVERY):
        model = run.sharded(built(), formats={".*": "nvfp4"}, native=native)
        run.done = 0  # the same micro-batches
        run.train(model, adamw(model.parameters()))
        found.append(run.weights(model))
    return found


def test_replicas() -> None:
    ranks = on_grid({"native": by_native}, 2, 2)["native"]
    assert all(each == ranks[0] for each in ranks)
    assert ranks[0][0] == ranks[0][1]


def test_a_model_on_the_meta_device() -> None:
    found = []
    for native in ((), EVERY):
        torch.manual_seed(4)
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        etp.shard_module_(model, etp.init_group(), formats={".*": "mxfp8"}, native=native)
        assert (etp.report(model).shard_bytes == 0) == bool(native)
        found.append(as_bytes(model(torch.ones(2, 64))))
    assert found[0] == found[1]


def _sharded(native: Any, formats: Any = None) -> torch.nn.Module:
    model = built(Tied)
    options: dict[str, Any] = {"formats": formats or {".*": "nvfp4"}, "native": native}
    return etp.shard_module_(model, etp.init_group(), **options)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a text": (lambda: _sharded(".*"), "native '.*': give a list of regular expressions"),
    "no weight": (lambda: _sharded(["ump"]), "native: 'ump' names no weight that is sharded: weights are emb.weight"),
    "a plain format": (
        lambda: _sharded(EVERY, {"up.*": "nvfp4", ".*": "bf16"}),
        "native: emb.weight travels as bf16, and a native shard is quantised",
    ),
    "a layer without a format": (
        lambda: etp.Linear(32, 32, etp_group=etp.init_group(), native=True),
        "Linear: native=True needs a quantised weight_format=, not None",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(tessera.InvalidArgumentError, match=re.escape(message)):
        call()


def test_a_refused_model_is_as_it_was() -> None:
    model = built(Tied)
    with pytest.raises(tessera.InvalidArgumentError):
        etp.shard_module_(model, etp.init_group(), formats={"up.*": "nvfp4"}, native=["up.*", "down.*"])
    assert not any(isinstance(each, etp.ShardedParameter) for each in model.parameters())
