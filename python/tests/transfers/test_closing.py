"""What waits for other ranks ends once its batch or bus is closed by another thread, at any time-out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback, move
from ranks import LIMIT, connect, run
from tessera._bus.bus import Connecting

HOUR = 3600.0


def ended_by(close: Callable[[], Any], call: Callable[[], Any]) -> BaseException | None:
    """What `call` raises in a thread of its own, when this one closes."""
    errors: list[BaseException] = []
    begun = threading.Event()

    def calls() -> None:
        begun.set()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=calls, daemon=True)
    thread.start()
    assert begun.wait(LIMIT)
    time.sleep(0.05)  # so that it waits by now, as a rule; one that has not begun is to end as well
    close()
    thread.join(LIMIT)
    assert not thread.is_alive(), "it goes on to wait"
    return errors[0] if errors else None


def test_a_batch_ends_what_waits_for_a_version(loopback: Loopback) -> None:
    sender, receiver = loopback.batches({"w": np.zeros(4)}, {"w": np.zeros(4)})
    with sender, receiver:
        move(sender, receiver)
        error = ended_by(receiver.close, lambda: receiver.wait_version(2, HOUR))
        assert isinstance(error, (tessera.CancelledError, tessera.InvalidArgumentError)) and "closed" in str(error)


def test_a_batch_ends_what_waits_for_jobs() -> None:
    with connect("trainer", ["engine0", "engine1"], "nobody") as bus:
        batch = bus.register({"w": np.zeros(4)}, direction="send")
        error = ended_by(batch.close, lambda: batch.wait_peers(2, timeout=HOUR))
        assert isinstance(error, (tessera.CancelledError, tessera.InvalidArgumentError)) and "closed" in str(error)


CALLS = {
    "a version": lambda bus, batch: batch.wait_version(1, HOUR),
    "a receive": lambda bus, batch: batch.recv(timeout=HOUR),
    "a manifest": lambda bus, batch: bus.manifest("never", timeout=HOUR),
    "a registration": lambda bus, batch: bus.register({"w": np.zeros(4)}, "alone", direction="recv", timeout=HOUR),
}


@pytest.mark.parametrize("what", list(CALLS))
def test_a_bus_ends_what_waits(what: str) -> None:
    done = threading.Event()

    def trainer(bus: tessera.Bus) -> None:
        bus.register({"w": np.zeros(4)}, direction="send")
        assert done.wait(LIMIT)

    def inference(bus: tessera.Bus) -> BaseException | None:
        batch = bus.register({"w": np.zeros(4)}, direction="recv")
        error = ended_by(bus.close, lambda: CALLS[what](bus, batch))
        done.set()
        return error

    error = run({"trainer": [trainer], "inference": [inference]})["inference"][0]
    assert isinstance(error, (tessera.CancelledError, tessera.InvalidArgumentError)), error


def test_a_connect_that_waits_for_a_job_can_be_ended() -> None:
    connecting = Connecting()

    def connects() -> None:
        connecting.connect("p", role="a", peer="b", namespace="ended", rank=0, world=1, timeout=HOUR)

    for _ in ("ended while it waits", "ended before it begins"):
        error = ended_by(connecting.close, connects)
        assert isinstance(error, tessera.CancelledError), error


def test_a_connect_that_waits_for_its_store_can_be_ended() -> None:
    connecting = Connecting()
    store = "tcp://127.0.0.1:9"  # where nobody listens
    error = ended_by(
        connecting.close,
        lambda: connecting.connect("p", role="a", peer="b", store=store, rank=0, world=1, timeout=HOUR),
    )
    assert isinstance(error, tessera.CancelledError), error


def test_a_bus_that_was_returned_is_closed() -> None:
    connecting = Connecting()
    bus = connecting.connect("p", role="a", peer=["b"], namespace="returned", rank=0, world=1, timeout=LIMIT)
    assert not bus.closed
    connecting.close()
    assert bus.closed
