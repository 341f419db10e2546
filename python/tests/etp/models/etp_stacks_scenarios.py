"""Experts as one parameter [E, F, K]; each scenario returns what must be equal bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from etp_models import HIDDEN, WIDTH, WORDS, Run, adamw, as_bytes, batch, built
from tessera import etp
from torch.utils.checkpoint import checkpoint

EXPERTS = 5
SKIPPED, EMPTY = 3, 4  # by all ranks but one of each four, and by all
OPTIONS = {"min_elements": 256}


class Experts(torch.nn.Module):
    """As in transformers: each expert that has tokens is taken by its index, which is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / 8)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 8)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        assert self.gate_up.shape == (EXPERTS, 2 * HIDDEN, WIDTH) and len(self.down) == EXPERTS
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen):
            (tokens,) = torch.where(chosen == expert)
            gate, up = F.linear(x[tokens], self.gate_up[expert]).chunk(2, dim=-1)
            out.index_add_(0, tokens, F.linear(F.silu(gate) * up, self.down[expert]).to(out.dtype))
        return out


class Whole(Experts):
    """As its other implementations: all experts in one product, or one for each token."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        gate, up = torch.bmm(x.expand(EXPERTS, -1, -1), self.gate_up.transpose(1, 2)).chunk(2, dim=-1)
        every = (F.silu(gate) * up) @ self.down.mT
        out = every[chosen, torch.arange(len(x))]
        gate, up = torch.bmm(self.gate_up[chosen], x.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        return out + torch.einsum("tk,tfk->tf", F.silu(gate) * up, self.down[chosen])


class Mixed(Experts):
    """One expert and all of them, used several times, by all kinds of indices."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        half = self.gate_up[1, :HIDDEN]
        x = x + F.linear(F.linear(x, half).tanh(), self.down[numpy.int64(1)])
        x = x + F.linear(x @ self.gate_up[-2][HIDDEN:].t(), self.down.select(0, 2))
        x = x + F.linear(x @ self.gate_up[chosen[0] * 0, HIDDEN:, ...].t(), torch.select(self.down, dim=0, index=0))
        for each in self.down[1:3]:
            x = x + F.linear(x @ self.gate_up.select(dim=-3, index=2)[:HIDDEN].t(), each)
        for first, second in zip(self.gate_up, self.down.unbind(), strict=True):
            x = x + (x @ first[:HIDDEN].t()) @ second.t() / EXPERTS
        return x + super().forward(x, chosen)


