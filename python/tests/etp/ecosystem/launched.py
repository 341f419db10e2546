"""Ranks as torchrun starts them, and one process, for packages that look into the environment."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from jobs import Jobs, Rank
from torch_ranks import join_group

TIMEOUT = 300  # seconds


def launch(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Return what function(rank, *arguments) returns on each rank of a gloo group that has the variables of torchrun;
    with a world of 1, in one process without a group. The function is at the top of a module."""
    with (
        tempfile.TemporaryDirectory(prefix="tessera-") as folder,
        Jobs(pathlib.Path(folder), TIMEOUT, forked=True) as jobs,
    ):
        jobs.start("torchrun", _call, function, arguments, world=world)
        return jobs.results()["torchrun"]


def _call(rank: Rank, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    if rank.world == 1:
        return function(0, *arguments)
    os.environ |= {
        **{name: str(rank.rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(rank.world) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # not used: the group is there
    }
    join_group(rank)
    try:
        return function(rank.rank, *arguments)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
