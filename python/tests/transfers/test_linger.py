"""The last version of a run: a sender that closes waits for who has not taken it yet, and says who has not."""

from __future__ import annotations

import _thread
import contextlib
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tessera
from loopback import Loopback, move
from ranks import LIMIT, run
from tessera.tensor_bus import TensorBusClient

LONG = LIMIT / 2  # of connect() in tests: no close of a test that goes well takes as long
KEPT: list[Any] = []  # handles: a dropped one cancels its send
MODES = pytest.mark.parametrize("mode", ["inplace", "staged"])


@contextlib.contextmanager
def soon() -> Iterator[None]:
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert time.monotonic() - start < LONG / 2


def offer(batch: tessera.Batch) -> None:
    """Sends a version that somebody is still to take once the call returns."""
    KEPT.append(batch.send(blocking=batch.mode == "staged", timeout=LIMIT))


def pair_of(loopback: Loopback, mode: Literal["inplace", "staged"], **options: Any) -> tuple[Any, Any]:
    """A sender and a receiver that are registered."""
    sender = loopback.register({"w": np.ones(4)}, mode=mode, **options)
    receiver = loopback.inference.register({"w": np.zeros(4)}, sender.name)
    receives = threading.Thread(target=receiver.attach, args=("recv",))
    receives.start()
    sender.attach("send")
    receives.join(LIMIT)
    return sender, receiver


def closes_batch(bus: tessera.Bus, batch: tessera.Batch) -> None:
    batch.close()


def closes_bus(bus: tessera.Bus, batch: tessera.Batch) -> None:
    bus.close()


def leaves_batch(bus: tessera.Bus, batch: tessera.Batch) -> None:
    with batch:
        pass


def leaves_bus(bus: tessera.Bus, batch: tessera.Batch) -> None:
    with bus:
        pass


@pytest.mark.parametrize("close", [closes_batch, closes_bus, leaves_batch, leaves_bus])
@MODES
def test_who_comes_while_it_closes_gets_the_last_version(
    mode: Literal["inplace", "staged"], close: Callable[[tessera.Bus, tessera.Batch], None]
) -> None:
    offered = threading.Barrier(4)
    first = threading.Event()

    def trainer(bus: tessera.Bus) -> None:
        tensors = (np.arange(8.0).reshape(4, 2)[2 * bus.rank : 2 * bus.rank + 2], tessera.Layout("2:S0"))
        batch = bus.register({"w": tensors}, mode=mode, direction="send")
        offer(batch)
        offered.wait(LIMIT)
        with soon():
            close(bus, batch)

    def inference(bus: tessera.Bus) -> bool:
        taken = np.zeros((4, 1))
        batch = bus.register({"w": (taken, tessera.Layout("2:S1"))}, direction="recv")
        offered.wait(LIMIT)
        if bus.rank == 1:
            assert first.wait(LIMIT)
        assert batch.recv(timeout=LIMIT) == 1
        first.set()
        return bool((taken[:, 0] == np.arange(8.0).reshape(4, 2)[:, bus.rank]).all())

    assert run({"trainer": [trainer] * 2, "inference": [inference] * 2})["inference"] == [True, True]


@MODES
def test_what_is_not_taken_is_named(loopback: Loopback, mode: Literal["inplace", "staged"]) -> None:
    for in_register in (False, True):
        sender, _ = pair_of(loopback, mode, **({"linger": 0.1} if in_register else {}))
        offer(sender)
        with pytest.warns(RuntimeWarning, match=rf"{sender.name}: version 1 is dropped: not taken by inference within"):
            sender.close(**({} if in_register else {"linger": 0.1}))


@MODES
def test_what_may_be_dropped_is_dropped_at_once(loopback: Loopback, mode: Literal["inplace", "staged"]) -> None:
    closes: list[Callable[[tessera.Batch], None]] = [lambda batch: batch.close(linger=0), tessera.Batch.abandon]
    for close in closes:
        sender, _ = pair_of(loopback, mode)
        offer(sender)
        with soon():
            close(sender)


@MODES
def test_an_exception_waits_for_nobody(mode: Literal["inplace", "staged"]) -> None:
    closed = threading.Event()

    def trainer(bus: tessera.Bus) -> None:
        batch = bus.register({"w": np.ones(4)}, mode=mode, direction="send")
        offer(batch)
        with soon(), pytest.raises(KeyError, match="of its own"), bus, batch:
            raise KeyError("of its own")
        closed.set()

    def inference(bus: tessera.Bus) -> None:
        bus.register({"w": np.zeros(4)}, direction="recv")
        assert closed.wait(LIMIT)

    run({"trainer": [trainer], "inference": [inference]})


