"""Models whose weights are large enough to be mapped instead of copied; each returns what must be equal bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from etp_models import LENGTH, ROWS, Run, adamw, built
from tessera import etp
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, HIDDEN = 320, 128, 256


class Wide(torch.nn.Module):
    """Shards are whole pages on 2 and 4 ranks; the head is the embedding's weight, and one weight is used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.mixes = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.emb.weight

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x))) @ self.mixes

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.emb(ids)))


MAPPED = ("emb.weight", "up.weight", "down.weight")


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(500 + number)
    ids, targets = torch.randint(0, WORDS, (2, ROWS, LENGTH), generator=generator)
    return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


def _shared(run: Run, model: Any) -> Any:
    """Of ranks: it is what the test is about."""
    sharded = run.sharded(model)
    if run.group is not None:
        runtime = sharded.up.weight.etp.model.runtime
        found = [
            name
            for name, each in sharded.named_parameters()
            if hasattr(each, "etp") and runtime.is_mapped(each.etp.number)
        ]
        assert tuple(found) == MAPPED, found
    return sharded


def a_long_training(run: Run) -> Any:
    model = _shared(run, built(Wide))
    run.train(model, adamw(model.parameters()), steps=40, loss=loss_of)
    return run.weights(model)


def accumulation_and_evaluation(run: Run) -> Any:
    model = _shared(run, built(Wide))
    optimizer = adamw(model.parameters())
    found = []
    for _ in range(3):
        run.train(model, optimizer, steps=1, accumulation=2, loss=loss_of)
        with torch.no_grad():
            found.append(loss_of(model, 99).item())
    return found, run.weights(model)


def recomputed(run: Run) -> Any:
    model = _shared(run, built(Wide))
    block = model.block
    model.block = lambda x: checkpoint(block, x, use_reentrant=False)
    run.train(model, adamw(model.parameters()), steps=3, loss=loss_of)
    return run.weights(model)


def operations_with_the_parameter(run: Run) -> Any:
    """Of a weight that is mapped, beside its module's uses."""
    model = _shared(run, built(Wide))

    def loss(model: Any, number: int) -> torch.Tensor:
        return loss_of(model, number) + model.up.weight.t().square().mean() + model.down.weight[:3].sin().sum()

    run.train(model, adamw(model.parameters()), steps=3, loss=loss)
    return run.weights(model)


def another_writer(run: Run) -> Any:
    model = _shared(run, built(Wide))
    run.train(model, adamw(model.parameters()), steps=2, loss=loss_of)
    with run.update(model), torch.no_grad():
        for parameter in model.parameters():
            etp.local(parameter).mul_(0.5)
    found = [loss_of(model, 7).item()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    found.append(loss_of(model, 7).item())
    model.load_state_dict(built(Wide, seed=8).state_dict())
    found.append(loss_of(model, 7).item())
    return found, run.weights(model)


def frozen(run: Run) -> Any:
    model = _shared(run, built(Wide))
    model.up.weight.requires_grad_(False)
    run.train(model, adamw([each for each in model.parameters() if each.requires_grad]), steps=2, loss=loss_of)
    model.up.weight.requires_grad_(True)
    run.train(model, adamw(model.parameters()), steps=2, loss=loss_of)
    return run.weights(model)
