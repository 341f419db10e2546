"""A layout that does not fit the local tensor is refused: what it says is moved, whatever lies there."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
from tessera import InvalidArgumentError
from tessera._registration import Registration


def collect(value: Any, rank: int = 0) -> Registration:
    return Registration.collect({"w": value}, keep=lambda name: True, rank=rank, fallback=None, missing_ok=False)


@pytest.mark.parametrize(
    ("local", "layout", "shape", "rank", "said"),
    [
        ((4,), "1:R", (10,), 0, "(10,)"),
        ((4, 3), "2:S0", (8, 4), 1, "(4, 4)"),
        ((3, 3), "2:S0", (5, 3), 1, "(2, 3)"),  # torch.chunk's halves of 5 are 3 and 2
        ((12,), "2:S0", (8, 3), 0, "(4, 3)"),
        ((2, 3), "3:S0", (2, 3), 2, "(0, 3)"),
        ((2, 3), "2:S0", (4, 3), 2, "(0, 0)"),  # a rank outside the mesh
    ],
)
def test_a_local_tensor_of_another_shape_is_refused(
    local: tuple[int, ...], layout: str, shape: tuple[int, ...], rank: int, said: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(f"shape {local}, but {layout} gives rank {rank} {said}")):
        collect((numpy.zeros(local, numpy.float32), layout, shape), rank)


def test_fitting_ones_are_taken() -> None:
    for local, layout, shape, rank in [((5, 2), "2:S0", (9, 2), 0), ((4, 2), "2:S0", (9, 2), 1), ((), "2:R", (), 1)]:
        assert collect((numpy.zeros(local, numpy.float32), layout, shape), rank).names == ("w",)


def test_nothing_fits_nothing() -> None:
    """Outside its mesh torch has a local tensor of shape (0,) whatever the global one is."""
    assert collect((numpy.zeros((0,), numpy.float32), "2@0-1:S0", (8, 3)), rank=2).names == ("w",)


def test_a_layout_that_does_not_fit_the_shape_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^tensor w: .*S2"):
        collect((numpy.zeros((4, 3), numpy.float32), "2:S2", (8, 3)))
