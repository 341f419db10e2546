"""A model that is dropped with its gradients set is freed: descriptors, threads and memory."""

from __future__ import annotations

import gc
import os
import resource

import torch
from etp_wrong_calls import Job, Model
from tessera import etp
from torch_ranks import launch

MODELS = 50


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _drop_models(rank: int) -> tuple[int, int, float]:
    """Return how many descriptors, threads and MiB the last models but five have left behind."""
    group = etp.init_group(timeout=60)
    for number in range(MODELS):
        model = etp.shard_module_(Model(number), group)
        job = Job(rank, group.size, group, model, torch.optim.SGD(model.parameters(), lr=0.01))
        job.loss(number).backward()
        group.core.exchange("this model has been used", b"")
        del model, job
        gc.collect()
        group.core.exchange("it has been dropped", b"")
        if number == 4:
            files, threads, memory = _open_files(), _threads(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    group.close()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    return _open_files() - files, _threads() - threads, grown


def test_models_that_are_dropped_with_gradients_are_freed() -> None:
    for files, threads, mebibytes in launch(_drop_models, 2):
        assert files <= 14  # of two models at most
        assert threads <= 4
        assert mebibytes < 40
