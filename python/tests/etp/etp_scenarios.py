"""What users do with a model, written once for plain and sharded training; each returns what must be equal bytes."""

from __future__ import annotations

from typing import Any

import torch
from etp_models import HIDDEN, WIDTH, WORDS, Run, Tied, adamw, as_bytes, batch, built, loss_of
from tessera import etp
from torch.utils.checkpoint import checkpoint


def accumulation(run: Run) -> Any:
    model = run.sharded(built())
    run.train(model, adamw(model.parameters()), steps=3, accumulation=3)
    return run.weights(model)


def gradients_after_each_micro_step(run: Run) -> Any:
    model = run.sharded(built())
    found = []
    for _ in range(3):
        run.backward(model)
        found.append(run.gradients(model))
    return found


def zeroed_gradients(run: Run) -> Any:
    model = run.sharded(built())
    run.train(model, adamw(model.parameters()), set_to_none=False)
    return run.weights(model), run.gradients(model)


def optimizer_state(run: Run) -> Any:
    model = run.sharded(built())
    optimizer = adamw(model.parameters())
    run.train(model, optimizer)
    return [
        {key: as_bytes(run.whole(value)) for key, value in optimizer.state[parameter].items()}
        for parameter in model.parameters()
    ]


def fused_adamw(run: Run) -> Any:
    model = run.sharded(built())
    run.train(model, adamw(model.parameters(), fused=True))
    return run.weights(model)


def foreach_adamw(run: Run) -> Any:
    model = run.sharded(built())
    run.train(model, adamw(model.parameters(), foreach=True))
    return run.weights(model)


