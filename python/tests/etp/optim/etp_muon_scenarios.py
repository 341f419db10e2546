"""Trainings with etp.Muon, and in one process with torch.optim.Muon, whose bits they must have."""

from __future__ import annotations

from typing import Any

import torch
from etp_models import Run, as_bytes, built
from etp_optim_scenarios import STEPS, Matrices, _gradients, _sharded, _states, _trained
from tessera import etp


def _muon(run: Run, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    kind: Any = torch.optim.Muon if run.group is None else etp.Muon
    made: torch.optim.Optimizer = kind(parameters, **{"lr": 0.02, **options})
    return made


def muon(run: Run) -> Any:
    return _trained(run, lambda parameters: _muon(run, parameters), built(Matrices))


def without_nesterov(run: Run) -> Any:
    return _trained(run, lambda ps: _muon(run, ps, nesterov=False, momentum=0.8, ns_steps=3), built(Matrices))


def with_adamws_rates(run: Run) -> Any:
    options = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.01}
    return _trained(run, lambda parameters: _muon(run, parameters, **options), built(Matrices))


def with_a_closure(run: Run) -> Any:
    return _trained(run, lambda parameters: _muon(run, parameters), built(Matrices), closure=True, steps=3)


def groups_and_missing_gradients(run: Run) -> Any:
    """Options by group, and a weight that has a gradient in every other step."""
    model = _sharded(run, built(Matrices))
    parameters = [{"params": [model.emb.weight, model.up.weight], "lr": 0.1}, {"params": [model.mid.weight]}]
    optimizer = _muon(run, parameters)
    for step in range(4):
        _gradients(run, model, step)
        if step % 2:
            model.up.weight.grad = None
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return run.weights(model), _states(run, optimizer)


class Small(torch.nn.Module):
    """A matrix that every rank has whole beside one that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(203, 32)
        self.up = torch.nn.Linear(32, 5, bias=False)
        self.down = torch.nn.Linear(5, 203, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.down(torch.relu(self.up(self.emb(ids))))
        return x


def matrices_that_every_rank_has(run: Run) -> Any:
    return _trained(run, lambda parameters: _muon(run, parameters), built(Small), steps=4)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(203, 32)
        self.mid = torch.nn.Linear(32, 32, bias=False)
        self.up = torch.nn.Parameter(torch.randn(5, 24, 32) / 6)
        self.down = torch.nn.Parameter(torch.randn(5, 203, 24) / 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.mid(self.emb(ids))
        hidden = torch.relu(torch.einsum("bsk,efk->ebsf", x, self.up))
        return torch.einsum("ebsf,evf->bsv", hidden, self.down)


def stacks(run: Run) -> Any:
    """Stacks of experts: in one process, each matrix is a parameter of torch.optim.Muon."""
    model = built(Experts)
    if run.group is not None:
        options: Any = {"formats": {"up|down": "f32"}} if run.size == 1 else {}
        model = run.sharded(model, min_elements=256, reduction="sum", **options)
        optimizer = _muon(run, [model.up, model.down])
    for step in range(STEPS):
        _gradients(run, model, step)
        if run.group is None:
            parameters = [model.up, model.down]
            matrices = [[torch.nn.Parameter(each.detach()) for each in stack] for stack in parameters]
            for stack, own in zip(parameters, matrices, strict=True):
                for number, matrix in enumerate(own):
                    matrix.grad = stack.grad[number]
            if step == 0:
                state: Any = [[torch.zeros_like(each) for each in own] for own in matrices]
            optimizer = _muon(run, [matrix for own in matrices for matrix in own])
            for own, averages in zip(matrices, state, strict=True):
                for matrix, average in zip(own, averages, strict=True):
                    optimizer.state[matrix]["momentum_buffer"] = average
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return [as_bytes(run.whole(each)) for each in (model.up, model.down)]
