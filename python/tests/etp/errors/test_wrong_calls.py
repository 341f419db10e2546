"""What one rank refuses ends the call of all ranks with its text, and the group trains on with the right bits."""

from __future__ import annotations

import functools
import random
import re
import time

import pytest
import torch
from etp_wrong_calls import CALLS, Job, Model, Told, drawn
from tessera import etp
from torch_ranks import launch

CALLS_OF_A_RUN = 4 * len(CALLS)


def _train(job: Job, steps: int) -> None:
    for step in range(steps):
        job.optimizer.zero_grad()
        job.loss(1 + step).backward()
        job.optimizer.step()


def _run(rank: int, ranks: int, seed: int) -> tuple[list[Told], list[bytes]]:
    group = etp.init_group(timeout=30)
    model = etp.shard_module_(Model(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job = Job(rank, ranks, group, model, optimizer)
    paces = random.Random(1000 * seed + rank)
    told = []
    for call, wrong_rank in drawn(seed, CALLS_OF_A_RUN, ranks):
        optimizer.zero_grad()
        if paces.random() < 0.5:
            time.sleep(paces.random() * 0.02)
        begin = time.monotonic()
        text = None
        try:
            call(job, wrong_rank is None or wrong_rank == rank)
        except Exception as error:
            text = " ".join(str(error).split())
        told.append(Told(call.__name__, wrong_rank, text, time.monotonic() - begin))
    optimizer = job.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with etp.update(model):
        for (name, parameter), (_, plain) in zip(model.named_parameters(), Model().named_parameters(), strict=True):
            etp.local(parameter).data.copy_(plain.detach() if "bias" in name else parameter.etp.cut(plain.detach()))
    _train(job, 3)
    weights = [etp.whole(each).detach().numpy().tobytes() for each in model.parameters()]
    group.close()
    return told, weights


@functools.cache
def _ran(ranks: int) -> list[tuple[list[Told], list[bytes]]]:
    return launch(functools.partial(_run, ranks=ranks, seed=ranks), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_is_told_of_what_one_refuses(ranks: int) -> None:
    results = [told for told, _ in _ran(ranks)]
    faults = []
    for calls in zip(*results, strict=True):
        wrong = calls[0].wrong_rank
        for rank, told in enumerate(calls):
            refuser = rank if wrong is None else wrong
            own = calls[refuser].text
            if own is None or told.text is None:
                faults.append(f"{told.call}, wrong on {wrong}: rank {rank} got {told.text!r}, rank {refuser} {own!r}")
            elif refuser == rank:
                if re.match(r"rank \d: ", told.text) or "without close" in told.text:
                    faults.append(f"{told.call}, wrong on {wrong}: rank {rank} got {told.text!r} for its own")
            elif told.text == own and ("differ" in own or "give all ranks the same" in own):
                continue  # which all ranks find
            elif not told.text.startswith(f"rank {refuser}: ") or own not in told.text:
                faults.append(f"{told.call}, wrong on {wrong}: rank {rank} got {told.text!r}, not {own!r}")
            if told.seconds > 10:
                faults.append(f"{told.call}, wrong on {wrong}: rank {rank} was told after {told.seconds:.0f} s")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_group_trains_on_with_the_bits_of_one_that_was_never_refused(ranks: int) -> None:
    trained = [weights for _, weights in _ran(ranks)]
    fresh = launch(functools.partial(_never_refused, ranks=ranks), ranks)
    assert trained == fresh


def _never_refused(rank: int, ranks: int) -> list[bytes]:
    group = etp.init_group(timeout=30)
    model = etp.shard_module_(Model(), group)
    job = Job(rank, ranks, group, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    _train(job, 3)
    weights = [etp.whole(each).detach().numpy().tobytes() for each in model.parameters()]
    group.close()
    return weights
