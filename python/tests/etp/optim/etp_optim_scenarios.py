"""Trainings with every optimiser, written once for plain and sharded models; each returns what must be equal bytes.

Ranks have inputs of their own. Losses are scaled by a power of two, and gradients are added over the ranks: then one
process that adds the gradients of all inputs has the same bits, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from etp_models import Run, as_bytes, batch, built, loss_of
from etp_optimizers import SAM, Around, ByHand, Compiled, Decayed, Layerwise, Lookahead, LowBit, Promised, ScheduleFree
from tessera import etp

STEPS = 20
SCALE = 0.25
Make = Callable[[Any], torch.optim.Optimizer]
etp.allow_optimizer(Promised)


class Matrices(torch.nn.Module):
    """Matrices only, for torch's Muon: wide, tall and square ones."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(203, 32)
        self.up = torch.nn.Linear(32, 80, bias=False)
        self.mid = torch.nn.Linear(80, 80, bias=False)
        self.down = torch.nn.Linear(80, 203, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.down(torch.relu(self.mid(torch.relu(self.up(self.emb(ids))))))
        return x


def _sharded(run: Run, model: Any, **options: Any) -> Any:
    """Return the model; with one rank, weights need a format to be sharded."""
    if run.size == 1:
        options["formats"] = {"(emb|up|mid|down)[.]weight": "f32"}
    return run.sharded(model, min_elements=256, reduction="sum", **options)


def _gradients(run: Run, model: Any, step: int) -> float:
    """Add this rank's gradients of a step, and return its loss; in one process, all of them."""
    numbers = range(step * run.size, (step + 1) * run.size)
    total = 0.0
    for number in numbers if run.group is None else numbers[run.rank : run.rank + 1]:
        loss = loss_of(model, number) * SCALE
        loss.backward()
        total += loss.item()
    return total


def _trained(run: Run, make: Make, model: Any = None, closure: bool = False, steps: int = STEPS) -> Any:
    """Train a model, and return weights and the states that the optimiser has left."""
    model = _sharded(run, built() if model is None else model)
    optimizer = make(model.parameters())
    for step in range(steps):
        if closure:

            def evaluate(step: int = step) -> float:
                optimizer.zero_grad()
                return _gradients(run, model, step)

            optimizer.step(evaluate)
        else:
            _gradients(run, model, step)
            optimizer.step()
        optimizer.zero_grad()
    return run.weights(model), _states(run, optimizer)


def _states(run: Run, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            found.append({key: _shown(run, value) for key, value in state.items() if key not in ("func_evals",)})
    return found


def _shown(run: Run, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return as_bytes(run.whole(value))
    return [_shown(run, each) for each in value] if isinstance(value, (list, tuple)) else value


# --- all of torch.optim


def of_torch(name: str, **options: Any) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters, **{"lr": 1e-2, **options})


def sgd(run: Run) -> Any:
    return _trained(run, of_torch("SGD", momentum=0.9, weight_decay=1e-2, nesterov=True))


def adam(run: Run) -> Any:
    return _trained(run, of_torch("Adam", amsgrad=True))


def adamw(run: Run) -> Any:
    return _trained(run, of_torch("AdamW"))


def adamw_foreach(run: Run) -> Any:
    return _trained(run, of_torch("AdamW", foreach=True))


def adamw_fused(run: Run) -> Any:
    return _trained(run, of_torch("AdamW", fused=True))


def adamax(run: Run) -> Any:
    return _trained(run, of_torch("Adamax"))


def nadam(run: Run) -> Any:
    return _trained(run, of_torch("NAdam"))


def radam(run: Run) -> Any:
    return _trained(run, of_torch("RAdam"))


def adagrad(run: Run) -> Any:
    return _trained(run, of_torch("Adagrad"))


def adadelta(run: Run) -> Any:
    return _trained(run, of_torch("Adadelta"))


def rmsprop(run: Run) -> Any:
    return _trained(run, of_torch("RMSprop", centered=True, momentum=0.5))


def rprop(run: Run) -> Any:
    return _trained(run, of_torch("Rprop"))


def asgd(run: Run) -> Any:
    return _trained(run, of_torch("ASGD"))


def adafactor(run: Run) -> Any:
    return _trained(run, of_torch("Adafactor"))


def lbfgs(run: Run) -> Any:
    return _trained(run, of_torch("LBFGS", lr=0.1, max_iter=3, history_size=4), closure=True)


def lbfgs_with_a_line_search(run: Run) -> Any:
    options: Any = {"lr": 1.0, "max_iter": 3, "line_search_fn": "strong_wolfe"}
    return _trained(run, of_torch("LBFGS", **options), closure=True, steps=6)


def torchs_muon(run: Run) -> Any:
    return _trained(run, of_torch("Muon"), built(Matrices))


# --- what users write and import


def lookahead(run: Run) -> Any:
    return _trained(run, lambda parameters: Lookahead(torch.optim.AdamW(parameters, lr=1e-2)))


def lookahead_of_one_by_the_dispatcher(run: Run) -> Any:
    return _trained(run, lambda parameters: Lookahead(torch.optim.Adafactor(parameters, lr=1e-2)))


def sharpness_aware(run: Run) -> Any:
    return _trained(run, lambda ps: SAM(ps, torch.optim.SGD, lr=0.1, momentum=0.9), closure=True)


def subclass(run: Run) -> Any:
    return _trained(run, lambda parameters: Decayed(parameters, lr=1e-2))


def subclass_after_its_base_was_made(run: Run) -> Any:
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    return _trained(run, lambda parameters: Decayed(parameters, lr=1e-2))


def schedule_free(run: Run) -> Any:
    return _trained(run, ScheduleFree)


def layerwise(run: Run) -> Any:
    return _trained(run, Layerwise)


def by_hand(run: Run) -> Any:
    return _trained(run, ByHand)


def promised(run: Run) -> Any:
    return _trained(run, Promised)


def promised_with_a_closure(run: Run) -> Any:
    return _trained(run, Promised, closure=True)


def sharpness_aware_of_one_that_is_promised(run: Run) -> Any:
    return _trained(run, lambda parameters: SAM(parameters, Promised, lr=0.1), closure=True)


def hooks_and_averages(run: Run) -> Any:
    """Clip in a pre-hook, keep a moving average in a post-hook, and put it into the model at the end."""
    model = _sharded(run, built())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    counts = [0]

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    def follow(*_: Any) -> None:
        counts[0] += 1
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.lerp_(parameter, 1 / counts[0])  # as SWA

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(follow)
    for step in range(4):
        _gradients(run, model, step)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for average, parameter in zip(averages, model.parameters(), strict=True):
            parameter.copy_(average)
    return run.weights(model), _states(run, optimizer)


def gradient_surgery(run: Run) -> Any:
    """Two losses, whose gradients are projected where they disagree (PCGrad), for an optimiser by the dispatcher."""
    model = _sharded(run, built())
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    for step in range(3):
        found = []
        for task in range(2):
            _gradients(run, model, 2 * step + task)
            found.append([parameter.grad for parameter in model.parameters()])
            optimizer.zero_grad()
        for parameter, first, second in zip(model.parameters(), *found, strict=True):
            product = (first * second).sum()
            if product < 0:
                first = first - product / (second * second).sum() * second
            parameter.grad = first + second
        optimizer.step()
        optimizer.zero_grad()
    return run.weights(model)


def scaled(run: Run) -> Any:
    """GradScaler, with a step that it leaves out."""
    model = _sharded(run, built())
    optimizer = Layerwise(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        numbers = range(step * run.size, (step + 1) * run.size)
        for number in numbers if run.group is None else numbers[run.rank : run.rank + 1]:
            loss = loss_of(model, number) * SCALE
            if step == 1 and number % run.size == run.size - 1:
                loss = loss * torch.inf  # on one rank
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return run.weights(model), scaler.get_scale()


def a_step_within_a_backward(run: Run) -> Any:
    """One optimiser a parameter, stepped once its gradient is there."""
    model = _sharded(run, built())
    optimizers = {parameter: torch.optim.Adafactor([parameter], lr=1e-2) for parameter in model.parameters()}
    left = dict.fromkeys(optimizers, 0)

    def step(parameter: torch.Tensor) -> None:
        left[parameter] += 1
        if run.group is None and left[parameter] % run.size:
            return  # of all inputs
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        _gradients(run, model, number)
    return run.weights(model)


def within_an_update(run: Run) -> Any:
    model = _sharded(run, built())
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    _gradients(run, model, 0)
    with run.update(model):
        optimizer.step()
        with torch.no_grad():
            model.up.weight.mul_(2)
    return run.weights(model)


def frozen_with_a_gradient(run: Run) -> Any:
    """A weight that is frozen after its backward is stepped once more, and seen by the next forward."""
    found = []
    for make in (of_torch("SGD", lr=0.5), of_torch("Adafactor")):
        model = _sharded(run, built())
        optimizer = make(model.parameters())
        for step in range(3):
            _gradients(run, model, step)
            if step == 1:
                model.up.weight.requires_grad_(False)
                model.emb.weight.requires_grad_(False)
            optimizer.step()
            with torch.no_grad():
                found.append(as_bytes(model(batch(0)[0])))
            optimizer.zero_grad()
        found.append(run.weights(model))
    return found


def resumed(run: Run) -> Any:
    """Save and load states of an optimiser by the dispatcher, and go on."""
    model = _sharded(run, built())
    optimizer = Layerwise(model.parameters())
    _gradients(run, model, 0)
    optimizer.step()
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    again = Layerwise(model.parameters())
    again.load_state_dict(saved)
    _gradients(run, model, 1)
    again.step()
    return run.weights(model), _states(run, again)


def transformers_adafactor(run: Run) -> Any:
    try:
        from transformers.optimization import Adafactor
    except ImportError:
        return None
    return _trained(run, lambda ps: Adafactor(ps, scale_parameter=True, relative_step=True, warmup_init=False))


def resumed_from_whole_tensors(run: Run) -> Any:
    """States as torch.save() gives them, whole, and cut by the next step."""
    model = _sharded(run, built())
    optimizer = Lookahead(ScheduleFree(model.parameters()))
    _gradients(run, model, 0)
    optimizer.step()
    optimizer.zero_grad()
    saved = optimizer.base.state_dict()
    for state in saved["state"].values():
        state.update({key: run.whole(value).clone() for key, value in state.items()})
    optimizer.base.load_state_dict(saved)
    _gradients(run, model, 1)
    optimizer.step()
    z = optimizer.base.state[model.up.weight]["z"]
    assert isinstance(z, etp.LogicalTensor) or run.group is None
    return run.weights(model), _states(run, optimizer.base)


def a_step_that_compiles(run: Run) -> Any:
    return _trained(run, Compiled)


def a_step_that_compiles_with_a_closure(run: Run) -> Any:
    return _trained(run, Compiled, closure=True)


def states_beside_those_of_an_optimizer(run: Run) -> Any:
    model = _sharded(run, built())
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        _gradients(run, model, step)
        optimizer.step()
        optimizer.zero_grad()
        if run.rank == 0:  # alone
            for parameter in model.parameters():
                run.whole(optimizer.state[parameter]["z"])
    return run.weights(model), _states(run, optimizer)  # type: ignore[arg-type]


def states_of_another_class(run: Run) -> Any:
    model = _sharded(run, built())
    optimizer: torch.optim.Optimizer = LowBit(model.parameters())
    for step in range(6):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = LowBit(model.parameters())
            optimizer.load_state_dict(state)
        _gradients(run, model, step)
        optimizer.step()
        optimizer.zero_grad()
    codes = [as_bytes(optimizer.state[parameter]["momentum"].codes) for parameter in model.parameters()]
    return run.weights(model), codes
