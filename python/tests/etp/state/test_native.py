"""Native shards, of matrices and of stacks of experts: ranks share what travels and nothing else, and the training has
the same bytes."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import etp_stacks_scenarios as stacks
import pytest
import tessera
import torch
import torch.distributed.checkpoint as dcp
from etp_models import Loss, Run, Tied, adamw, as_bytes, built, configured, loss_of, on_grid
from tessera import checkpoint, etp
from torch_ranks import launch


class Kind(NamedTuple):
    """Of models."""

    make: Callable[[], torch.nn.Module]
    loss: Loss
    weight: str
    frozen: str


KINDS = {
    "matrices": Kind(Tied, loss_of, "up.weight", "down.weight"),
    "stacks": Kind(stacks.Model, stacks.loss_of, "experts.gate_up", "experts.down"),
    "stacks, whole": Kind(lambda: stacks.Model(stacks.Mixed), stacks.loss_of, "experts.down", "emb.weight"),
}

CASES: dict[str, dict[str, Any]] = {
    "mxfp8": {"formats": {".*": "mxfp8"}},
    "nvfp4 at the first use": {"formats": {".*": "nvfp4"}, "publish": "first_use"},
    "fp8 inline": {"formats": {".*": "fp8_e4m3"}, "mode": "inline"},
    "nvfp4, checked": {"formats": {".*": "nvfp4"}, "check": True},
}
EVERY = [r".*\.weight|experts\..*"]
OPTIONS = {"min_elements": 256}
NAMES = [
    *(f"matrices: {case}" for case in CASES),
    "stacks: mxfp8",
    "stacks: nvfp4, checked",
    "stacks, whole: nvfp4 at the first use",
    "stacks, whole: fp8 inline",
]
GLOBAL = 4  # micro-batches of a step, on all ranks


def _weights_of(model: torch.nn.Module) -> list[etp.Weight]:
    found = {each.etp.number: each.etp for each in model.parameters() if isinstance(each, etp.LogicalTensor)}
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


def _trained(run: Run, kind: Kind, options: dict[str, Any], native: Any, folder: pathlib.Path) -> dict[str, Any]:
    model = built(kind.make)
    model.get_parameter(kind.frozen).requires_grad_(False)
    others = {name: each for name, each in options.items() if name != "check"}
    with configured(check=options.get("check")):
        run.sharded(model, native=native, **OPTIONS, **others)
    optimizer = adamw(each for each in model.parameters() if each.requires_grad)
    found = {"before": _figures(model)}
    accumulation = GLOBAL // run.size
    run.done = 0
    run.train(model, optimizer, steps=2, accumulation=accumulation, loss=kind.loss)
    with etp.update(model), torch.no_grad():  # a writer that is no optimiser
        for each in _weights_of(model):
            each.local.mul_(0.5)
    with torch.no_grad():
        found["updated"] = as_bytes(kind.loss(model, 1))
    model.load_state_dict(built(kind.make, seed=9).state_dict())
    run.train(model, optimizer, steps=1, accumulation=accumulation, loss=kind.loss)
    state = {"model": model.state_dict(), "optimizer": etp.optimizer_state_dict(optimizer)}
    dcp.save(state, checkpoint_id=folder / "dcp")
    checkpoint.save(model, optimizer, folder / "tessera")
    run.train(model, optimizer, steps=1, accumulation=accumulation, loss=kind.loss)
    dcp.load(state, checkpoint_id=folder / "dcp")
    model.load_state_dict(state["model"])
    found["loaded"] = run.weights(model)
    run.train(model, optimizer, steps=1, accumulation=accumulation, loss=kind.loss)
    checkpoint.load(model, optimizer, folder / "tessera")
    assert run.weights(model) == found["loaded"]
    run.done = 3 * accumulation
    run.train(model, optimizer, steps=1, accumulation=accumulation, loss=kind.loss)
    found["weights"] = run.weights(model)
    found["states"] = [
        as_bytes(each["exp_avg"]) for each in etp.optimizer_state_dict(optimizer, full=True)["state"].values()
    ]
    found["after"] = _figures(model)
    with etp.summon(model):
        found["summoned"] = as_bytes(model.get_parameter(kind.weight))
    etp.unshard_(model)
    found["whole"] = as_bytes(model.get_parameter(kind.weight))
    return found


def _on_rank(rank: int, size: int, folder: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    with etp.init_group(timeout=30) as group:
        run = Run(size, rank, group)
        for name in NAMES:
            kind, case = name.split(": ")
            found[name] = [
                _trained(run, KINDS[kind], CASES[case], native, folder / f"{name}, {len(native)}".replace(" ", "-"))
                for native in ((), EVERY)
            ]
    return found


@pytest.fixture(scope="module", params=[1, 2, 4])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("native")
    return launch(functools.partial(_on_rank, size=request.param, folder=folder), request.param)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_a_shard_that_is_not_native(
    trained: list[dict[str, list[dict[str, Any]]]], name: str
) -> None:
    for rank in trained:
        plain, native = rank[name]
        for what in ("updated", "loaded", "weights", "states", "summoned", "whole"):
            assert native[what] == plain[what], what
        assert native["whole"] == native["summoned"] == native["weights"][KINDS[name.split(": ")[0]].weight]


@pytest.mark.parametrize("name", NAMES)
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
            found.append({name: as_bytes(etp.whole(each)) for name, each in model.named_parameters()})
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


def by_native_stacks(run: Run) -> list[dict[str, bytes]]:
    found = []
    for native in ((), EVERY):
        model = run.sharded(built(stacks.Model), formats={".*": "nvfp4"}, native=native, **OPTIONS)
        run.done = 0
        run.train(model, adamw(model.parameters()), loss=stacks.loss_of)
        found.append(run.weights(model))
    return found


def test_replicas() -> None:
    for ranks in on_grid({"matrices": by_native, "stacks": by_native_stacks}, 2, 2).values():
        assert all(each == ranks[0] for each in ranks)
        assert ranks[0][0] == ranks[0][1]


def _verified(rank: int) -> str:
    with etp.init_group(timeout=30) as group:
        options: dict[str, Any] = {"formats": {".*": "nvfp4"}, "native": EVERY, **OPTIONS}
        return str(
            etp.verify(
                built(stacks.Model),
                2,
                group=group,
                batch=lambda number: number,
                loss=stacks.loss_of,
                optimizer=adamw,
                **options,
            )
        )


def test_verify_finds_no_difference_in_native_stacks() -> None:
    assert all("are equal, bit for bit" in each for each in launch(_verified, 2))


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
    assert not any(isinstance(each, etp.LogicalTensor) for each in model.parameters())
