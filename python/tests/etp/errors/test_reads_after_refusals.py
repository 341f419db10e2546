"""Refusals that all ranks have found, or been told in one exchange, leave nothing behind: rank 0 reads alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from etp_wrong_calls import WIDTH, Model
from tessera import etp
from torch_ranks import launch

TEXT = "rank 0 reads alone"
Job = tuple[int, torch.nn.Module, torch.optim.Optimizer]


def write_a_parameter(job: Job) -> None:
    rank, model, _ = job
    with torch.no_grad():
        model[0].weight.mul_(rank + 2)


def write_a_gradient(job: Job) -> None:
    rank, model, _ = job
    model[0].weight.grad.add_(torch.full((2 * WIDTH, WIDTH), float(rank)))


def assign_a_gradient(job: Job) -> None:
    rank, model, _ = job
    model[0].weight.grad = torch.full((2 * WIDTH, WIDTH), float(rank))


def write_a_state(job: Job) -> None:
    rank, model, optimizer = job
    optimizer.state[model[2].weight]["exp_avg"].fill_(rank)


def fail_on_one_rank(job: Job) -> None:
    """An operand of another shape: torch refuses it there."""
    rank, model, _ = job
    with torch.no_grad():
        model[0].weight.copy_(torch.zeros(3 if rank == 1 else WIDTH))


def step_by_other_numbers(job: Job) -> None:
    rank, _, optimizer = job
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    try:
        optimizer.step()
    finally:
        optimizer.param_groups[0]["lr"] = 0.1


def load_other_states(job: Job) -> None:
    rank, _, optimizer = job
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = torch.full((2 * WIDTH, WIDTH), float(rank))
    optimizer.load_state_dict(state)


def load_nothing_on_one_rank(job: Job) -> None:
    rank, _, optimizer = job
    optimizer.load_state_dict({} if rank == 1 else optimizer.state_dict())


def summon_and_write_differently(job: Job) -> None:
    rank, model, _ = job
    with etp.summon(model), torch.no_grad():
        model[0].weight.fill_(rank)


def tie_differently(job: Job) -> None:
    rank, model, _ = job
    kept = model[2]
    torch.manual_seed(rank)
    model[2] = torch.nn.Linear(2 * WIDTH, WIDTH)
    try:
        model(torch.zeros(1, WIDTH))
    finally:
        model[2] = kept


KINDS: list[Callable[[Job], None]] = [
    write_a_parameter, write_a_gradient, assign_a_gradient, write_a_state, fail_on_one_rank, step_by_other_numbers,
    load_other_states, load_nothing_on_one_rank, summon_and_write_differently, tie_differently,
]  # fmt: skip


def _run(rank: int, kind: Callable[[Job], None]) -> list[Any]:
    group = etp.init_group(timeout=20)
    model = etp.shard_module_(Model(), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    model(inputs).square().mean().backward()
    optimizer.step()
    before = [etp.whole(each).detach().clone() for each in model.parameters()]
    text = None
    try:
        kind((rank, model, optimizer))
    except Exception as error:
        text = str(error)
    alone = {}
    if rank == 0:
        alone = {name: etp.whole(each).clone() for name, each in model.state_dict().items()}
    group.core.exchange(TEXT, b"")  # others come to nothing that the model's reads could wait for
    model(inputs).square().mean().backward()
    optimizer.step()
    group.close()
    return [text, before, list(alone.values())]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_rank_reads_alone_after_a_refusal(kind: Callable[[Job], None]) -> None:
    results = launch(functools.partial(_run, kind=kind), 2)
    texts = [text for text, *_ in results]
    assert all(texts), texts
    assert texts[0] == texts[1] or texts[0] == f"rank 1: {texts[1]}" or texts[1] in texts[0], texts
    _, before, alone = results[0]
    assert all(map(torch.equal, alone, before))
