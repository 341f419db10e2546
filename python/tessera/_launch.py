"""Who this process is in its job."""

from __future__ import annotations

import sys

from . import _core
from ._arguments import whole
from ._errors import InvalidArgumentError

_LOWEST, _HIGHEST = -(1 << 31), (1 << 31) - 1  # of an int


def launch(rank: int | None, world: int | None) -> tuple[int, int]:
    """(rank, world), each from the first that says it: the argument, TESSERA_*, torchrun, MPI, Slurm, the default
    process group of torch.distributed if there is one. If nothing sets them, the process is a job of its own: (0, 1).

    Raises InvalidArgumentError that names the argument or the variable.
    """
    rank = None if rank is None else whole("rank", rank, _LOWEST, _HIGHEST)
    world = None if world is None else whole("world", world, _LOWEST, _HIGHEST)
    said_rank, said_world = _core.launched(rank_given=rank is not None, world_given=world is not None)
    group = _process_group()
    rank, rank_source = _first(rank, said_rank, group and group[0], 0)
    world, world_source = _first(world, said_world, group and group[1], 1)
    if world < 1 or not 0 <= rank < world:
        sources = f"rank from {rank_source}, world from {world_source}"
        raise InvalidArgumentError(f"rank {rank} of world {world} ({sources}): ranks go from 0 to world - 1")
    return rank, world


def _process_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _first(given: int | None, said: tuple[int, str] | None, group: int | None, alone: int) -> tuple[int, str]:
    """The first of them that there is, and who says it."""
    if given is not None:
        return given, "the arguments"
    if said is not None:
        return said
    return (group, "torch's default process group") if group is not None else (alone, "nobody")
