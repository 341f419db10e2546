"""Signals whose handlers raise while a rank waits for others: the wait ends at once, the others are told, memory of the
interrupted rank is its own, and the next step is right."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tessera
import torch
from etp_wrong_calls import Job, Model
from tessera import etp
from tessera.etp.interrupts import put_off
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


def adopt(job: Job) -> None:
    """Have the next forward shard a layer that has come; what is trained does not use it."""
    torch.manual_seed(9)
    job.model[0].late = torch.nn.Linear(64, 64)  # type: ignore[index]
    job.loss(0)


def unshard(job: Job) -> None:
    etp.unshard_(job.model)


def within_summon(job: Job) -> None:
    with etp.summon(job.model):
        pass


CALLS: list[Callable[[Job], None]] = [
    backward,
    step,
    clip,
    update,
    write,
    shard,
    load,
    adopt,
    unshard,
    within_summon,
]


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
    named = job.model.named_parameters()
    return [etp.whole(each).detach().numpy().tobytes() for name, each in named if "late" not in name]


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


@pytest.fixture
def handled() -> Iterator[list[str]]:
    """What has happened, in its order; SIGUSR1 adds to it."""
    events: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: events.append("handled"))
    yield events
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_waits_until_ranks_have_changed_something(handled: list[str]) -> None:
    with put_off():
        signal.raise_signal(signal.SIGUSR1)
        handled.append("changed")
    assert handled == ["changed", "handled"]


def test_a_handler_that_raises_does_not_hide_another_signal(handled: list[str]) -> None:
    def change() -> None:
        with put_off():
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            change()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert handled == ["handled"]


def test_a_signal_that_comes_again_is_handled_at_once(handled: list[str]) -> None:
    with put_off():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        handled.append("changed")
    assert handled == ["handled", "changed"]


def test_a_signal_does_not_wait_for_a_rank_that_is_stopped(handled: list[str]) -> None:
    deadline = time.monotonic() + 60
    with put_off():
        signal.raise_signal(signal.SIGUSR1)
        while not handled and time.monotonic() < deadline:
            time.sleep(0.05)
        handled.append("changed")
    assert handled == ["handled", "changed"]
    assert not any(thread.name == "tessera-signal" for thread in threading.enumerate())