@MODES
def test_a_receiver_that_closes_is_not_waited_for(loopback: Loopback, mode: Literal["inplace", "staged"]) -> None:
    sender, receiver = pair_of(loopback, mode)
    offer(sender)
    closes = threading.Timer(0.1, receiver.close)
    closes.start()
    with soon():
        sender.close()


@MODES
def test_ctrl_c_ends_the_wait_and_the_batch_is_closed(loopback: Loopback, mode: Literal["inplace", "staged"]) -> None:
    sender, receiver = pair_of(loopback, mode)
    offer(sender)
    threading.Timer(0.1, _thread.interrupt_main).start()
    with soon(), pytest.raises(KeyboardInterrupt):
        sender.close()
    with pytest.raises(tessera.PeerLostError, match="closed the batch"):
        receiver.recv(timeout=LIMIT)
    sender, receiver = pair_of(loopback, mode)  # nothing else is closed
    with receiver, sender:
        move(sender, receiver)


def test_jobs_that_send_to_each_other_do_not_wait_for_each_other() -> None:
    offered = threading.Barrier(2)

    def job(bus: tessera.Bus) -> None:
        for name in ("trainer", "inference"):  # both in one order, as batches are registered
            batch = bus.register({"w": np.ones(4)}, name, "staged", direction="send" if name == bus.role else "recv")
            if name == bus.role:
                offer(batch)
        offered.wait(LIMIT)
        with soon():
            bus.close()

    run({"trainer": [job], "inference": [job]})


def test_a_client_closes_its_batches_at_one_time() -> None:
    clients = [TensorBusClient(0, namespace="linger") for _ in range(2)]
    jobs = ("trainer", "inference")
    joins = threading.Thread(target=clients[1].init_pair, args=("weights", jobs[1], jobs[0], 1))
    joins.start()
    clients[0].init_pair("weights", *jobs, 1)
    joins.join(LIMIT)
    pairs = []
    for name in ("a", "b", "c"):
        handlers = [
            client.register_tensors(name, [(np.ones(4), "weights")], mode="staged", linger=1) for client in clients
        ]
        asks = threading.Thread(target=handlers[1].batch.attach, args=("recv",))
        asks.start()
        handlers[0].transfer("send")
        asks.join(LIMIT)
        pairs.append(handlers)
    start = time.monotonic()
    with pytest.warns(RuntimeWarning, match="version 1 is dropped: not taken by inference") as caught:
        clients[0].close()
    assert time.monotonic() - start < 2.5 and len(caught) == 3
    clients[1].close()


@pytest.mark.parametrize("linger", [-1, float("inf"), float("nan"), "soon", True])
def test_a_linger_is_a_number_of_seconds(loopback: Loopback, linger: Any) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match="linger"):
        loopback.register({"w": np.ones(4)}, linger=linger)
    sender, receiver = pair_of(loopback, "staged")
    with pytest.raises(tessera.InvalidArgumentError, match="linger"):
        sender.close(linger=linger)
    with receiver, sender:
        move(sender, receiver)


@pytest.mark.parametrize("end", ["pass", "raise KeyError('uncaught')"])
def test_as_the_interpreter_ends_it_waits_only_briefly(end: str, runtime_dir: Path) -> None:
    script = """
        import threading
        import numpy as np
        import tessera
        from tessera._closing import close_at_exit

        def joined(role, peer):
            return tessera.connect("weights", role=role, peer=peer, rank=0, world=1, namespace="exit", timeout=600)

        buses = []
        thread = threading.Thread(target=lambda: buses.append(joined("inference", "trainer")))
        thread.start()
        sends = joined("trainer", "inference")
        thread.join(60)
        close_at_exit(sends)  # again: it is closed first, being the last one
        taken = np.zeros(4)
        thread = threading.Thread(target=lambda: buses[0].register({"w": taken}, direction="recv"))
        thread.start()
        sends.register({"w": np.ones(4)}, mode="staged").send()
        thread.join(60)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script) + end], capture_output=True, text=True, timeout=LIMIT
    )
    assert ("version 1 is dropped: not taken by inference within 5" in done.stderr) == (end == "pass"), done.stderr
