"""The memory of a weight's gradients: shared, so that other ranks read them, and used again for the next one."""

from __future__ import annotations

import torch

from .shared_states import SharedGradient, SharedStates, shared_like


class GradientMemory:
    """A block for the rows of one weight's gradient, and its place on the board. A gradient that somebody still holds
    keeps its block, and the next one gets another."""

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        self._references = 0  # to the block, where nobody but this object has it
        self._shown: SharedGradient | None = None
        self._states: SharedStates | None = None  # where it is shown

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """Return memory like `rows`, which may be written as soon as all ranks have come to the end of a backward."""
        if self._block is None or _references(self._block) != self._references:
            self._block = shared_like(rows)
            self._references = _references(self._block)
            self._shown = None
        return self._block

    def show(self, rows: torch.Tensor, states: SharedStates, number: int) -> tuple[torch.Tensor, SharedGradient]:
        """Return rows in shared memory, with these values, and what other ranks read them by: `rows` themselves if
        room() has given them. REQUIRES: the states may be written."""
        block = self._block
        if block is None or rows is not block:
            block = self.room(rows)
            block.copy_(rows)
        if self._shown is not None and self._states is states:
            self._shown.become(number)
        else:
            self._shown, self._states = states.show_gradient(number, block), states
        return block, self._shown


def _references(tensor: torch.Tensor) -> int:
    """Count what refers to a tensor's memory: tensors, views and arrays of NumPy."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
