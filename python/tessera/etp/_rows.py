"""All ranks' rows of what goes with a sharded weight row by row."""

from __future__ import annotations

import itertools
from typing import Protocol

import torch

from .. import _core


class Weight(Protocol):
    name: str
    matrix: torch.Size
    shard_rows: int


def gather_rows(core: _core.ShardGroup, weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    """[F, ...] of every rank's [rows, ...]. Collective."""
    rows = rows.contiguous()
    total = weight.matrix[0]
    full = torch.empty((total, *rows.shape[1:]), dtype=rows.dtype)
    row_bytes = full.element_size() * (full.numel() // max(total, 1))
    begins = [min(r * weight.shard_rows, total) for r in range(core.size + 1)]
    core.gather_bytes(
        f"the rows of {weight.name}",
        rows.data_ptr(),
        [(end - begin) * row_bytes for begin, end in itertools.pairwise(begins)],
        full.data_ptr(),
    )
    return full