class InOneOperation(Experts):
    """An operation that takes one expert and all of them."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        alike = torch.matmul(self.gate_up, self.gate_up[0].t()).tanh().mean((0, 2))
        gate, up = (F.linear(x, self.gate_up[1]) * alike).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[1])


class Grouped(Experts):
    """All experts in one operation that is told which rows are whose."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(chosen, stable=True)
        ends = torch.cumsum(torch.bincount(chosen, minlength=EXPERTS), 0).int()
        gate, up = torch._grouped_mm(x[order], self.gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        out = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        return out[torch.argsort(order, stable=True)]


class Model(torch.nn.Module):
    """`number` is that of the micro-batch: expert SKIPPED has tokens in one of four only, EMPTY never has."""

    def __init__(self, kind: type[Experts] = Experts, recompute: bool | None = None) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.experts = kind()
        self.recompute = recompute

    def forward(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        x = self.emb(ids).flatten(0, 1)
        chosen = ids.flatten() % (SKIPPED + 1 if number % 4 == 1 else SKIPPED)
        if self.recompute is None:
            x = x + self.experts(x, chosen)
        else:
            x = x + checkpoint(self.experts, x, chosen, use_reentrant=self.recompute)
        return F.linear(x, self.emb.weight)


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    ids, targets = batch(number)
    return F.cross_entropy(model(ids, number).float(), targets.flatten())


def _trained(run: Run, make: Callable[[], torch.nn.Module], **options: Any) -> Any:
    model = run.sharded(built(make), **OPTIONS, **options)
    run.train(model, adamw(model.parameters()), loss=loss_of)
    with torch.no_grad():
        return as_bytes(model(batch(3)[0], 1)), run.weights(model)


def one_expert_at_a_time(run: Run) -> Any:
    model = run.sharded(built(Model), **OPTIONS)
    if run.group is not None and run.size > 1:
        weight = model.experts.down.etp
        assert [each.expert_idx for each in weight.experts] == list(range(EXPERTS)) and weight.expert_idx is None
        assert model.experts.down.shape == (EXPERTS, WIDTH, HIDDEN)
        assert etp.local(model.experts.down).shape == (EXPERTS, weight.rows[1] - weight.rows[0], HIDDEN)
    run.train(model, adamw(model.parameters()), accumulation=2, loss=loss_of)
    return run.weights(model)


def gradients_of_experts(run: Run) -> Any:
    """Of one that nobody used, zeros, once there are gradients; also where a hook or an optimiser wrote some."""
    model = run.sharded(built(Model), **OPTIONS)
    found = []
    for _ in range(3):
        run.backward(model, loss_of)
        found.append(run.gradients(model))
    empty = run.whole(model.experts.down.grad)[EMPTY]
    assert not empty.any()
    with torch.no_grad():
        model.experts.down.grad += 1
    run.backward(model, loss_of)
    found.append(run.gradients(model))
    model.zero_grad(set_to_none=False)
    run.backward(model, loss_of)
    return found, run.gradients(model)


def gradients_that_come_later(run: Run) -> Any:
    """Of an expert whose first gradient is added to what something else has written."""

    def of(expert: int) -> Callable[[torch.nn.Module, int], torch.Tensor]:
        return lambda model, number: (model.experts.down[expert] * (number + 1)).square().sum()

    model = run.sharded(built(Model), **OPTIONS)
    run.backward(model, of(0))
    with torch.no_grad():
        model.experts.down.grad += 1
    found = []
    for expert in (1, 0, 2):
        run.backward(model, of(expert))
        found.append(as_bytes(run.whole(model.experts.down.grad)))
    return found


def all_at_once(run: Run) -> Any:
    return _trained(run, lambda: Model(Whole))


def one_and_all(run: Run) -> Any:
    return _trained(run, lambda: Model(Mixed))


def one_and_all_in_one_operation(run: Run) -> Any:
    return _trained(run, lambda: Model(InOneOperation))


def grouped(run: Run) -> Any:
    return _trained(run, lambda: Model(Grouped))


def nobody_uses_them(run: Run) -> Any:
    """No gradient, and no step."""

    def idle(model: torch.nn.Module, number: int) -> torch.Tensor:
        return model.emb(batch(number)[0]).square().mean()

    model = run.sharded(built(Model), **OPTIONS)
    optimizer = adamw(model.parameters())
    run.train(model, optimizer, steps=2, loss=loss_of)
    run.train(model, optimizer, steps=1, loss=idle)
    run.backward(model, idle)
    return run.weights(model), run.gradients(model)


def one_rank_uses_them(run: Run) -> Any:
    def once(model: torch.nn.Module, number: int) -> torch.Tensor:
        value = model.emb(batch(number)[0]).square().mean()
        return value + model.experts.down[SKIPPED].square().mean() if number % 4 == 1 else value

    model = run.sharded(built(Model), **OPTIONS)
    optimizer = adamw(model.parameters())
    run.train(model, optimizer, steps=4, loss=once)
    return run.weights(model)


def experts_in_bf16(run: Run) -> Any:
    """Their gradients are rounded for all ranks at once: the same on two."""
    model = run.sharded(built(Model).bfloat16(), **OPTIONS)
    if run.size == 2:
        run.train(model, adamw(model.parameters()), loss=loss_of)
    with torch.no_grad():
        return as_bytes(model(batch(3)[0], 1)), run.weights(model)


def experts_in_f16(run: Run) -> Any:
    model = built(Model)
    model.experts.half()

    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        ids, _ = batch(number)
        x = model.emb(ids).flatten(0, 1)
        return model.experts(x.half(), ids.flatten() % 3).float().square().mean() * 256  # else gradients underflow

    run.sharded(model, **OPTIONS)
    run.backward(model, loss)
    return run.gradients(model)["experts.down"] if run.size == 2 else None


def experts_under_autocast(run: Run) -> Any:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, number)

    model = run.sharded(built(Model), **OPTIONS)
    run.train(model, adamw(model.parameters()), loss=loss)
    return run.weights(model)


def experts_checkpointed(run: Run) -> Any:
    return [_trained(run, lambda kind=kind: Model(kind, False)) for kind in (Experts, Whole)]


def experts_checkpointed_reentrant(run: Run) -> Any:
    model = run.sharded(built(lambda: Model(Experts, True)), **OPTIONS)
    run.train(model, adamw(model.parameters()), steps=1, loss=loss_of)
    return {name: each for name, each in run.weights(model).items() if not name.startswith("emb")}


def experts_inline(run: Run) -> Any:
    """Steps, and what autograd.grad() gives."""
    model = run.sharded(built(Model), mode="inline", **OPTIONS)
    run.train(model, adamw(model.parameters()), loss=loss_of)
    found = []
    for number in run.numbers():
        value = loss_of(model, number) if run.group is not None else loss_of(model, number) / run.size
        found.append(torch.autograd.grad(value, [model.experts.down])[0])
    summed = sum(found[1:], found[0])
    return run.weights(model), as_bytes(run.whole(summed))


def prefetched_stacks(run: Run) -> Any:
    """Experts that are predicted and not used, and others."""
    etp.update_config(prefetch="on", distance=3)
    try:
        found = [_trained(run, lambda kind=kind: Model(kind, None)) for kind in (Experts, Mixed)]
    finally:
        etp.update_config(prefetch="auto", distance=1)
    return found


def gradients_of_one_stack(run: Run) -> Any:
    model = run.sharded(built(Model), **OPTIONS)
    for number in run.numbers():
        value = loss_of(model, number)
        (value if run.group is not None else value / run.size).backward(inputs=[model.experts.down])
    return run.gradients(model)


def hooks_of_stacks(run: Run) -> Any:
    model = run.sharded(built(Model), **OPTIONS)
    model.experts.down.register_hook(lambda gradient: gradient * 2)
    calls: list[bool] = []
    model.experts.gate_up.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad is not None))
    run.train(model, adamw(model.parameters()), steps=2, loss=loss_of)
    return run.weights(model), calls[:: 1 if run.group is not None else run.size]


