"""mode="inline": weights are inputs of autograd. Each scenario returns what must be equal bytes."""

from __future__ import annotations

from typing import Any

import torch
from etp_generic_scenarios import Attention, ByHand, Experts
from etp_models import Run, adamw, as_bytes, built, loss_of
from etp_scenarios import Recomputed, Reentrant, Twice

OPTIONS: dict[str, Any] = {"mode": "inline", "min_elements": 256}


def training(run: Run) -> Any:
    model = run.sharded(built(), **OPTIONS)
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


def other_modules(run: Run) -> Any:
    found = []
    for kind in (ByHand, Attention, Experts):
        model = run.sharded(built(kind), **OPTIONS)
        run.train(model, adamw(model.parameters()), steps=1)
        found.append(run.weights(model))
    return found


def checkpointed(run: Run) -> Any:
    found = []
    for kind in (lambda: Recomputed(False), lambda: Reentrant(False)):
        model = run.sharded(built(kind), **OPTIONS)
        run.train(model, adamw(model.parameters()))
        found.append(run.weights(model))
    return found


def replaced_by_plain(run: Run) -> Any:
    """A hook gives a plain tensor, the same on all ranks, in a gradient's place."""
    model = run.sharded(built(), **OPTIONS)
    model.down.weight.register_hook(lambda gradient: torch.full(gradient.shape, 0.5))
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


def stepped_in_hooks(run: Run) -> Any:
    """Each parameter has an optimiser of its own, which steps amid the backward."""
    model = run.sharded(built(), **OPTIONS)
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    if run.group is not None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        run.backward(model)
        if run.group is None:  # behind the losses of all ranks
            for parameter in model.parameters():
                step(parameter)
    return run.weights(model)


def clipped(run: Run) -> Any:
    """The gradients' type survives autograd, so that a norm is that of all rows."""
    from tessera import etp

    model = run.sharded(built(Twice), **OPTIONS)
    norms = []
    run.train(
        model,
        adamw(model.parameters()),
        before_step=lambda model: norms.append(as_bytes(etp.clip_grad_norm_(model.parameters(), 0.05))),
    )
    return norms, run.weights(model)


def gradients_as_values(run: Run) -> Any:
    """torch.autograd.grad(), whose results are this rank's rows."""
    model = run.sharded(built(), **OPTIONS)
    weights = [model.emb.weight, model.up.weight, model.down.weight]
    total: list[torch.Tensor] = [torch.zeros(())] * 3
    for number in run.numbers():
        share = 1 if run.group is not None else run.size
        found = torch.autograd.grad(loss_of(model, number) / share, weights)
        total = [before + now for before, now in zip(total, found, strict=True)]
    same = all(weight.grad is None for weight in weights)
    full = [as_bytes(run.whole(each)) for each, weight in zip(total, weights, strict=True)]
    return same, full


def hooks(run: Run) -> Any:
    """Tensor hooks change the reduced gradient; post-accumulate hooks see what has been added."""
    model = built()
    calls: list[bytes] = []
    model.up.weight.register_post_accumulate_grad_hook(lambda p: calls.append(as_bytes(run.whole(p.grad))))
    run.sharded(model, **OPTIONS)
    model.down.weight.register_post_accumulate_grad_hook(lambda p: calls.append(as_bytes(run.whole(p.grad))))
    model.down.weight.register_hook(lambda gradient: gradient * 2)
    run.backward(model)
    every = run.size if run.group is None else 1
    return calls[-2:], len(calls) // every, run.gradients(model)


def second_derivatives(run: Run) -> Any:
    """A penalty on the norm of the mean gradient, which every rank has whole."""
    model = run.sharded(built(), **OPTIONS)
    weights = [model.emb.weight, model.up.weight, model.down.weight]
    numbers = run.numbers()
    loss = torch.stack([loss_of(model, number) for number in numbers]).mean()
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    penalty = sum((each.pow(2).sum() for each in gradients), torch.zeros(()))
    penalty.backward()
    return [as_bytes((run.whole(each.grad) * 1e4).round()) for each in weights]
