"""Random programs that train and change a model, drawn from a seed, run sharded on ranks and plainly in one process.

A program draws a model, an optimiser and ten actions: steps, writes, freezes, hooks, ties, late and replaced layers,
saves by one rank alone, loads, copies, averages. What it sees on its way (losses, weights, gradients, states, saved
values) is noted, by the rank that sees it. One process of plain torch computes the losses of all ranks, whose mean it
minimises; a sharded rank its own. Both draw the same, as draws depend only on the seed and on names.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import tessera
import torch
import torch.nn.functional as F
from etp_models import Run
from tessera import etp
from torch.utils.checkpoint import checkpoint

ACTIONS = 10
BATCH, LENGTH = 3, 5
Note = tuple[str, int | None, Any]  # what, of which rank (None: of all), and its value


class Bare(torch.nn.Module):
    """A parameter that is used without a module of torch, transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.randn(width, width) / width**0.5)
        self.scale = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.matrix.t()) * self.scale + self.matrix.mean()


class Attention(torch.nn.MultiheadAttention):
    def __init__(self, width: int) -> None:
        super().__init__(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Conv(torch.nn.Conv1d):
    def __init__(self, width: int) -> None:
        super().__init__(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def _mlp(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(width, 2 * width + 1), torch.nn.GELU(), torch.nn.Linear(2 * width + 1, width)
    )


LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "linear": lambda width: torch.nn.Linear(width, width),
    "linear without a bias": lambda width: torch.nn.Linear(width, width, bias=False),
    "mlp": _mlp,
    "norm": torch.nn.LayerNorm,
    "attention": Attention,
    "conv": Conv,
    "bare": Bare,
    "dropout": lambda width: torch.nn.Dropout(0.2),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3, foreach=True, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.003, eps=1e-2, centered=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02, eps=1e-2),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, eps=1e-3),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01, eps=(1e-3, 1e-3)),
    "averaged": lambda parameters: torch.optim.ASGD(parameters, lr=0.05),
}