def frozen_stacks(run: Run) -> Any:
    model = built(Model)
    model.experts.down.requires_grad_(False)
    run.sharded(model, **OPTIONS)
    optimizer = adamw(model.parameters())
    run.train(model, optimizer, steps=2, loss=loss_of)
    model.experts.down.requires_grad_(True)
    model.experts.gate_up.requires_grad_(False)
    run.train(model, optimizer, steps=2, loss=loss_of)
    return run.weights(model)


def momentum_of_stacks(run: Run) -> Any:
    model = run.sharded(built(Model), **OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-2)
    run.train(model, optimizer, loss=loss_of, before_step=lambda model: etp.clip_grad_norm_(model.parameters(), 0.1))
    return [as_bytes(run.whole(optimizer.state[each]["momentum_buffer"])) for each in _stacks(model)]


def _stacks(model: Any) -> list[torch.nn.Parameter]:
    return [model.experts.gate_up, model.experts.down]


def a_penalty_on_stacks(run: Run) -> Any:
    """Outside of the model's forward."""

    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        first, second = _stacks(model)
        return loss_of(model, number) + 1e-2 * (first.square().sum() + second[EMPTY].abs().sum())

    model = run.sharded(built(Model), **OPTIONS)
    run.train(model, adamw(model.parameters()), loss=loss)
    return run.weights(model)


def states_of_stacks(run: Run) -> Any:
    """What a state_dict() of one model gives to another one; whole again, a model goes on."""
    model, other = run.sharded(built(Model), **OPTIONS), run.sharded(built(Model, seed=9), **OPTIONS)
    run.train(model, adamw(model.parameters()), loss=loss_of)
    other.load_state_dict(model.state_dict())
    found = [run.weights(other)]
    other.load_state_dict(built(Model, seed=10).state_dict())
    found.append(run.weights(other))
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    run.backward(model, loss_of)
    if run.group is not None:
        with etp.summon(model):
            found.append({name: as_bytes(each) for name, each in model.named_parameters()})
        etp.unshard_(model)
    else:
        found.append(run.weights(model))
    assert type(model.experts.down) is torch.nn.Parameter
    gradients = {name: as_bytes(each.grad) for name, each in model.named_parameters()}
    return found, shapes, gradients
