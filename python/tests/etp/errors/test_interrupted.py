"""Signals whose handlers raise while a rank waits for others: the wait ends at once, the others are told, memory of the
interrupted rank is its own, and the next step is right."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_wrong_calls import Job, Model
from tessera import etp
from torch_ranks import launch

DELAY = 0.6  # seconds that the other ranks are late
OWN = 7.0


def backward(job: Job) -> None:
    job.loss(0).backward()


def step(job: Job) -> None:
    job.optimizer.step()


def clip(job: Job) -> None:
    etp.clip_grad_norm_(job.model.parameters(), 1.0)


def update(job: Job) -> None:
    with etp.update(job.model):
        pass


def write(job: Job) -> None:
    with torch.no_grad():
        job.model[0].weight.mul_(3)  # type: ignore[index]


def gather(job: Job) -> None:
    etp.whole(job.model[0].weight.grad * job.model[0].weight.grad.sum())  # type: ignore[index]


def shard(job: Job) -> None:
    etp.shard_module_(Model(5), job.group)


def load(job: Job) -> None:
    job.model.load_state_dict(Model(seed=7).state_dict())


CALLS: list[Callable[[Job], None]] = [backward, step, clip, update, write, shard, load]


def _interrupt(job: Job, call: Callable[[Job], None]) -> tuple[str, float, int]:
    """Return what has come of the call, after how many seconds, and how many of this program's tensors have changed."""
    if job.rank == 0:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        timer = threading.Timer(DELAY / 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        timer.start()
    else:
        time.sleep(DELAY)
    begin = time.monotonic()
    text = "nothing"
    try:
        call(job)
    except (Exception, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    if job.rank > 0 and text == "nothing":  # it has had all that it wanted of the call, and is told in its next one
        try:
            job.optimizer.step()
        except tessera.CancelledError as error:
            text = f"CancelledError: {error}"
    job.optimizer.zero_grad()
    own = [torch.full((size,), OWN) for size in (64, 128, 64 * 64, 64 * 128, 16, 32) * 40]
    time.sleep(2 * DELAY - seconds if seconds < 2 * DELAY else 0)
    return text, seconds, sum(bool((each != OWN).any()) for each in own)


def _train(job: Job) -> list[bytes]:
    for number in range(2):
        job.optimizer.zero_grad()
        job.loss(1 + number).backward()
        job.optimizer.step()
    return [etp.whole(each).detach().numpy().tobytes() for each in job.model.parameters()]


def _run(rank: int, ranks: int, calls: list[str]) -> Any:
    group = etp.init_group(timeout=30)
    model = etp.shard_module_(Model(), group)
    job = Job(rank, ranks, group, model, torch.optim.SGD(model.parameters(), lr=0.01))
    found = []
    for call in CALLS:
        if call.__name__ in calls:
            job.loss(0).backward()
            found.append(_interrupt(job, call))
            job.optimizer.zero_grad()
    return found, _train(job)


@functools.cache
def _never_interrupted(ranks: int) -> Any:
    return launch(functools.partial(_run, ranks=ranks, calls=[]), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("call", [call.__name__ for call in CALLS])
def test_an_interrupted_call_is_void_and_the_next_step_is_right(call: str, ranks: int) -> None:
    results = launch(functools.partial(_run, ranks=ranks, calls=[call]), ranks)
    for rank, ([(text, seconds, changed)], weights) in enumerate(results):
        assert changed == 0
        assert seconds < 10
        if rank == 0:
            assert text.startswith("KeyboardInterrupt")
        else:
            assert text.startswith("CancelledError: rank 0: interrupted"), text
        assert weights == _never_interrupted(ranks)[rank][1]


def _written_by_some(rank: int, ranks: int) -> list[str]:
    group = etp.init_group(timeout=30)
    model = etp.shard_module_(Model(), group)
    job = Job(rank, ranks, group, model, torch.optim.SGD(model.parameters(), lr=0.01))
    weight: Any = model[0].weight  # type: ignore[index]
    if rank > 0:  # as if rank 0 had left a write that the others have got through
        weight.store.move_stamp(1)
    _interrupt(job, backward)
    found = []
    for call in (lambda: job.loss(0), lambda: weight.norm()):
        with pytest.raises(tessera.InvalidArgumentError) as caught:
            call()
        found.append(str(caught.value))
    model.load_state_dict(Model().state_dict())
    job.loss(0).backward()
    job.optimizer.step()
    return found


def test_a_write_that_some_ranks_have_made_is_named_on_all() -> None:
    for texts in launch(functools.partial(_written_by_some, ranks=3), 3):
        for text in texts:
            assert text.startswith("0.weight is damaged: ranks 0 and 1 have not written the same into it when"), text
