"""Transfers of only what has changed since the last version: delta= of register(), on both sides."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback, move
from ranks import until

numbers = itertools.count()


def batches(
    loopback: Loopback, x: np.ndarray, into: np.ndarray, sends: bool = True, receives: bool = True, **options: Any
) -> tuple[tessera.Batch, tessera.Batch]:
    name = f"delta{next(numbers)}"
    sender = loopback.trainer.register({"w": x}, name, delta=sends, **options)
    return sender, loopback.inference.register({"w": into}, name, delta=receives, **options)


@pytest.mark.parametrize("mode", ["inplace", "staged"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_small_changes_take_few_bytes(loopback: Loopback, mode: Any, dtype: Any) -> None:
    x = np.random.default_rng(5).standard_normal((64, 512)).astype(np.float32)
    into = np.zeros(x.shape, dtype)
    sender, receiver = batches(loopback, x, into, mode=mode)
    with sender, receiver:
        for step in range(4):
            x[step, ::100] += 1.0
            move(sender, receiver)
            np.testing.assert_array_equal(into, x.astype(dtype))
        stats = receiver.stats
        assert stats.delta_routes == 3
        until(lambda: sender.stats.delta_routes == 3)  # staged, send() is done before the receiver is
        assert stats.delta_full_bytes == 3 * x.nbytes
        assert stats.delta_bytes < stats.delta_full_bytes / 100


def test_what_changes_as_a_whole_travels_as_it_is(loopback: Loopback) -> None:
    x = np.ones((64, 64), np.float32)
    into = np.zeros_like(x)
    sender, receiver = batches(loopback, x, into)
    with sender, receiver:
        for _ in range(3):
            x *= 2.0
            move(sender, receiver)
            np.testing.assert_array_equal(into, x)
        assert receiver.stats.delta_routes == 0


@pytest.mark.parametrize(("sends", "receives"), [(True, False), (False, True)])
def test_one_side_alone_gets_none(loopback: Loopback, sends: bool, receives: bool) -> None:
    x = np.ones((64, 64), np.float32)
    into = np.zeros_like(x)
    sender, receiver = batches(loopback, x, into, sends, receives)
    with sender, receiver:
        for _ in range(2):
            move(sender, receiver)
        assert receiver.stats.delta_routes == sender.stats.delta_routes == 0


def test_a_tensor_that_somebody_else_wrote_is_mended(loopback: Loopback) -> None:
    x = np.ones((64, 64), np.float32)
    into = np.zeros_like(x)
    sender, receiver = batches(loopback, x, into)
    with sender, receiver:
        move(sender, receiver)
        into[3, 3] = 17.0
        x[0, 0] = 2.0
        move(sender, receiver)
        np.testing.assert_array_equal(into, x)
        assert receiver.stats.delta_routes == 0
