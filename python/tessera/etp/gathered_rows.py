"""All ranks' rows of what goes with a sharded weight row by row."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from .. import _core

if TYPE_CHECKING:
    from .weight import Weight


def gather_rows(core: _core.ShardGroup, weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    """[*lead, F, ...] of every rank's [*lead, rows, ...]. Collective."""
    return _gather(core, 1, weight, rows)[0]


def spread_rows(core: _core.ShardGroup, replicas: int, weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    """The same, added over the replicas whose ranks `core` has. Collective."""
    return _gather(core, replicas, weight, rows).sum(0)


def _gather(core: _core.ShardGroup, replicas: int, weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.contiguous()
    lead, total = weight.lead, weight.matrix[0]
    inner = rows.shape[len(lead) + 1 :]
    begins = [min(r * weight.shard_rows, total) for r in range(core.size // replicas + 1)]
    shapes = [(replicas, *lead, end - begin, *inner) for begin, end in itertools.pairwise(begins)]
    sizes = [math.prod(shape[1:]) for shape in shapes]
    full = torch.empty((replicas, sum(sizes)), dtype=rows.dtype)
    core.gather_bytes(
        f"the rows of {weight.name}",
        rows.data_ptr(),
        [size * full.element_size() for size in sizes] * replicas,
        full.data_ptr(),
    )
    if not lead:
        return full.view(replicas, total, *inner)
    parts = torch.split(full, sizes, dim=1)  # of ranks, which have rows of every expert
    return torch.cat([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)], dim=1 + len(lead))
