"""Calls of all ranks with arguments that are wrong on one rank, or on all; and what each rank is to be told."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tessera import etp

WIDTH = 64


class Model(torch.nn.Sequential):
    """Two layers whose weights are sharded, with biases that are whole."""

    def __init__(self, seed: int = 3) -> None:
        torch.manual_seed(seed)
        super().__init__(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH))


@dataclass
class Job:
    """A rank, its group, and a model that trains on."""

    rank: int
    ranks: int
    group: etp.Group
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def inputs(self, step: int, rank: int | None = None) -> torch.Tensor:
        number = 100 * step + (self.rank if rank is None else rank)
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))

    def loss(self, step: int) -> torch.Tensor:
        return self.model(self.inputs(step)).square().mean()


class Refused(Exception):
    """A user's own error."""


def _raises(*_: Any) -> Any:
    raise Refused("a mistake of the user")


class Node(torch.autograd.Function):
    """Fails in its backward on request."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.fails:
            raise Refused("a mistake of the user")
        return gradient, None


def shard_with_a_bad_filter(job: Job, wrong: bool) -> None:
    etp.shard_module_(Model(4), job.group, filter=_raises if wrong else None)


def shard_with_a_bad_format(job: Job, wrong: bool) -> None:
    etp.shard_module_(Model(4), job.group, formats={".*weight": "nonsense" if wrong else "bf16"})


def shard_with_bad_elements(job: Job, wrong: bool) -> None:
    etp.shard_module_(Model(4), job.group, min_elements=-1 if wrong else 0)


def shard_nothing(job: Job, wrong: bool) -> None:
    etp.shard_module_(Model(4), job.group, min_elements=1 << 40 if wrong else 0)


def shard_what_is_no_model(job: Job, wrong: bool) -> None:
    etp.shard_module_("a model" if wrong else Model(4), job.group)  # type: ignore[arg-type]


def wrap_an_unknown_name(job: Job, wrong: bool) -> None:
    etp.wrap_module_params_etp(Model(4), ["none" if wrong else "0.weight"], job.group)


def unpadded_rows(job: Job, wrong: bool) -> None:
    module = torch.nn.Module()
    module.matrix = torch.nn.Parameter(torch.zeros(13, 4))
    etp.update_config(pad_for_alignment=0 if wrong else 16)
    try:
        etp.wrap_module_params_etp(module, ["matrix"], job.group)
    finally:
        etp.update_config(pad_for_alignment=16)


def clip_by_text(job: Job, wrong: bool) -> None:
    job.loss(0).backward()
    etp.clip_grad_norm_(job.model.parameters(), "much" if wrong else 1.0)  # type: ignore[arg-type]


def clip_what_is_none(job: Job, wrong: bool) -> None:
    job.loss(0).backward()
    etp.clip_grad_norm_(5 if wrong else job.model.parameters(), 1.0)  # type: ignore[arg-type]


def fail_in_an_update(job: Job, wrong: bool) -> None:
    with etp.update(job.model):
        if wrong:
            _raises()
    job.loss(0).backward()


def update_within_an_update(job: Job, wrong: bool) -> None:
    with etp.update(job.model):
        if wrong:
            with etp.update(job.model):
                pass
    job.loss(0).backward()


def update_for_no_time(job: Job, wrong: bool) -> None:
    with etp.update(job.model, timeout=-1 if wrong else None):
        pass


def fail_while_summoned(job: Job, wrong: bool) -> None:
    with etp.summon(job.model):
        if wrong:
            _raises()
    job.loss(0).backward()


def differentiate_twice(job: Job, wrong: bool) -> None:
    job.loss(0).backward(create_graph=wrong)


def fail_in_the_loss(job: Job, wrong: bool) -> None:
    out = Node.apply(job.model(job.inputs(0)), wrong)  # type: ignore[no-untyped-call]
    out.square().mean().backward()


def fail_in_the_middle(job: Job, wrong: bool) -> None:
    first, middle, last = job.model
    hidden = Node.apply(middle(first(job.inputs(0))), wrong)  # type: ignore[no-untyped-call]
    last(hidden).square().mean().backward()


def fail_in_a_tensor_hook(job: Job, wrong: bool) -> None:
    out = job.model(job.inputs(0))
    if wrong:
        out.register_hook(_raises)
    out.square().mean().backward()


def fail_in_a_step(job: Job, wrong: bool) -> None:
    job.loss(0).backward()
    handle = job.optimizer.register_step_pre_hook(_raises) if wrong else None
    try:
        job.optimizer.step()
    finally:
        if handle is not None:
            handle.remove()


def step_at_another_rate(job: Job, wrong: bool) -> None:
    job.loss(0).backward()
    job.optimizer.param_groups[0]["lr"] = "fast" if wrong else 0.01
    try:
        job.optimizer.step()
    finally:
        job.optimizer.param_groups[0]["lr"] = 0.01


def load_other_names(job: Job, wrong: bool) -> None:
    with etp.summon(job.model):
        state = {name: value.clone() for name, value in job.model.state_dict().items()}
    if wrong:
        state["unknown"] = torch.zeros(2)
    job.model.load_state_dict(state)
    job.loss(0).backward()


def assign_a_gradient_of_another_shape(job: Job, wrong: bool) -> None:
    weight = job.model[0].weight  # type: ignore[index]
    weight.grad = torch.ones(3, 3) if wrong else torch.ones(weight.shape)


CALLS: list[Callable[[Job, bool], None]] = [
    shard_with_a_bad_filter,
    shard_with_a_bad_format,
    shard_with_bad_elements,
    shard_nothing,
    shard_what_is_no_model,
    wrap_an_unknown_name,
    unpadded_rows,
    clip_by_text,
    clip_what_is_none,
    fail_in_an_update,
    update_within_an_update,
    update_for_no_time,
    fail_while_summoned,
    differentiate_twice,
    fail_in_the_loss,
    fail_in_the_middle,
    fail_in_a_tensor_hook,
    step_at_another_rate,
    load_other_names,
    assign_a_gradient_of_another_shape,
]


@dataclass
class Told:
    """The outcome of one call on one rank."""

    call: str
    wrong_rank: int | None  # None: all
    text: str | None
    seconds: float


def drawn(seed: int, count: int, ranks: int) -> list[tuple[Callable[[Job, bool], None], int | None]]:
    """Return calls, and on which rank each is wrong; None: on all."""
    source = random.Random(seed)
    return [(CALLS[i % len(CALLS)], source.choice([None, *range(ranks)])) for i in range(count)]
