"""What is checked of what arrives: `connect(digest=...)`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import move
from ranks import LIMIT, connect


@pytest.mark.parametrize(
    ("trainer", "inference", "full"),
    [
        (True, "full", True),
        ("sampled", True, False),
        ("full", "sampled", False),
    ],
)
def test_the_weaker_choice_holds(trainer: Any, inference: Any, full: bool) -> None:
    with ThreadPoolExecutor(2) as threads:
        joined = [
            threads.submit(connect, role, peer, "digests", digest=digest)
            for role, peer, digest in (("trainer", "inference", trainer), ("inference", "trainer", inference))
        ]
        sending, receiving = (each.result(LIMIT) for each in joined)
    weights = np.arange(50_000, dtype=np.float32)
    into = np.zeros_like(weights)
    whole = tessera._core.local_digest(weights.__array_interface__["data"][0], "f32", weights.shape, (1,))
    with sending, receiving:
        sender = registered(sending, weights)
        receiver = registered(receiving, into)
        with sender, receiver:
            move(sender, receiver)
            assert (into == weights).all()
            assert (receiver.digests() == {"w": whole}) == full
            assert sender.digests() == receiver.digests()


def test_a_tensor_that_travels_quantised_is_checked_in_full() -> None:
    full, sampled = digests_of(True), digests_of("sampled")
    assert full["q"] == sampled["q"]
    assert full["w"] != sampled["w"]


def digests_of(digest: Any) -> dict[str, str]:
    """What both sides say of an array and of one that travels quantised."""
    with ThreadPoolExecutor(2) as threads:
        joined = [
            threads.submit(connect, role, peer, "digests", digest=digest)
            for role, peer in (("trainer", "inference"), ("inference", "trainer"))
        ]
        sending, receiving = (each.result(LIMIT) for each in joined)
    weights = {name: np.arange(262_144, dtype=np.float32).reshape(512, 512) for name in ("w", "q")}
    into = {name: np.zeros_like(array) for name, array in weights.items()}
    with sending, receiving:
        sender = sending.register(weights, wire={"q": "mxfp8"})
        receiver = receiving.register(into, wire={"q": "mxfp8"})
        with sender, receiver:
            move(sender, receiver)
            assert (into["w"] == weights["w"]).all()
            assert sender.digests() == receiver.digests()
            return receiver.digests()


def registered(bus: tessera.Bus, array: np.ndarray) -> tessera.Batch:
    return bus.register({"w": array})


@pytest.mark.parametrize("digest", ["half", ""])
def test_another_one_is_refused(digest: Any) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match="'full' and 'sampled' and 'off' are possible"):
        connect("trainer", "inference", "digests", digest=digest)
