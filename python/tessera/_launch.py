"""Who this process is in its job."""

from __future__ import annotations

import sys

from . import _core
from ._errors import InvalidArgumentError


def launch(rank: int | None, world: int | None) -> tuple[int, int]:
    """(rank, world), each from the first that says it: the argument, TESSERA_*, torchrun, MPI, Slurm, the default
    process group of torch.distributed if there is one. A process of which nobody says it is a job of its own: (0, 1).

    Raises InvalidArgumentError that names the argument or the variable.
    """
    said_rank = None if rank is not None else _core.launched_rank()
    said_world = None if world is not None else _core.launched_world()
    group = _process_group() if said_rank is None and said_world is None else None
    if rank is None:
        rank = said_rank[0] if said_rank else group[0] if group else 0
    if world is None:
        world = said_world[0] if said_world else group[1] if group else 1
    if world < 1 or not 0 <= rank < world:
        sources = f"rank from {_source(said_rank)}, world from {_source(said_world)}"
        raise InvalidArgumentError(f"rank {rank} of world {world} ({sources}): ranks go from 0 to world - 1")
    return rank, world


def _process_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _source(said: tuple[int, str] | None) -> str:
    return said[1] if said else "the arguments or the default"
