"""Optimisers of packages, as they are: 20 steps of sharded weights against one process that has all micro-batches, and
states that rank 0 has saved alone, loaded by other numbers of ranks.

Each rank has micro-batches of its own. A step has as many as six ranks would have, whatever their number, so that bits
are compared. torchao compiles its steps, but not those that hold sharded weights: one process runs them as they are
written, too.
"""

from __future__ import annotations

import importlib
import pathlib
import tempfile
from collections.abc import Callable
from itertools import starmap
from typing import Any

import pytest
import torch
from launched import launch
from tessera import etp

STEPS = 20
MICRO_BATCHES = 6  # of a step, over all ranks
Make = Callable[[Any], torch.optim.Optimizer]


def _of(module: str, name: str, **options: Any) -> Make:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(importlib.import_module(module), name)(parameters, **options)

    return make


def _wrapped(parameters: Any) -> Any:
    import schedulefree

    return schedulefree.ScheduleFreeWrapper(torch.optim.SGD(parameters, lr=0.1), momentum=0.9)


KINDS: dict[str, dict[str, Make]] = {
    "torchao": {
        f"torchao.{name}": _of("torchao.optim", name, lr=1e-2, **options)
        for name, options in {
            "AdamW8bit": {"weight_decay": 0.1},
            "Adam8bit": {},
            "AdamW4bit": {},
            "Adam4bit": {},
            "AdamWFp8": {},
            "AdamFp8": {},
            "_AdamW": {"weight_decay": 0.1},
        }.items()
    },
    "bitsandbytes": {
        f"bitsandbytes.{name}": _of("bitsandbytes.optim", name, lr=1e-2, **options)
        for name, options in {
            "AdamW": {},
            "Adam8bit": {},
            "AdamW8bit": {},
            "Lion": {},
            "Lion8bit": {},
            "SGD": {"momentum": 0.9},
            "SGD8bit": {"momentum": 0.9},
            "Adagrad": {},
            "RMSprop": {},
            "LAMB": {},
            "LARS": {"momentum": 0.9},
            "AdEMAMix": {},
        }.items()
    },
    "schedulefree": {
        "schedulefree.AdamWScheduleFree": _of("schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=3),
        "schedulefree.AdamWScheduleFree foreach": _of("schedulefree", "AdamWScheduleFree", lr=1e-2, foreach=True),
        "schedulefree.AdamWScheduleFree one by one": _of("schedulefree", "AdamWScheduleFree", lr=1e-2, foreach=False),
        "schedulefree.SGDScheduleFree": _of("schedulefree", "SGDScheduleFree", lr=0.1),
        "schedulefree.RAdamScheduleFree": _of("schedulefree", "RAdamScheduleFree", lr=1e-2),
        "schedulefree.ScheduleFreeWrapper": _wrapped,
    },
    "transformers": {
        "transformers.Adafactor": _of("transformers.optimization", "Adafactor"),
        "transformers.Adafactor with momentum": _of(
            "transformers.optimization",
            "Adafactor",
            lr=1e-3,
            relative_step=False,
            scale_parameter=False,
            beta1=0.9,
        ),
    },
}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.GELU(),
        torch.nn.LayerNorm(128),
        torch.nn.Linear(128, 96),
        torch.nn.Tanh(),
        torch.nn.Linear(96, 64, bias=False),
    )


def accumulate(model: torch.nn.Module, step: int, rank: int, world: int) -> None:
    """Add up the gradients of this rank's micro-batches of a step."""
    for number in range(rank, MICRO_BATCHES, world):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(MICRO_BATCHES * step + number))
        ((model(x) - x.roll(1, 1)).square().mean() / MICRO_BATCHES).backward()


def whole_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [etp.whole(parameter).clone() for parameter in model.parameters()]


def _train(optimizer: Any) -> None:
    if hasattr(optimizer, "train"):  # of schedulefree
        optimizer.train()


def _made(make: Make, world: int) -> tuple[torch.nn.Module, Any]:
    model = make_model()
    if world > 1:
        etp.shard_module_(model, etp.init_group(), reduction="sum")
    return model, make(model.parameters())


def _run(model: torch.nn.Module, optimizer: Any, steps: range, rank: int, world: int) -> None:
    _train(optimizer)
    for step in steps:
        accumulate(model, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()


def trained(rank: int, world: int, package: str, folder: str) -> dict[str, Any]:
    """Train by each optimiser of a package; half way, rank 0 saves model and optimiser alone."""
    torch.compiler.set_stance("force_eager")
    weights: dict[str, Any] = {}
    for name, make in KINDS[package].items():
        model, optimizer = _made(make, world)
        _run(model, optimizer, range(STEPS // 2), rank, world)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, pathlib.Path(folder) / f"{name}.pt")
        _run(model, optimizer, range(STEPS // 2, STEPS), rank, world)
        weights[name] = whole_weights(model)
        if hasattr(optimizer, "eval"):
            optimizer.eval()
            weights[f"{name}, averaged"] = whole_weights(model)
    return weights


def resumed(rank: int, world: int, package: str, folder: str) -> dict[str, Any]:
    """Go on from what trained() has saved."""
    torch.compiler.set_stance("force_eager")
    weights: dict[str, Any] = {}
    for name, make in KINDS[package].items():
        model, optimizer = _made(make, world)
        state = torch.load(pathlib.Path(folder) / f"{name}.pt", weights_only=False)
        model.load_state_dict(state["model"])
        _train(optimizer)
        optimizer.load_state_dict(state["optimizer"])
        _run(model, optimizer, range(STEPS // 2, STEPS), rank, world)
        weights[name] = whole_weights(model)
    return weights


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert found.keys() <= expected.keys()
    assert found
    return [
        name
        for name, weights in found.items()
        if not all(starmap(torch.equal, zip(weights, expected[name], strict=True)))
    ]


@pytest.mark.parametrize("package", KINDS)
def test_steps_and_states_are_those_of_one_process(package: str) -> None:
    pytest.importorskip(package)
    with (
        tempfile.TemporaryDirectory() as alone,
        tempfile.TemporaryDirectory() as two,
        tempfile.TemporaryDirectory() as three,
    ):
        (expected,) = launch(trained, 1, 1, package, alone)
        moved = {
            name: [
                (after - before).abs().max() for after, before in zip(weights, make_model().parameters(), strict=True)
            ]
            for name, weights in expected.items()
        }
        assert [name for name, each in moved.items() if max(each) < 1e-3] == []
        for world, folder in ((2, two), (3, three)):
            for found in launch(trained, world, world, package, folder):
                assert differences(found, expected) == [], world
        for world, folder in ((3, two), (1, three), (2, alone)):
            for found in launch(resumed, world, world, package, folder):
                assert differences(found, expected) == [], (world, folder)