def all_elementwise_optimizers(run: Run) -> Any:
    found = {}
    for name in ("SGD", "Adam", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"):
        model = run.sharded(built())
        kind = getattr(torch.optim, name)
        run.train(model, kind(model.parameters(), lr=1e-2), steps=2)
        found[name] = run.weights(model)
    return found


def momentum(run: Run) -> Any:
    model = run.sharded(built())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for _ in range(3):
        run.train(model, optimizer, steps=1)
        schedule.step()
    return run.weights(model)


def closures(run: Run) -> Any:
    model = run.sharded(built())
    optimizer = adamw(model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        run.backward(model)
        return 0.0

    for _ in range(3):
        optimizer.step(closure)
    return run.weights(model)


def frozen(run: Run) -> Any:
    model = built()
    model.up.weight.requires_grad_(False)
    model.norm.requires_grad_(False)
    run.sharded(model)
    run.train(model, adamw(p for p in model.parameters() if p.requires_grad))
    return run.weights(model), model.up.weight.grad is None


def frozen_at_run_time(run: Run) -> Any:
    model = run.sharded(built())
    optimizer = adamw(model.parameters())
    run.train(model, optimizer)
    for parameter in (model.up.weight, model.up.bias, model.emb.weight):
        parameter.requires_grad_(False)
    run.train(model, optimizer)
    for parameter in (model.up.weight, model.up.bias, model.emb.weight):
        parameter.requires_grad_(True)
    run.train(model, optimizer)
    return run.weights(model)


class WithAdapter(torch.nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.base = torch.nn.Linear(WIDTH, WORDS)
        self.a = torch.nn.Linear(WIDTH, 4, bias=False)
        self.b = torch.nn.Linear(4, WORDS, bias=False)
        for parameter in (self.emb.weight, *self.base.parameters()):
            parameter.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        return self.base(x) + self.b(self.a(x))


def adapters(run: Run) -> Any:
    model = run.sharded(built(WithAdapter), min_elements=64)
    run.train(model, adamw(p for p in model.parameters() if p.requires_grad))
    return run.weights(model)


def evaluation_between_steps(run: Run) -> Any:
    model = run.sharded(built())
    optimizer = adamw(model.parameters())
    seen = []
    for _ in range(3):
        run.train(model, optimizer, steps=1)
        model.eval()
        with torch.no_grad():
            seen.append(as_bytes(model(batch(5)[0])))
        with torch.inference_mode():
            seen.append(as_bytes(model(batch(6)[0]).clone()))
        model.train()
    return seen, run.weights(model)


class Twice(Tied):
    """One layer is used twice."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.block(self.emb(ids))))


def a_module_called_twice(run: Run) -> Any:
    model = run.sharded(built(Twice))
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


class Recomputed(Tied):
    """Its block, its head, or all of it is checkpointed."""

    def __init__(self, reentrant: bool, whole: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.whole = whole

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        if self.whole:
            return checkpoint(lambda x: self.head(self._nested(x)), x, use_reentrant=self.reentrant)
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return checkpoint(self.head, x, use_reentrant=self.reentrant)

    def _nested(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, checkpoint(self.block, x, use_reentrant=self.reentrant), use_reentrant=False)


def checkpointed(run: Run) -> Any:
    model = run.sharded(built(lambda: Recomputed(False)))
    run.train(model, adamw(model.parameters()), accumulation=2)
    return run.weights(model)


def checkpointed_whole_and_nested(run: Run) -> Any:
    model = run.sharded(built(lambda: Recomputed(False, True)))
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


class Reentrant(Tied):
    """Checkpointed by a backward within the backward. Every weight is used once: torch adds the gradients of such
    backwards one by one, and those of a sharded weight are first added to each other."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, WORDS)
        self.whole = whole

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        if self.whole:
            return checkpoint(lambda x: self.head(checkpoint(self.block, x, use_reentrant=True)), x, use_reentrant=True)
        return checkpoint(self.head, checkpoint(self.block, x, use_reentrant=True), use_reentrant=True)


def checkpointed_reentrant(run: Run) -> Any:
    model = run.sharded(built(lambda: Reentrant(False)))
    run.train(model, adamw(model.parameters()), accumulation=2)
    return run.weights(model)


def checkpointed_whole_reentrant(run: Run) -> Any:
    model = run.sharded(built(lambda: Reentrant(True)))
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


def clipped(run: Run) -> Any:
    """By etp's function, which takes plain parameters, too, and gives the same value for every N."""
    model = run.sharded(built())
    norms = []
    run.train(
        model,
        adamw(model.parameters()),
        before_step=lambda model: norms.append(as_bytes(etp.clip_grad_norm_(model.parameters(), 0.05))),
    )
    return norms, run.weights(model)


def autocast(run: Run) -> Any:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, number)

    model = run.sharded(built(WithAdapter), min_elements=64)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    run.train(model, adamw(model.parameters()), loss=loss)
    return run.weights(model)


class Shapes(torch.nn.Module):
    """Inputs of one dim, of four, without rows, transposed; outputs of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(HIDDEN, WIDTH)
        self.b = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.one = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for layer in (self.a, self.b):
            four = x.reshape(2, 2, -1, HIDDEN)
            outputs = [layer(x), layer(x[0]), layer(four), layer(four.transpose(0, 2)), layer(x[:0])]
            outputs.append(layer(x.t().contiguous().t()))
            total = total + sum((self.one(each).sin().sum() for each in outputs), torch.zeros(()))
        return total


def shapes_and_strides(run: Run) -> Any:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(number), requires_grad=True)
        return model(x)

    model = run.sharded(built(Shapes), min_elements=1)
    run.train(model, adamw(model.parameters()), loss=loss)
    return run.weights(model)


def moving_average(run: Run) -> Any:
    model, average = run.sharded(built()), run.sharded(built())
    optimizer = adamw(model.parameters())
    for _ in range(3):
        run.train(model, optimizer, steps=1)
        with run.update(average), torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.25)
    with torch.no_grad():
        return as_bytes(average(batch(3)[0])), run.weights(average)


def loaded_weights(run: Run) -> Any:
    model = run.sharded(built())
    run.train(model, adamw(model.parameters()))
    found = [str(model.load_state_dict(built(seed=8).state_dict()))]
    with torch.no_grad():
        found.append(as_bytes(model(batch(3)[0])))
    model.up.load_state_dict(built(seed=9).up.state_dict())
    with torch.no_grad():
        found.append(as_bytes(model(batch(3)[0])))
    return found, run.weights(model)


def post_accumulate_hooks(run: Run) -> Any:
    """Once a round, with the added gradient; plain torch calls them for every rank's micro-batch, last for the last."""
    model = built()
    calls: dict[str, list[bytes]] = {"norm": [], "up": [], "bias": []}

    def hook(name: str) -> Any:
        return lambda parameter: calls[name].append(as_bytes(run.whole(parameter.grad)))

    model.norm.weight.register_post_accumulate_grad_hook(hook("norm"))
    run.sharded(model)
    model.up.weight.register_post_accumulate_grad_hook(hook("up"))
    model.up.bias.register_post_accumulate_grad_hook(hook("bias"))
    for _ in range(2):
        run.backward(model)
    every = run.size if run.group is None else 1
    return {name: seen[every - 1 :: every] for name, seen in calls.items()}


def an_exception_in_backward(run: Run) -> Any:
    model = run.sharded(built())
    optimizer = adamw(model.parameters())
    run.train(model, optimizer, steps=1)

    def fails(gradient: torch.Tensor) -> None:
        raise RuntimeError("a user's hook")

    for where in ("forward", "backward"):
        try:
            x = model.block(model.emb(batch(0)[0]))
            if where == "forward":
                raise RuntimeError("a user's layer")
            middle = model.emb(batch(1)[0])
            middle.register_hook(fails)
            model.head(model.block(middle)).sum().backward()
        except RuntimeError:
            del x
        optimizer.zero_grad()
        run.train(model, optimizer, steps=1)
    return run.weights(model)


def a_head_without_backward(run: Run) -> Any:
    """Uses that are announced, but never followed by a backward."""
    model = run.sharded(built(WithAdapter), min_elements=64)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizer = adamw(model.parameters())

    def loss(model: Any, number: int) -> torch.Tensor:
        model.base(model.emb(batch(number)[0])).sum()
        return loss_of(model, number)

    run.train(model, optimizer, loss=loss)
    return run.weights(model)


class Skipping(Tied):
    """Two experts: micro-batches of odd numbers leave the first one out, and the third never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: torch.Tensor, odd: bool = False) -> torch.Tensor:
        x = self.emb(ids)
        if not odd:
            x = x + self.experts[0](x).tanh()
        return self.head(self.block(x + self.experts[1](x)))


def an_expert_that_a_rank_skips(run: Run) -> Any:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        ids, targets = batch(number)
        logits = model(ids, number % 2 == 1)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model = run.sharded(built(Skipping), min_elements=256)
    optimizer = adamw(model.parameters())
    run.backward(model, loss)
    run.backward(model, loss)
    first = run.gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    run.train(model, optimizer, accumulation=2, loss=loss)
    unused = model.experts[2]
    return first, run.weights(model), unused.weight.grad is None and unused.bias.grad is None


def different_orders_on_ranks(run: Run) -> Any:
    """Odd micro-batches use the experts in another order."""

    def loss(model: Any, number: int) -> torch.Tensor:
        ids, targets = batch(number)
        x = model.emb(ids)
        experts = list(model.experts) if number % 2 else list(reversed(model.experts))
        outputs = {id(expert): expert(x) for expert in experts}
        x = sum((outputs[id(expert)] for expert in model.experts), torch.zeros(()))
        return torch.nn.functional.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())

    model = run.sharded(built(Skipping), min_elements=256)
    run.train(model, adamw(model.parameters()), steps=4, accumulation=2, loss=loss)
    return run.weights(model)


def a_gradient_scaler(run: Run) -> Any:
    """It skips the step on all ranks if one has rows that are not finite."""
    model = run.sharded(built())
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(4):
        run.backward(model, lambda model, number: scaler.scale(loss_of(model, number)))
        begin, end = model.emb.weight.etp.rows if run.group is not None else (0, WORDS)
        if step == 1 and begin <= 150 < end:
            etp.local(model.emb.weight.grad)[150 - begin, 3] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, run.weights(model)


def a_rank_without_a_backward(run: Run) -> Any:
    model = run.sharded(built())
    for number in run.numbers():
        if number > 0:
            if run.group is not None:
                etp.wait_async_comms()  # the others' backward ends
        elif run.group is not None:
            loss_of(model, number).backward()
        else:
            (loss_of(model, number) / run.size).backward()
    return run.gradients(model)
