"""mode="inline" of constructed layers. Each scenario returns what must be equal bytes, or numbers that are close."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import etp_layers_scenarios
import etp_meta_scenarios
import torch
from etp_layers_scenarios import Experts, Layers, expert_loss
from etp_models import Run, Scenario, built, loss_of, scenarios_of
from tessera import etp

# Sums of a round are added as one: with accumulation, bytes are not those of plain torch. main_grad is not for inline.
LEFT_OUT = (
    "layers",
    "experts",
    "main_gradients",
    "a_hand_written_function",
    "layers_in_a_model_that_is_sharded",
    "layers_without_a_group_in_a_model",
    "layers_with_a_plain_norm",
    "a_plain_head_that_is_tied_to_a_layer",
)
MODELS: list[tuple[Any, Any]] = [
    (lambda run: Layers(run, tied=True), loss_of),
    (lambda run: Experts(run, bias=True), expert_loss),
]


def _inline(scenario: Scenario, run: Run) -> Any:
    return scenario(dataclasses.replace(run, mode="inline"))


ALL = scenarios_of(vars(etp_layers_scenarios)) | scenarios_of(vars(etp_meta_scenarios))
OF_LAYERS = {name: functools.partial(_inline, each) for name, each in ALL.items() if name not in LEFT_OUT}


def gradients_as_values(run: Run) -> Any:
    """torch.autograd.grad(), whose results are logical."""
    run = dataclasses.replace(run, mode="inline")
    found: list[Any] = []
    for kind, loss in MODELS:
        model = built(lambda kind=kind: kind(run))
        weights = [each for each in model.parameters() if each.dim() > 1]
        total: list[torch.Tensor] = [torch.zeros(())] * len(weights)
        for number in run.numbers():
            value = loss(model, number) / (1 if run.group is not None else run.size)
            total = [mine + now for mine, now in zip(total, torch.autograd.grad(value, weights), strict=True)]
        found.append(all(each.grad is None for each in weights))
        found.append([run.whole(each).tolist() for each in total])
    return found


def penalties(run: Run) -> list[list[float]]:
    """On the norm of the mean gradient, which every rank has whole."""
    run = dataclasses.replace(run, mode="inline")
    found = []
    for kind, loss in MODELS:
        model = built(lambda kind=kind: kind(run))
        weights = [each for each in model.parameters() if each.dim() > 1]
        mean = torch.stack([loss(model, number) for number in run.numbers()]).mean()
        gradients = torch.autograd.grad(mean, weights, create_graph=True)
        total = sum((each.pow(2).sum() for each in gradients), torch.zeros(()))
        total.backward()
        found += [run.whole(each.grad).flatten().tolist() for each in weights]
    return found


def _is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, etp.LogicalTensor)
