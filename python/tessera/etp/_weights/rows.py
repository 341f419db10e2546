"""All ranks' rows of what goes with a sharded weight row by row."""

from __future__ import annotations

import itertools
from typing import Protocol

import torch

from ... import _core


class Weight(Protocol):
    name: str
    matrix: torch.Size
    shard_rows: int


def gather_rows(core: _core.ShardGroup, weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    """[F, ...] of every rank's [rows, ...]. Collective."""
    return _gather(core, 1, weight, rows)[0]


def spread_rows(core: _core.ShardGroup, replicas: int, weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    """The same, added over the replicas whose ranks `core` has. Collective."""
    return _gather(core, replicas, weight, rows).sum(0)


def _gather(core: _core.ShardGroup, replicas: int, weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.contiguous()
    total = weight.matrix[0]
    full = torch.empty((replicas, total, *rows.shape[1:]), dtype=rows.dtype)
    row_bytes = full.element_size() * (full[0].numel() // max(total, 1))
    begins = [min(r * weight.shard_rows, total) for r in range(core.size // replicas + 1)]
    core.gather_bytes(
        f"the rows of {weight.name}",
        rows.data_ptr(),
        [(end - begin) * row_bytes for begin, end in itertools.pairwise(begins)] * replicas,
        full.data_ptr(),
    )
    return full
