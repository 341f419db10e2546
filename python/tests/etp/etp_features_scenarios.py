"""More of what users do with a model: graphs that are used twice, hooks, adapters, recomputation, optimisers. Each
scenario returns what must be equal bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from etp_generic_scenarios import ByHand
from etp_models import Run, Tied, adamw, as_bytes, batch, built, loss_of
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

# --- graphs


def _shared(run: Run, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each rank's part of the mean; one process divides, and the ranks' reduction does."""
    return losses if run.group is not None else [each / run.size for each in losses]


def a_graph_used_twice(run: Run) -> Any:
    found = []
    for kind in (Tied, ByHand):
        model = run.sharded(built(kind), min_elements=256)
        losses = _shared(run, [loss_of(model, number) for number in run.numbers()])
        for keep in (True, False):
            for loss in losses:
                loss.backward(retain_graph=keep)
        found.append(run.gradients(model))
        run.train(model, adamw(model.parameters()), steps=1)
        found.append(run.weights(model))
    return found


def two_losses_of_one_forward(run: Run) -> Any:
    model = run.sharded(built())
    trunks = [model.block(model.emb(batch(number)[0])) for number in run.numbers()]
    losses = [_shared(run, [model.head(trunk).pow(power).mean() for trunk in trunks]) for power in (1, 2)]
    for power, each in enumerate(losses):
        for loss in each:
            loss.backward(retain_graph=power == 0)
    return run.gradients(model)


def _chosen(run: Run, kind: Callable[[], torch.nn.Module], names: list[str]) -> Any:
    model = run.sharded(built(kind), min_elements=256)
    parameters = dict(model.named_parameters())
    for _ in range(2):
        for loss in _shared(run, [loss_of(model, number) for number in run.numbers()]):
            loss.backward(inputs=[parameters[name] for name in names])
    chosen = run.gradients(model)
    run.train(model, adamw(model.parameters()), steps=1)
    return chosen, run.weights(model)


def gradients_of_whole_parameters_only(run: Run) -> Any:
    return _chosen(run, Tied, ["norm.weight", "up.bias"])


def gradients_of_some_sharded_parameters(run: Run) -> Any:
    return _chosen(run, Tied, ["norm.weight", "emb.weight"]), _chosen(run, ByHand, ["first", "scaled.weight"])


def gradients_of_activations(run: Run) -> Any:
    """torch.autograd.grad() leaves the parameters alone."""
    model = run.sharded(built())
    found = []
    for number in range(2):
        x = model.emb(batch(number)[0]).detach().requires_grad_()
        out = model.head(model.block(x)).sum()
        (gradient,) = torch.autograd.grad(out, [x])
        found.append(as_bytes(gradient))
    untouched = all(parameter.grad is None for parameter in model.parameters())
    run.train(model, adamw(model.parameters()), steps=1)
    return untouched, found, run.weights(model)


def evaluation_amid_a_step(run: Run) -> Any:
    """Between forward and backward, and between micro-steps."""
    model = run.sharded(built())

    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        value = loss_of(model, number)
        with torch.inference_mode():
            model(batch(number + 1)[0])
        return value

    with torch.inference_mode():
        model(batch(0)[0])  # before the first training
    run.train(model, adamw(model.parameters()), steps=2, accumulation=2, loss=loss)
    return run.weights(model)


# --- hooks


def tensor_hooks(run: Run) -> Any:
    """They change the gradient before it is added: ranks' sum here, and every micro-batch's in one process."""
    model = built()
    model.up.weight.register_hook(lambda gradient: gradient * 2)
    run.sharded(model)
    model.emb.weight.register_hook(lambda gradient: gradient * 0.5)
    model.norm.weight.register_hook(lambda gradient: gradient * 4)
    run.backward(model)
    first = run.gradients(model)
    if run.size == 2:  # sums of two are added in one order only
        run.train(model, adamw(model.parameters()), steps=1)
    return first


