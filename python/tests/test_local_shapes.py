"""A local tensor has the shape that its layout and global shape give its rank: the core sees an address alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tessera
from tessera._registration import Registration


def collect(value: Any, rank: int = 0) -> Registration:
    return Registration.collect({"w": value}, keep=lambda name: True, rank=rank, fallback=None, missing_ok=False)


@pytest.mark.parametrize(
    ("local", "layout", "shape", "rank"),
    [
        ((2,), "1:R", (1 << 20,), 0),
        ((2, 4), "2:S0", (6, 4), 0),
        ((4, 2), "2:S0", (4, 4), 0),
        ((3, 2), "2:S1", (4, 4), 0),
        ((4,), "2:S0", (2, 4), 1),
        ((2, 4), "2@0,1:S0", (4, 4), 2),  # outside the mesh
    ],
)
def test_a_local_shape_that_its_layout_does_not_give_is_refused(
    local: tuple[int, ...], layout: str, shape: tuple[int, ...], rank: int
) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=r"tensor w: (its local shape|.* what it holds) is"):
        collect((np.zeros(local, np.float32), layout, shape), rank)


@pytest.mark.parametrize(
    ("local", "layout", "shape", "rank"),
    [
        ((2, 4), "2:S0", (4, 4), 1),
        ((1, 4), "2:S0", (3, 4), 1),
        ((0, 4), "4:S0", (3, 4), 3),
        ((0,), "4:S0", (3, 4), 3),  # how torch holds nothing
        ((0,), "2@0,1:S0", (4, 4), 2),
    ],
)
def test_one_that_it_gives_is_registered(
    local: tuple[int, ...], layout: str, shape: tuple[int, ...], rank: int
) -> None:
    registration = collect((np.zeros(local, np.float32), layout, shape), rank)
    registration.agree([registration.said()])
    (spec,) = registration.specs()
    assert spec.shape == shape
