"""Parameters that only tensor parallelism has cut, as their states see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .chunks import Cut

if TYPE_CHECKING:
    from .layers._tensor_parallel import TensorParallel


class WholePart:
    """What states need to know of a weight (`p.etp`), of a parameter of which this rank has all of its tp_group's part.

    Attributes:
        name: In the module that it was first seen in.
        shape: Of the part.
        local: Over the parameter's memory.
    """

    has_rows = True
    lead = torch.Size()

    def __init__(self, name: str, parameter: torch.Tensor, cut: Cut) -> None:
        self.name = name
        self.local = parameter.detach()
        self.shape = parameter.shape
        self.matrix = torch.Size((self.shape[0], self.shape[1:].numel()))
        self.rows = (0, self.shape[0])
        self.shard_rows = self.shape[0]
        self.tp_cut: Cut | None = cut
        self.parallel: TensorParallel | None = getattr(parameter, "etp_parallel", None)

    @property
    def address(self) -> int:
        return self.local.data_ptr()

    def values(self) -> torch.Tensor:
        return self.local

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Of the part: there is nothing left to cut."""
        return full

    def part_from(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def __deepcopy__(self, memo: dict[int, Any]) -> WholePart:
        return self


def whole_part(name: str, parameter: torch.Tensor) -> WholePart | None:
    """One as long as its memory is the same; None if tensor parallelism has not cut it."""
    cut: Cut | None = getattr(parameter, "etp_cut", None)
    if cut is None:
        return None
    found: WholePart | None = getattr(parameter, "etp_part", None)
    if found is None or found.local.dtype is not parameter.dtype or found.address != parameter.data_ptr():
        found = parameter.etp_part = WholePart(name, parameter, cut)  # type: ignore[attr-defined]
    return found