def tensor_hooks_of_some_gradients(run: Run) -> Any:
    """Those of a backward with inputs=, and of others afterwards: each is called with gradients only."""
    model = run.sharded(built())
    seen = []
    for each in (model.up, model.down):
        each.weight.register_hook(lambda gradient: seen.append(gradient.dim()))
    model.down.weight.register_hook(lambda gradient: gradient * 2).remove()
    for loss in _shared(run, [loss_of(model, number) for number in run.numbers()]):
        loss.backward(inputs=[model.up.weight])
    first = run.gradients(model)
    model.zero_grad()
    run.backward(model)
    return first, run.gradients(model), seen if run.group is not None else seen[:: run.size]


def an_optimizer_within_the_backward(run: Run) -> Any:
    """One for each parameter, stepped by its post-accumulate hook."""
    model = run.sharded(built())
    optimizers = {name: adamw([parameter]) for name, parameter in model.named_parameters()}

    def step(name: str) -> None:
        optimizers[name].step()
        optimizers[name].zero_grad()

    if run.group is not None:
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: step(name))
    for _ in range(3):
        run.backward(model)
        if run.group is None:
            for name in optimizers:
                step(name)
    return run.weights(model)


def gradients_changed_by_hand(run: Run) -> Any:
    model = run.sharded(built())

    def change(model: Any) -> None:
        model.up.weight.grad.mul_(0.5)
        model.down.weight.grad = None
        model.emb.weight.grad.nan_to_num_().clamp_(-1e-3, 1e-3)

    run.train(model, adamw(model.parameters()), before_step=change)
    return run.weights(model)


# --- frozen weights and adapters


class Lora(torch.nn.Module):
    """A layer that is frozen, and what is learnt instead."""

    def __init__(self, base: torch.nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, rank))
        self.merged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out if self.merged else out + 0.5 * F.linear(F.linear(x, self.a), self.b)


def _with_adapters() -> Any:
    model = built()
    model.requires_grad_(False)
    model.up, model.down = Lora(model.up), Lora(model.down)
    return model


def adapters_around_layers(run: Run) -> Any:
    """They are trained, with a checkpoint, and then merged."""
    model = run.sharded(_with_adapters(), min_elements=256)
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss(model: Any, number: int) -> torch.Tensor:
        ids, targets = batch(number)
        x = checkpoint(model.block, model.emb(ids), use_reentrant=False)
        return F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())

    run.train(model, adamw(learnt), steps=3, accumulation=2, loss=loss)
    frozen = [parameter.grad is None for parameter in (model.up.base.weight, model.down.base.weight, model.emb.weight)]
    changes = [0.5 * run.whole(each.b) @ run.whole(each.a) for each in (model.up, model.down)]
    with run.update(model), torch.no_grad():
        for each, change in zip((model.up, model.down), changes, strict=True):
            each.base.weight += change
            each.merged = True
    with torch.no_grad():
        return frozen, run.weights(model), as_bytes(model(batch(4)[0]))


def frozen_amid_an_accumulation(run: Run) -> Any:
    model = run.sharded(built())
    optimizer = adamw(model.parameters())
    run.backward(model)
    for parameter in (model.up.weight, model.norm.bias):
        parameter.requires_grad_(False)
    run.backward(model)
    kept = run.gradients(model)
    optimizer.step()
    for parameter in (model.up.weight, model.norm.bias):
        parameter.requires_grad_(True)
    run.backward(model)
    return kept, run.gradients(model), run.weights(model)


# --- recomputation


class Dropping(Tied):
    """Blocks with dropout, recomputed in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().block(x), 0.25, self.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        if self.way == "sequential":
            blocks = [self.block, self.block, self.block]
            return self.head(checkpoint_sequential(blocks, 2, x, use_reentrant=False))
        if self.way == "selective":
            context = functools.partial(create_selective_checkpoint_contexts, _policy)
            x = checkpoint(self.block, x, use_reentrant=False, context_fn=context)
            return self.head(x)
        return self.head(checkpoint(self.block, x, use_reentrant=self.way == "reentrant"))


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps what takes long to compute."""
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.gelu.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _seeded(model: torch.nn.Module, number: int) -> torch.Tensor:
    torch.manual_seed(number)
    return loss_of(model, number)


