"""The place of this process in its job."""

from __future__ import annotations

import sys

from . import _core
from ._arguments import whole

_LOWEST, _HIGHEST = -(1 << 31), (1 << 31) - 1  # the range of an int


def launch(rank: int | None, world: int | None) -> tuple[int, int]:
    """(rank, world), each from the first source that has it: the argument, TESSERA_*, torchrun, MPI, Slurm, the default
    process group of torch.distributed if there is one. If nothing sets them, the process is a job of its own: (0, 1).

    Raises InvalidArgumentError, which names the source.
    """
    rank = None if rank is None else whole("rank", rank, _LOWEST, _HIGHEST)
    world = None if world is None else whole("world", world, _LOWEST, _HIGHEST)
    return _core.launch(rank, world, _process_group())


def _process_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()
