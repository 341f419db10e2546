"""Sharded weights in modules that the package does not know; each scenario returns what must be equal bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from etp_models import HIDDEN, WIDTH, WORDS, Run, adamw, as_bytes, batch, built, loss_of
from torch.utils.checkpoint import checkpoint


class ByHand(torch.nn.Module):
    """A tied head without a module, products written in four ways, a subclass of nn.Linear."""

    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight * 0.5, self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.first = torch.nn.Parameter(torch.randn(WIDTH, HIDDEN) / 8)
        self.second = torch.nn.Parameter(torch.randn(HIDDEN, WIDTH) / 8)
        self.third = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.scaled = self.Scaled(WIDTH, WIDTH)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        assert self.first.shape == (WIDTH, HIDDEN) and self.second.size(0) == HIDDEN == len(self.second)
        x = x + (x @ self.first).tanh() @ self.second
        turned = self.third.t()
        x = torch.einsum("bsk,kf->bsf", x, turned) + x @ turned[:, : WIDTH // 2].repeat(1, 2)
        return self.scaled(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.emb(ids))
        assert self.emb.weight.shape == (WORDS, WIDTH)
        return F.linear(x, self.emb.weight)


OPTIONS = {"min_elements": 256}


def by_hand(run: Run) -> Any:
    model = run.sharded(built(ByHand), **OPTIONS)
    run.train(model, adamw(model.parameters()), accumulation=2)
    with torch.no_grad():
        return as_bytes(model(batch(3)[0])), run.weights(model)


def by_hand_bf16(run: Run) -> Any:
    """Of bf16 gradients, one process rounds every sum, and ranks the sum of all of them: of two, they are one."""
    model = run.sharded(built(ByHand).bfloat16(), **OPTIONS)
    if run.size == 2:
        run.train(model, adamw(model.parameters()))
    with torch.no_grad():
        return as_bytes(model(batch(3)[0])), run.weights(model)


def by_hand_autocast(run: Run) -> Any:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, number)

    model = run.sharded(built(ByHand), **OPTIONS)
    run.train(model, adamw(model.parameters()), loss=loss)
    return run.weights(model)


def by_hand_frozen(run: Run) -> Any:
    model = built(ByHand)
    model.first.requires_grad_(False)
    run.sharded(model, **OPTIONS)
    optimizer = adamw(model.parameters())
    run.train(model, optimizer, steps=2)
    model.third.requires_grad_(False)
    run.train(model, optimizer, steps=2)
    return run.weights(model), model.first.grad is None


class Recomputed(ByHand):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.mix, self.emb(ids), use_reentrant=self.reentrant)
        return checkpoint(lambda x: F.linear(x, self.emb.weight), x, use_reentrant=self.reentrant)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant:  # one use of a weight: see Reentrant
            return x + (x @ self.first).tanh() @ self.second
        return super().mix(x)


def by_hand_checkpointed(run: Run) -> Any:
    model = run.sharded(built(lambda: Recomputed(False)), **OPTIONS)
    run.train(model, adamw(model.parameters()), accumulation=2)
    return run.weights(model)


def by_hand_checkpointed_reentrant(run: Run) -> Any:
    model = run.sharded(built(lambda: Recomputed(True)), **OPTIONS)
    run.train(model, adamw(model.parameters()), steps=1)
    return {name: each for name, each in run.weights(model).items() if not name.startswith("emb")}


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.0, batch_first=True)
        self.conv = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.rnn = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        x = self.layer(x + self.attention(x, x, x, need_weights=False)[0])
        x = self.rnn(x + self.conv(x.transpose(1, 2)).transpose(1, 2))[0]
        return self.head(x)


def modules_of_torch(run: Run) -> Any:
    model = run.sharded(built(Attention), **OPTIONS)
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


class Experts(torch.nn.Module):
    """Stacks as in transformers: [E, F, K], indexed or as one batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.up = torch.nn.Parameter(torch.randn(3, HIDDEN, WIDTH) / 8)
        self.down = torch.nn.Parameter(torch.randn(3, HIDDEN, WIDTH) / 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        out = torch.zeros_like(x)
        for expert in range(self.up.shape[0] - 1):  # the last one is empty
            chosen = (ids % 3 == expert) | (ids % 3 == 2)
            out[chosen] += F.linear(F.linear(x[chosen], self.up[expert]).relu(), self.down[expert].t())
        every = torch.bmm(x.flatten(0, 1).expand(3, -1, -1), self.up.transpose(1, 2)) @ self.down
        return F.linear(out + every.sum(0).view(x.shape), self.emb.weight)


def stacks_of_experts(run: Run) -> Any:
    model = run.sharded(built(Experts), **OPTIONS)
    run.train(model, adamw(model.parameters()), accumulation=2)
    return run.weights(model)


class Sparse(torch.nn.Module):
    """Look-ups whose gradients plain torch keeps as the rows that were looked up; a sharded weight's are dense."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.sparse = sparse
        self.emb = torch.nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.bag = torch.nn.EmbeddingBag(WORDS, WIDTH, mode="sum", sparse=sparse)
        self.table = torch.nn.Parameter(torch.randn(WORDS, WIDTH) / 8)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids) + F.embedding(ids, self.table, sparse=self.sparse)
        x = x + F.embedding(ids + 0, self.table, sparse=self.sparse)
        return self.head(x + self.bag(ids).unsqueeze(1))


def sparse_gradients(run: Run) -> Any:
    model = run.sharded(built(lambda: Sparse(run.group is not None)), **OPTIONS)
    run.train(model, torch.optim.SGD(model.parameters(), lr=0.5), accumulation=2)
    return run.weights(model)


def a_penalty(run: Run) -> Any:
    """It looks at whole weights, outside of any module."""

    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        return loss_of(model, number) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters() if p.dim() > 1)

    model = run.sharded(built(ByHand), **OPTIONS)
    run.train(model, adamw(model.parameters()), loss=loss)
    return run.weights(model)


def a_failed_forward_by_hand(run: Run) -> Any:
    model = run.sharded(built(ByHand), **OPTIONS)
    optimizer = adamw(model.parameters())
    for _ in range(2):
        try:
            model(batch(0)[0].float())
        except (RuntimeError, TypeError):
            optimizer.zero_grad()
        run.train(model, optimizer, steps=1)
    return run.weights(model)


def states(run: Run) -> Any:
    """What a state_dict() of one model gives to another one."""
    model, other = run.sharded(built(ByHand), **OPTIONS), run.sharded(built(ByHand, seed=9), **OPTIONS)
    run.train(model, adamw(model.parameters()))
    found = [str(other.load_state_dict(model.state_dict()))]
    with torch.no_grad():
        found.append(as_bytes(other(batch(3)[0])))
    other.load_state_dict(built(ByHand, seed=10).state_dict())
    other.scaled.load_state_dict(model.scaled.state_dict())
    with torch.no_grad():
        found.append(as_bytes(other(batch(3)[0])))
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    return found, shapes, run.weights(other)
