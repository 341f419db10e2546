"""A model with everything in it, trained in every combination of what may change no bit."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from etp_models import HIDDEN, WIDTH, WORDS, Loss, Run, as_bytes, batch, built
from tessera import etp
from torch.utils.checkpoint import checkpoint

RANKS = 4  # at most: global micro-batches of a step are so many times the accumulation


class Everything(torch.nn.Module):
    """A tied embedding, a block that is called twice, a frozen layer, a stack of experts, and three experts: one that
    odd micro-batches skip, one that has tokens, and one that is empty."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.stack = torch.nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 8)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.emb.weight

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.norm(self.up(x))))
        return x + F.linear(self.frozen(x), self.stack[0]).tanh()

    def forward(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        x = self.emb(ids)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        if number % 2 == 0:
            x = x + self.experts[0](x).tanh()
        x = x + self.experts[1](x).tanh()
        empty = self.experts[2](x[:0])
        return self.head(torch.cat([x, empty]))


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination. `gather` is the format that travels; empty: fp32 parameters as they are."""

    gather: str
    accumulation: int
    recompute: bool
    fused: bool

    def __str__(self) -> str:
        kind = "fused" if self.fused else "foreach"
        return f"{self.gather or 'plain'}-{self.accumulation}-{'recompute' if self.recompute else 'keep'}-{kind}"


def _cases() -> list[tuple[Case, bool]]:
    """All, and which of them have every pair of values of two columns."""
    chosen = []
    for i, gather in enumerate(("", "bf16", "mxfp8", "nvfp4")):
        for accumulates, recompute in itertools.product((False, True), (False, True)):
            case = Case(gather, 4 if accumulates else 1, recompute, accumulates != (i >= 2))
            chosen.append((case, recompute == (accumulates != (i % 2 == 1))))
    return chosen


ALL = [case for case, _ in _cases()]
COVERING = [case for case, covers in _cases() if covers]
POLICIES: dict[str, dict[str, Any]] = {
    "prefetched": {"prefetch": "on"},
    "far ahead": {"prefetch": "on", "distance": 4},
    "on demand": {"prefetch": "off"},
    "capped": {"prefetch": "on", "distance": 2, "cap_bytes": 40_000},
    "at first use": {"publish": "first_use"},
}


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    ids, targets = batch(number)
    return F.cross_entropy(model(ids, number).flatten(0, 1).float(), targets.flatten())


def same_uses(model: torch.nn.Module, number: int) -> torch.Tensor:
    """Every micro-batch uses every weight: to publish one at its first use is collective."""
    ids, targets = batch(number)
    return F.cross_entropy(model(ids, 0).flatten(0, 1).float(), targets.flatten())


def train(run: Run, case: Case, steps: int, policy: str = "", loss: Loss = loss_of) -> Any:
    """Weights and optimiser states after so many steps; steps have the same global micro-batches for every N."""
    options = dict(POLICIES.get(policy, {}))
    publish = options.pop("publish", "update")
    before = {name: getattr(etp.config.config, name) for name in options}
    etp.update_config(**options)
    model = built(lambda: Everything(case.recompute))
    formats = {".*": case.gather} if case.gather else None
    run.sharded(model, formats=formats, min_elements=256, publish=publish)
    etp.update_config(**before)
    options = {"fused": True} if case.fused else {"foreach": True}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, **options)
    norms: list[bytes] = []
    run.train(
        model,
        optimizer,
        steps,
        accumulation=case.accumulation * RANKS // run.size,
        before_step=lambda model: norms.append(as_bytes(etp.clip_grad_norm_(model.parameters(), 0.5))),
        loss=loss,
    )
    states = {
        f"{key} of {name}": as_bytes(run.whole(value))
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return run.weights(model) | states | {"norms": b"".join(norms)}
