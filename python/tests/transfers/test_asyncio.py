"""Transfers awaited on an event loop: nothing blocks the loop, and cancelled or dropped transfers end."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback, move
from ranks import LIMIT, run, until

SIZE = 1 << 12
TICKS = 25  # of a loop that is not blocked


class Heart:
    """Counts the turns of the loop it runs in."""

    def __init__(self) -> None:
        self.beats = 0
        self._waits: list[tuple[int, asyncio.Event]] = []

    async def run(self) -> None:
        while True:
            self.beats += 1
            for beats, event in self._waits:
                if self.beats >= beats:
                    event.set()
            await asyncio.sleep(0.001)

    async def beat(self, times: int = TICKS) -> None:
        event = asyncio.Event()
        self._waits.append((self.beats + times, event))
        await event.wait()


def with_heart(work: Callable[[Heart], Awaitable[Any]]) -> Any:
    async def both() -> Any:
        heart = Heart()
        beating = asyncio.create_task(heart.run())
        try:
            return await work(heart)
        finally:
            beating.cancel()

    return asyncio.run(asyncio.wait_for(both(), LIMIT))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def tensors(value: float) -> dict[str, Any]:
    return {"w": np.full(SIZE, value, np.float32)}


# --- no call blocks


@pytest.mark.parametrize("what", ["recv", "stage"])
def test_the_first_receive_blocks_no_loop_while_the_peer_is_absent(what: str) -> None:
    beaten = threading.Event()
    into = tensors(0)

    def receive(bus: tessera.Bus) -> int:
        batch = bus.register(into, mode="staged")

        async def work(heart: Heart) -> int:
            handle = getattr(batch, what)(blocking=False)
            assert (handle.version, handle.progress.bytes_done) == (0, 0) and not handle.done()
            assert "registering" in repr(handle)
            taken = asyncio.ensure_future(handle)
            await heart.beat()
            assert not taken.done()
            beaten.set()  # from now on there is a peer
            return await taken

        version = with_heart(work)
        return version if what == "recv" else batch.commit()

    def send(bus: tessera.Bus) -> None:
        beaten.wait(LIMIT)
        with bus.register(tensors(7)) as batch:
            batch.send(3, timeout=LIMIT)

    assert run({"inference": [receive], "trainer": [send]})["inference"] == [3]
    assert (into["w"] == 7).all()


@pytest.mark.parametrize("mode", ["inplace", "staged"])
def test_the_first_send_blocks_no_loop_while_the_peer_is_absent(mode: Any) -> None:
    beaten, taken = threading.Event(), threading.Event()
    into = tensors(0)

    def send(bus: tessera.Bus) -> int:
        batch = bus.register(tensors(7), mode=mode)

        async def work(heart: Heart) -> int:
            sent = asyncio.ensure_future(batch.send(version=5, blocking=False))
            await heart.beat()
            assert not sent.done()
            beaten.set()
            return await sent

        version = with_heart(work)
        taken.wait(LIMIT)
        return version

    def receive(bus: tessera.Bus) -> None:
        beaten.wait(LIMIT)
        bus.register(into).recv(timeout=LIMIT)
        taken.set()

    assert run({"trainer": [send], "inference": [receive]})["trainer"] == [5]
    assert (into["w"] == 7).all()


def test_what_registering_has_failed_with_is_raised_by_the_await(loopback: Loopback) -> None:
    async def work(heart: Heart) -> None:
        with pytest.raises(tessera.DeadlineExceededError, match="trainer/0"):
            await absent.recv(blocking=False, timeout=0.05)

    with loopback.inference.register(tensors(0), "await-absent") as absent:
        with_heart(work)
        handle = absent.recv(blocking=False, timeout=0.05)
        for _ in range(2):  # each time
            with pytest.raises(tessera.DeadlineExceededError, match="trainer/0"):
                handle.wait()
        assert handle.done() and handle.wait_for(0) and not handle.cancel() and not handle.withdraw()


def test_a_client_blocks_no_loop_either(loopback: Loopback) -> None:
    from tessera.tensor_bus import TensorBusClient

    beaten = threading.Event()
    into = tensors(0)["w"]

    def client(local: str, remote: str) -> TensorBusClient:
        made = TensorBusClient(agent_rank=0, namespace="client-await")
        made.init_pair("weights", local, remote, 1)
        return made

    def send() -> None:
        with client("trainer", "inference") as trainer:
            beaten.wait(LIMIT)
            trainer.register_tensors("policy", [(tensors(4)["w"], "weights")]).transfer("send", timeout=LIMIT)

    async def work(heart: Heart) -> int:
        handler = inference.register_tensors("policy", [(into, "weights")])
        taken = asyncio.ensure_future(handler.transfer("recv", blocking=False, timeout=LIMIT))
        await heart.beat()
        beaten.set()
        return await taken

    sender = threading.Thread(target=send)
    sender.start()
    with client("inference", "trainer") as inference:
        assert with_heart(work) == 1
    sender.join(LIMIT)
    assert (into == 4).all()


# --- cancelling


def test_an_await_that_is_cancelled_while_it_registers_is_over(loopback: Loopback, pool: ThreadPoolExecutor) -> None:
    into = tensors(0)
    with loopback.inference.register(into, "cancelled-early") as batch:

        async def work(heart: Heart) -> int:
            handle = batch.recv(blocking=False)
            taken = asyncio.ensure_future(handle)
            await heart.beat(2)
            taken.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taken
            with pytest.raises(tessera.CancelledError, match="recv of cancelled-early was cancelled before it began"):
                handle.wait()
            sender = loopback.trainer.register(tensors(2), "cancelled-early")
            sent = pool.submit(sender.send, timeout=LIMIT)
            version = await batch.recv(blocking=False)
            sent.result(LIMIT)
            sender.close()
            return version

        assert with_heart(work) == 1
    assert (into["w"] == 2).all()


@pytest.mark.parametrize("mode", ["inplace", "staged"])
def test_an_await_that_is_cancelled_while_it_waits_for_a_version_is_over(
    mode: Any, loopback: Loopback, pool: ThreadPoolExecutor
) -> None:
    into = tensors(0)
    sender, receiver = loopback.batches(tensors(2), into, mode=mode)
    with sender, receiver:
        move(sender, receiver)

        async def work(heart: Heart) -> int:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(receiver.recv(blocking=False), 0.01)
            sent = pool.submit(sender.send, timeout=LIMIT)
            version = await receiver.recv(blocking=False)
            sent.result(LIMIT)
            return version

        assert with_heart(work) == 2
    assert (into["w"] == 2).all()


def test_a_send_whose_await_is_cancelled_is_taken_back(loopback: Loopback) -> None:
    value, into = tensors(2), tensors(0)
    sender, receiver = loopback.batches(value, into)
    with sender, receiver:
        move(sender, receiver)

        async def work(heart: Heart) -> None:
            sent = asyncio.ensure_future(sender.send(7, blocking=False))
            await heart.beat(2)
            sent.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sent

        with_heart(work)
        value["w"][:] = 3  # nobody reads it any more
        assert move(sender, receiver) == 8
    assert (into["w"] == 3).all()


def test_what_is_too_late_to_cancel_ends_in_order(loopback: Loopback, pool: ThreadPoolExecutor) -> None:
    """A receive that has begun to write: the next one waits for its end, off the loop."""
    into = tensors(0)
    sender, receiver = loopback.batches(tensors(2), into)
    with sender, receiver:
        move(sender, receiver)

        async def work(heart: Heart) -> int:
            handle = receiver.recv(blocking=False)
            handle._beginning.cancel = lambda name: False  # type: ignore[method-assign]
            taken = asyncio.ensure_future(handle)
            await heart.beat(2)
            taken.cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await taken
            assert "has begun: it goes on, and the next transfer of its batch waits" in cancelled.value.__notes__[0]
            following = asyncio.ensure_future(receiver.recv(blocking=False))
            await heart.beat()
            assert not following.done() and not handle.done()
            for _ in range(2):
                await asyncio.wrap_future(pool.submit(sender.send, timeout=LIMIT))
            return await following

        assert with_heart(work) == 3


def test_a_cancel_that_waits_for_an_agent_blocks_no_loop(loopback: Loopback, pool: ThreadPoolExecutor) -> None:
    sender, receiver = loopback.batches(tensors(2), tensors(0))
    with sender, receiver:
        move(sender, receiver)

        async def work(heart: Heart) -> int:
            handle = receiver.recv(blocking=False)
            asked, answers = threading.Event(), threading.Event()
            cancel = handle._beginning.cancel

            def slow(name: str) -> bool:  # as if an agent answered late
                asked.set()
                assert answers.wait(LIMIT)
                return cancel(name)

            handle._beginning.cancel = slow  # type: ignore[method-assign]
            taken = asyncio.ensure_future(handle)
            await heart.beat(2)
            taken.cancel()
            await heart.beat()
            assert asked.is_set() and not taken.done()
            answers.set()
            with pytest.raises(asyncio.CancelledError):
                await taken
            sent = pool.submit(sender.send, timeout=LIMIT)
            version = await receiver.recv(blocking=False)
            sent.result(LIMIT)
            return version

        assert with_heart(work) == 2


# --- dropping


def test_a_dropped_handle_cancels_and_warns(loopback: Loopback) -> None:
    into = tensors(0)
    sender, receiver = loopback.batches(tensors(2), into)
    with sender, receiver:
        move(sender, receiver)
        with pytest.warns(RuntimeWarning, match="the handle of recv of batch.* was dropped before it had ended"):
            receiver.recv(blocking=False)
        assert move(sender, receiver) == 2


def test_one_that_is_dropped_while_it_registers_is_over(loopback: Loopback) -> None:
    with loopback.inference.register(tensors(0), "dropped-early") as receiver:
        with pytest.warns(RuntimeWarning, match="recv of dropped-early was dropped"):
            receiver.recv(blocking=False)
        with loopback.trainer.register(tensors(1), "dropped-early") as sender:
            assert move(sender, receiver) == 1


def test_one_that_has_ended_may_be_dropped(loopback: Loopback, pool: ThreadPoolExecutor) -> None:
    sender, receiver = loopback.batches(tensors(2), tensors(0))
    with sender, receiver:
        move(sender, receiver)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sent = pool.submit(sender.send, timeout=LIMIT)
            kept = [receiver.recv(blocking=False)]
            until(kept[0]._beginning.ended)
            kept.clear()
            gc.collect()
            sent.result(LIMIT)


# --- one at a time


def test_a_second_one_meanwhile_is_refused(loopback: Loopback) -> None:
    with loopback.inference.register(tensors(0), "twice") as batch:
        handle = batch.recv(blocking=False)
        for call in (lambda: batch.recv(blocking=False), lambda: batch.recv(timeout=1), lambda: batch.send(timeout=1)):
            with pytest.raises(tessera.InvalidArgumentError, match=r"a recv of it is still under way"):
                call()
        assert batch.newest == 0
        assert handle.cancel() and handle.done()
        assert not handle.cancel()


def test_a_batch_that_is_closed_ends_its_handle(loopback: Loopback) -> None:
    batch = loopback.inference.register(tensors(0), "closed-under-it")
    handle = batch.recv(blocking=False)
    until(lambda: bool(batch._attachment._registering))
    batch.close()
    with pytest.raises(tessera.Error, match="closed|interrupted"):
        handle.wait(LIMIT)


def test_a_question_about_versions_is_the_receivers(loopback: Loopback) -> None:
    with loopback.trainer.register(tensors(0), "asks-as-sender") as batch:
        handle = batch.send(blocking=False)
        with pytest.raises(tessera.InvalidArgumentError, match="it is being registered as a sender"):
            assert batch.newest
        assert handle.cancel()