class Net(torch.nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.width, self.words = draw.choice([16, 18, 24]), draw.choice([20, 33])
        self.emb = torch.nn.Embedding(self.words, self.width)
        kinds = draw.choices(list(LAYERS), k=draw.randint(1, 4))
        self.layers = torch.nn.ModuleList([LAYERS[kind](self.width) for kind in kinds])
        self.head = torch.nn.Linear(self.width, self.words, bias=draw.random() < 0.5)
        if draw.random() < 0.4:
            self.head.weight = self.emb.weight
        self.recomputes = draw.random() < 0.3

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            if self.recomputes and torch.is_grad_enabled():
                x = x + checkpoint(layer, x, use_reentrant=False)
            else:
                x = x + layer(x)
        return self.head(x)


@dataclasses.dataclass
class World:
    """A program under way."""

    run: Run
    draw: random.Random
    model: Any
    optimizer: torch.optim.Optimizer
    notes: list[Note] = dataclasses.field(default_factory=list)
    average: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    saved: list[bytes] = dataclasses.field(default_factory=list)
    handles: list[Any] = dataclasses.field(default_factory=list)
    actions: list[str] = dataclasses.field(default_factory=list)
    number: int = 0  # of seeds, and of micro-batches

    # --- what it sees

    def note(self, what: str, value: Any, rank: int | None = None) -> None:
        if isinstance(value, torch.Tensor):
            value = self.run.whole(value).detach().clone()
        self.notes.append((what, rank, value))

    def ranks(self) -> list[int]:
        """Return the ranks whose work is done here."""
        return [self.run.rank] if self.run.group is not None else list(range(self.run.size))

    # --- what it draws

    def names(self) -> list[str]:
        return sorted(name for name, _ in self.model.named_parameters())

    def parameter(self, dims: int = 1) -> tuple[str, torch.nn.Parameter]:
        named = {name: each for name, each in self.model.named_parameters() if each.dim() >= dims}
        name = self.draw.choice(sorted(named))
        return name, named[name]

    def seed(self) -> None:
        self.number += 1
        torch.manual_seed(self.number)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return random numbers of its shape, the same on all ranks."""
        self.number += 1
        return torch.randn(tuple(tensor.shape), generator=torch.Generator().manual_seed(self.number)) / 8

    # --- what it computes

    def batch(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.number + rank)
        both = torch.randint(0, self.model.words, (2, BATCH, LENGTH), generator=generator)
        return both[0], both[1]

    def loss(self, rank: int, extra: str | None = None) -> torch.Tensor:
        ids, targets = self.batch(rank)
        torch.manual_seed(1000 * self.number + rank)
        loss = F.cross_entropy(self.model(ids).flatten(0, 1), targets.flatten())
        if extra is not None:
            loss = loss + 0.01 * (1 + rank) * self.model.get_parameter(extra).square().mean()
        return loss

    def backward(self, extra: str | None = None, scale: float = 1.0) -> None:
        self.number += 1
        losses = {rank: self.loss(rank, extra) for rank in self.ranks()}
        for rank, loss in losses.items():
            self.note("a loss", loss, rank)
        total = sum(losses.values(), torch.zeros(())) * scale
        (total if self.run.group is not None else total / self.run.size).backward()


# --- actions


def step(world: World) -> None:
    extra = world.parameter()[0] if world.draw.random() < 0.3 else None
    accumulation = world.draw.choice([1, 1, 2, 3])
    for _ in range(accumulation):
        world.backward(extra, 1 / accumulation)
    clip = world.draw.random()
    if clip < 0.15:
        world.note("a norm", torch.nn.utils.clip_grad_norm_(world.model.parameters(), 0.5))
    elif clip < 0.3 and world.run.group is not None:
        world.note("a norm", etp.clip_grad_norm_(world.model.parameters(), 0.5).float())
    elif clip < 0.3:
        world.note("a norm", torch.nn.utils.clip_grad_norm_(world.model.parameters(), 0.5))
    world.optimizer.step()
    world.optimizer.zero_grad(set_to_none=world.draw.random() < 0.7)


def backward_without_a_step(world: World) -> None:
    world.backward()
    name, parameter = world.parameter()
    if parameter.grad is not None:
        world.note(f"the gradient of {name}", parameter.grad)
    if world.draw.random() < 0.5:
        world.model.zero_grad()


def change_gradients(world: World) -> None:
    world.backward()
    for _ in range(2):
        name, parameter = world.parameter()
        gradient = parameter.grad
        if gradient is None:
            continue
        kind = world.draw.choice(["nan_to_num", "mul_", "none", "add", "clamp", "sign", "zero_"])
        if kind == "nan_to_num":
            parameter.grad = torch.nan_to_num(gradient)
        elif kind == "mul_":
            gradient.mul_(0.5)
        elif kind == "none":
            parameter.grad = None
        elif kind == "add":
            parameter.grad = gradient + world.like(gradient)
        elif kind == "clamp":
            gradient.clamp_(-0.01, 0.01)
        elif kind == "sign":
            parameter.grad = gradient / (gradient.abs().max() + 1e-3)
        else:
            gradient.zero_()
        if parameter.grad is not None:
            world.note(f"the gradient of {name}, {kind}", parameter.grad)
    world.optimizer.step()
    world.optimizer.zero_grad()


def write(world: World) -> None:
    name, parameter = world.parameter()
    kind = world.draw.choice(["mul_", "clamp_", "row", "copy_", "lerp_", "add_", "data", "init", "norm", "view"])
    with torch.no_grad():
        if kind == "mul_":
            parameter.mul_(0.9)
        elif kind == "clamp_":
            parameter.clamp_(-0.2, 0.2)
        elif kind == "row":
            parameter[world.draw.randrange(len(parameter))] = 0.125
        elif kind == "copy_":
            parameter.copy_(world.like(parameter))
        elif kind == "lerp_":
            parameter.lerp_(world.like(parameter), 0.25)
        elif kind == "add_":
            parameter += 0.01 * parameter.sum()
        elif kind == "data":
            parameter.data = world.like(parameter)
        elif kind == "init":
            world.seed()
            torch.nn.init.normal_(parameter, 0, 0.1)
        elif kind == "norm":
            parameter.div_(1 + parameter.norm())
        else:
            parameter.view(-1)[: parameter.numel() // 2].mul_(0.5)
    world.note(f"{name} behind {kind}", parameter)


def step_by_hand(world: World) -> None:
    world.backward()
    with torch.no_grad():
        for parameter in world.model.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
    world.model.zero_grad()


def freeze(world: World) -> None:
    _, parameter = world.parameter()
    parameter.requires_grad_(not parameter.requires_grad)
    if not any(each.requires_grad for each in world.model.parameters()):
        parameter.requires_grad_(True)


def hook(world: World) -> None:
    """Of tensors, modules, and of gradients that have been added."""
    if world.handles and world.draw.random() < 0.4:
        world.handles.pop().remove()
        return
    _, parameter = world.parameter()
    kind = world.draw.choice(["tensor", "post", "module"])
    if kind == "tensor" and parameter.requires_grad:
        world.handles.append(parameter.register_hook(lambda gradient: gradient * 0.5))
    elif kind == "post" and parameter.requires_grad:

        def halve(parameter: torch.Tensor) -> None:
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]

        world.handles.append(parameter.register_post_accumulate_grad_hook(halve))
    elif kind == "module":
        world.handles.append(world.model.head.register_forward_hook(lambda module, inputs, output: output * 0.5))


def _renew(world: World) -> None:
    world.optimizer = OPTIMIZERS[world.draw.choice(list(OPTIMIZERS))](world.model.parameters())


def new_optimizer(world: World) -> None:
    _renew(world)


def late_layer(world: World) -> None:
    world.seed()
    world.model.layers.append(LAYERS[world.draw.choice(list(LAYERS))](world.model.width))
    if world.draw.random() < 0.5:
        new = list(world.model.layers[-1].parameters())
        if new:
            world.optimizer.add_param_group({"params": new})
    else:
        _renew(world)


def replaced_layer(world: World) -> None:
    world.seed()
    place = world.draw.randrange(len(world.model.layers))
    world.model.layers[place] = LAYERS[world.draw.choice(list(LAYERS))](world.model.width)
    _renew(world)


def tie(world: World) -> None:
    """Or untie."""
    world.seed()
    if world.model.head.weight is world.model.emb.weight:
        world.model.head.weight = torch.nn.Parameter(world.like(world.model.emb.weight))
    else:
        world.model.head.weight = world.model.emb.weight
    _renew(world)


def save(world: World) -> None:
    """By rank 0 alone, into memory, by torch.save()."""
    if 0 not in world.ranks():
        return
    file = io.BytesIO()
    torch.save({"model": world.model.state_dict(), "optimizer": world.optimizer.state_dict()}, file)
    loaded = torch.load(io.BytesIO(file.getvalue()))
    for name, value in loaded["model"].items():
        world.note(f"saved {name}", value, 0)
    for number, state in sorted(loaded["optimizer"]["state"].items()):
        for key, value in sorted(state.items()):
            world.note(f"saved state {key} of {number}", value, 0)


def load(world: World) -> None:
    """What all ranks have read, with a change."""
    state = {name: world.run.whole(value).clone() for name, value in world.model.state_dict().items()}
    name = world.draw.choice(sorted(state))
    state[name].mul_(0.75)
    world.model.load_state_dict(state)
    states = copy.deepcopy(world.optimizer.state_dict())
    for group in states["param_groups"]:
        group["lr"] = float(group["lr"]) * 0.5
    world.optimizer.load_state_dict(states)


def evaluate(world: World) -> None:
    world.number += 1
    world.model.eval()
    with torch.inference_mode() if world.draw.random() < 0.5 else torch.no_grad():
        for rank in world.ranks():
            world.note("an output", world.model(world.batch(rank)[0]), rank)
    world.model.train()


def read(world: World) -> None:
    """On one rank alone."""
    reader = world.draw.randrange(world.run.size)
    name, parameter = world.parameter()
    if reader in world.ranks():
        world.note(f"the largest of {name}", parameter.detach().abs().max(), reader)
        world.note(f"a row of {name}", parameter.detach()[0] + 0, reader)
        for key, value in sorted(world.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                world.note(f"the norm of {key} of {name}", value.float().norm(), reader)


def read_gradients(world: World) -> None:
    """On one rank alone; the others go on."""
    for _ in range(world.draw.choice([1, 2])):
        world.backward()
        name, parameter = world.parameter()
        change = world.draw.choice(["none", "none", "mul_", "assign", "list"])
        gradients = [each.grad for _, each in sorted(world.model.named_parameters()) if each.grad is not None]
        if change == "list":
            torch._foreach_mul_(gradients, 0.5)
        if parameter.grad is None:
            continue
        if change == "mul_":
            parameter.grad.mul_(0.5)
        elif change == "assign":
            parameter.grad = parameter.grad * 0.5
        reader = world.draw.randrange(world.run.size)
        if reader in world.ranks():
            world.note(f"the norm of the gradient of {name}, {change}", parameter.grad.norm(), reader)
            world.note(f"the largest of the gradient of {name}", (parameter.grad + 0).abs().max(), reader)
    if world.draw.random() < 0.5:
        world.optimizer.step()
        world.optimizer.zero_grad(set_to_none=world.draw.random() < 0.5)


def averaged(world: World) -> None:
    with torch.no_grad():
        for name, parameter in world.model.named_parameters():
            known = world.average.get(name)
            if known is None or known.shape != parameter.shape:
                world.average[name] = parameter.detach().clone()
            else:
                known.lerp_(parameter, 0.5)
    name = world.draw.choice(sorted(name for name, _ in world.model.named_parameters()))
    world.note(f"the average of {name}", world.average[name])


def copied(world: World) -> None:
    copied = copy.deepcopy(world.model)
    world.number += 1
    with torch.no_grad():
        next(iter(copied.parameters())).mul_(0.5)
        copied.eval()
        for rank in world.ranks():
            world.note("an output of a copy", copied(world.batch(rank)[0]), rank)


def summoned(world: World) -> None:
    if world.run.group is None:
        with torch.no_grad():
            world.model.emb.weight.mul_(0.5)
        return
    with etp.summon(world.model), torch.no_grad():
        world.model.emb.weight.mul_(0.5)


ACTION_WEIGHTS: dict[Callable[[World], None], int] = {
    step: 8, backward_without_a_step: 2, change_gradients: 2, write: 3, step_by_hand: 1, freeze: 2, hook: 2,
    new_optimizer: 1, late_layer: 1, replaced_layer: 1, tie: 1, save: 2, load: 1, evaluate: 2, read: 2,
    read_gradients: 2, averaged: 1,
    copied: 1, summoned: 1,
}  # fmt: skip


@dataclasses.dataclass
class Outcome:
    """What a program has seen until it ended, and how it ended early."""

    notes: list[Note]
    actions: list[str]
    error: str | None = None
    refused: bool = False


def play(run: Run, seed: int) -> Outcome:
    """Run a program."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(draw)
    outcome = Outcome([], [])
    world = None
    try:
        model = run.sharded(model, min_elements=0)
        world = World(run, draw, model, OPTIMIZERS[draw.choice(list(OPTIMIZERS))](model.parameters()), number=seed)
        world.notes, world.actions = outcome.notes, outcome.actions
        for action in draw.choices(list(ACTION_WEIGHTS), list(ACTION_WEIGHTS.values()), k=ACTIONS):
            world.actions.append(action.__name__)
            action(world)
        for name, parameter in model.named_parameters():
            world.note(f"{name} at the end", parameter)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        outcome.refused = isinstance(error, tessera.Error)
    return outcome


def differences(plain: Outcome, ranks: list[Outcome], most: float = 1e-3) -> Iterator[str]:
    """Yield how ranks have seen something else than one process, or ended in another way."""
    for rank, outcome in enumerate(ranks):
        expected = [(what, value) for what, of, value in plain.notes if of is None or of == rank]
        found = [(what, value) for what, _, value in outcome.notes]
        for (what, right), (there, value) in zip(expected, found, strict=False):
            if what != there:
                yield f"rank {rank} notes {there} in place of {what}"
                break
            if not _same(right, value, most):
                yield f"rank {rank}: {what} is {value!r:.200}, and in one process {right!r:.200}"
                break
        if outcome.error is not None and not outcome.refused and plain.error is None:
            yield f"rank {rank} ended without a refusal, behind {outcome.actions}: {outcome.error}"
        elif outcome.error is None and (plain.error is not None or len(found) != len(expected)):
            yield f"rank {rank} went on, and one process ended with {plain.error}"
    errors = {outcome.error is None for outcome in ranks}
    if len(errors) > 1:
        yield f"ranks ended differently: {[outcome.error for outcome in ranks]}"


def _same(right: Any, value: Any, most: float) -> bool:
    if not isinstance(right, torch.Tensor):
        return bool(right == value)
    if right.shape != value.shape or right.dtype != value.dtype:
        return False
    right, value = right.double(), value.double()
    return bool(((right - value).abs() <= most * (1 + right.abs().max().item() if right.numel() else 1.0)).all())