def dropout_recomputed(run: Run) -> Any:
    found = []
    for way in ("one by one", "sequential", "reentrant", "selective"):
        model = run.sharded(built(functools.partial(Dropping, way)))
        run.train(model, adamw(model.parameters()), steps=2, loss=_seeded)
        found.append(run.weights(model))
    return found


def recomputed_to_the_end(run: Run) -> Any:
    """Without the early stop, a repeated forward uses all its weights once more."""
    model = run.sharded(built(functools.partial(Dropping, "sequential")))
    with set_checkpoint_early_stop(False):
        run.train(model, adamw(model.parameters()), loss=_seeded)
    return run.weights(model)


def a_recomputation_that_fails(run: Run) -> Any:
    model = run.sharded(built())
    optimizer = adamw(model.parameters())

    class Once:
        fails = False

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            x = model.block(x)
            if self.fails:
                raise RuntimeError("a user's layer")
            return x

    for reentrant in (False, True):
        once = Once()
        x = model.emb(batch(0)[0])
        out = model.head(checkpoint(once, x, use_reentrant=reentrant)).sum()
        once.fails = True
        try:
            out.backward()
        except RuntimeError:
            del x, out
        optimizer.zero_grad()
        run.train(model, optimizer, steps=1)
    return run.weights(model)


# --- optimisers


def _stepped(run: Run, kind: str, **options: Any) -> Any:
    model = run.sharded(built())
    run.train(model, getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **options), steps=2)
    return run.weights(model)


def foreach_optimizers(run: Run) -> Any:
    kinds = ("SGD", "Adam", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
    return {kind: _stepped(run, kind, foreach=True) for kind in kinds}


def fused_optimizers(run: Run) -> Any:
    found = {kind: _stepped(run, kind, fused=True) for kind in ("Adam", "Adagrad")}
    found["SGD"] = _stepped(run, "SGD", fused=True, momentum=0.9, weight_decay=0.01)
    found["Adam"] = _stepped(run, "Adam", fused=True, amsgrad=True, weight_decay=0.01)
    return found


def schedules(run: Run) -> Any:
    """Of learning rates and momenta, by step and by value; with groups, and one that is added late."""
    model = run.sharded(built())
    norms = [model.norm.weight, model.norm.bias]
    others = [each for each in model.parameters() if not any(each is norm for norm in norms)]
    optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.1}], lr=1e-2)
    optimizer.add_param_group({"params": norms, "weight_decay": 0.0})
    once = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(4):
        run.train(model, optimizer, steps=1)
        once.step()
        plateau.step(1.0)
    return [group["lr"] for group in optimizer.param_groups], run.weights(model)


def several_optimizers(run: Run) -> Any:
    """One may be stepped less often."""
    model = run.sharded(built())
    first = adamw([model.emb.weight, model.up.weight, model.up.bias])
    second = torch.optim.SGD([model.down.weight, *model.norm.parameters()], lr=1e-2, momentum=0.9)
    for step in range(4):
        run.backward(model)
        first.step()
        if step % 2:
            second.step()
            second.zero_grad()
        first.zero_grad()
    return run.weights(model)


def averaged_by_hand(run: Run) -> Any:
    """A moving average that is evaluated in the model's place, and the weights put back."""
    model = run.sharded(built())
    optimizer = adamw(model.parameters())
    average = {name: each.detach().clone() for name, each in model.named_parameters()}
    seen = []
    for _ in range(3):
        run.train(model, optimizer, steps=1)
        for name, each in model.named_parameters():
            average[name].lerp_(each.detach(), 0.25)
        kept = {name: each.detach().clone() for name, each in model.named_parameters()}
        for source in (average, kept):
            with run.update(model), torch.no_grad():
                for name, each in model.named_parameters():
                    each.copy_(source[name])
            with torch.no_grad():
                seen.append(as_bytes(model(batch(5)[0])))
    return seen, run.weights(model)


def hidden(run: Run) -> Any:
    """A model that is a part of another one, which is not sharded."""

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = built()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids) * 2

    outer = Outer()
    run.sharded(outer.inner)
    run.train(outer, adamw(outer.parameters()))
    return run.weights(outer)
