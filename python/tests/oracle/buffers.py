"""Non-contiguous memory for local tensors, which shows writes outside of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from .reference import CARRIERS, as_carrier

_PATTERN = 0x5A


class Buffer:
    """A tensor of that shape: contiguous, or with permuted dims, steps and gaps."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, rng: random.Random | None) -> None:
        order = list(range(len(shape)))
        steps = [1] * len(shape)
        gaps = [0] * len(shape)
        if rng is not None:
            packed = dtype == torch.float4_e2m1fn_x2  # whose last dim must be dense
            free = order[:-1] if packed else order
            rng.shuffle(free)
            order = [*free, *order[len(free) :]]
            steps = [1 if packed and dim == len(shape) - 1 else rng.choice((1, 1, 2, 3)) for dim in order]
            gaps = [rng.randint(0, 2) for _ in order]
        sizes = [shape[dim] * step + gap for dim, step, gap in zip(order, steps, gaps, strict=True)]
        self._storage = _pattern(sizes, dtype)
        self._order, self._steps, self._gaps, self._shape = order, steps, gaps, tuple(shape)
        self.tensor = self._view(self._storage).view(dtype)

    def _view(self, storage: torch.Tensor) -> torch.Tensor:
        pieces = tuple(
            slice(gap, gap + self._shape[dim] * step, step)
            for dim, step, gap in zip(self._order, self._steps, self._gaps, strict=True)
        )
        return storage[pieces].permute([self._order.index(dim) for dim in range(len(self._shape))])

    def fill(self, values: torch.Tensor) -> None:
        as_carrier(self.tensor).copy_(as_carrier(values))

    def intact(self) -> bool:
        """Whether nothing was written outside the tensor."""
        rest = self._storage.clone()
        blank = _pattern([1], self.tensor.dtype)
        self._view(rest).copy_(blank.expand(self._shape) if self._shape else blank[0])
        return bool((rest == blank.reshape([1] * rest.ndim)).all())


def _pattern(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    raw = torch.full((*sizes, dtype.itemsize), _PATTERN, dtype=torch.uint8)
    return raw.reshape(-1).view(CARRIERS[dtype.itemsize]).reshape(tuple(sizes))
