"""Compiled models; each scenario returns what must be equal bytes, also to a plain model that is not compiled."""

from __future__ import annotations

from typing import Any

import etp_generic_scenarios as by_hand_scenarios
import etp_scenarios
import torch
import torch.nn.functional as F
from etp_generic_scenarios import Attention, ByHand, Experts
from etp_models import HIDDEN, WIDTH, WORDS, Run, Tied, adamw, as_bytes, batch, built, loss_of
from etp_scenarios import Recomputed, Reentrant
from tessera import etp

BACKEND = {"backend": "eager"}  # set for each launch
OPTIONS = {"min_elements": 256}


class Called(torch.nn.Module):
    """Weights of its own, used by functions, with something to fuse between them."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Parameter(torch.randn(HIDDEN, WIDTH) / 8)
        self.down = torch.nn.Parameter(torch.randn(WIDTH, HIDDEN) / 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        hidden = F.linear(self.norm(x), self.up)
        hidden = F.gelu(hidden) * torch.sigmoid(hidden)
        return F.linear(F.linear(hidden, self.down) + x, self.emb.weight)


def _compiled(run: Run, what: Any, **options: Any) -> Any:
    return what if run.group is None else torch.compile(what, **BACKEND, **options)


def _trained(run: Run, kind: Any, **options: Any) -> Any:
    model = run.sharded(built(kind), **OPTIONS, **options)
    optimizer = adamw(model.parameters())
    called = _compiled(run, model)
    run.train(called, optimizer, accumulation=2)
    with torch.no_grad():
        return as_bytes(called(batch(3)[0])), run.weights(model)


def known_modules(run: Run) -> Any:
    return _trained(run, Tied)


def by_hand(run: Run) -> Any:
    return _trained(run, ByHand)


def functions_of_torch(run: Run) -> Any:
    return _trained(run, Called)


def modules_of_torch(run: Run) -> Any:
    return _trained(run, Attention)


def stacks_of_experts(run: Run) -> Any:
    return _trained(run, Experts)


def inline(run: Run) -> Any:
    def trained(kind: Any) -> Any:
        model = run.sharded(built(kind), mode="inline", **OPTIONS)
        run.train(_compiled(run, model), adamw(model.parameters()), steps=2)
        return run.weights(model)

    return [trained(kind) for kind in (Tied, ByHand, Called)]


def checkpointed(run: Run) -> Any:
    kinds = (
        lambda: Recomputed(False),
        lambda: Recomputed(False, True),
        lambda: Reentrant(False),
        lambda: by_hand_scenarios.Recomputed(False),
    )
    return [_trained(run, kind) for kind in kinds]


def frozen_at_run_time(run: Run) -> Any:
    model = run.sharded(built(Called), **OPTIONS)
    optimizer = adamw(model.parameters())
    called = _compiled(run, model)
    for trains in (True, False, True):
        for parameter in (model.up, model.emb.weight, model.norm.bias):
            parameter.requires_grad_(trains)
        run.train(called, optimizer, steps=1)
    return run.weights(model)


def evaluation_between_steps(run: Run) -> Any:
    model = run.sharded(built(Called), **OPTIONS)
    optimizer = adamw(model.parameters())
    called = _compiled(run, model)
    seen = []
    for _ in range(2):
        run.train(called, optimizer, steps=1)
        called.eval()
        with torch.no_grad():
            seen.append(as_bytes(called(batch(5)[0])))
        with torch.inference_mode():
            seen.append(as_bytes(called(batch(6)[0]).clone()))
        called.train()
    return seen, run.weights(model)


def dynamic_shapes(run: Run) -> Any:
    def trained(kind: Any) -> Any:
        model = run.sharded(built(kind), **OPTIONS)
        called = _compiled(run, model, dynamic=True)
        for length in (2, 3, 6):

            def loss(model: Any, number: int, length: int = length) -> torch.Tensor:
                return model(batch(number)[0][:, :length]).square().mean()

            run.backward(called, loss)
        return run.gradients(model)

    return [trained(kind) for kind in (Tied, Called)]


def in_place(run: Run) -> Any:
    model = run.sharded(built(ByHand), **OPTIONS)
    if run.group is not None:
        model.compile(**BACKEND)
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


def compiled_before_sharding(run: Run) -> Any:
    """As a whole, in place, and a part of it; each before and after a first call."""

    def trained(kind: Any, way: str, called_before: bool) -> Any:
        model = built(kind)
        called = _compiled(run, model) if way == "whole" else model
        if run.group is not None and way == "in place":
            model.compile(**BACKEND)
        if run.group is not None and way == "a part":
            model.emb = torch.compile(model.emb, **BACKEND)
        if called_before:
            loss_of(called, 100)
        assert run.sharded(called, formats={r"emb\..*weight": "f32"}, **OPTIONS) is called
        run.train(called, adamw(called.parameters()), steps=2)
        return list(run.weights(model).values())

    ways = ("whole", "in place", "a part")
    return [trained(kind, way, before) for kind in (Tied, Called) for way in ways for before in (False, True)]


def whole_again(run: Run) -> Any:
    """One compiled model within summon() and after unshard_()."""
    model = run.sharded(built(Called), **OPTIONS)
    called = _compiled(run, model)
    run.train(called, adamw(model.parameters()), steps=1)
    ids = batch(7)[0]
    with torch.no_grad():
        seen = [as_bytes(called(ids))]
        if run.group is None:
            return seen * 3
        with etp.summon(called):
            seen.append(as_bytes(called(ids)))
        assert etp.unshard_(called) is called
        return [*seen, as_bytes(called(ids))]


def steps_of_optimizers(run: Run) -> Any:
    """Eager, whatever is compiled; with a closure, too."""

    def trained(kind: Any, options: dict[str, Any], closure: bool) -> Any:
        model = run.sharded(built(), **OPTIONS)
        optimizer = kind(model.parameters(), lr=1e-2, **options)
        step = _compiled(run, optimizer.step)
        called = _compiled(run, model)

        def evaluate() -> float:
            optimizer.zero_grad()
            run.backward(called)
            return 0.0

        for _ in range(3):
            if closure:
                step(evaluate)
            else:
                evaluate()
                step()
        return run.weights(model)

    adam = torch.optim.AdamW
    return [
        trained(adam, {}, False),
        trained(adam, {"fused": True}, False),
        trained(adam, {"foreach": True}, True),
        trained(torch.optim.SGD, {"momentum": 0.9}, False),
    ]


def a_whole_step(run: Run) -> Any:
    def trained(kind: Any) -> Any:
        model = run.sharded(built(kind), **OPTIONS)
        optimizer = adamw(model.parameters())

        def step() -> None:
            run.backward(model)
            etp.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()

        called = _compiled(run, step)
        for _ in range(3):
            called()
        return run.weights(model)

    return [trained(kind) for kind in (Tied, ByHand)]


def autocast(run: Run) -> Any:
    return etp_scenarios.autocast(run) if run.group is None else _autocast(run)


def _autocast(run: Run) -> Any:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, number)

    model = run.sharded(built(etp_scenarios.WithAdapter), min_elements=64)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    run.train(_compiled(run, model), adamw(model.parameters()), loss=loss)
    return run.weights(model)


def a_moving_average(run: Run) -> Any:
    """Compiled functions that see rows."""
    model = run.sharded(built(ByHand), **OPTIONS)
    average = run.sharded(built(ByHand, seed=9), **OPTIONS)

    def follow() -> None:
        for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 0.25)

    called = _compiled(run, follow)
    optimizer = adamw(model.parameters())
    for _ in range(2):
        run.train(model, optimizer, steps=1)
        with torch.no_grad(), run.update(average):
            called()
    return run.weights(average)
