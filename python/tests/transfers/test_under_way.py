"""While a transfer is under way, and before a batch has met the other job: what is held, what autograd is told, and how
long a caller waits."""

from __future__ import annotations

import _thread
import contextlib
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tessera
from loopback import Loopback, move
from ranks import LIMIT, run, until

torch = pytest.importorskip("torch")


W = {"w": torch.zeros(3)}
ONES = torch.ones(3)


def registered(loopback: Loopback, value: Any, into: Any, **options: Any) -> tuple[tessera.Batch, tessera.Batch]:
    """Both sides of a batch that has already transferred a version."""
    sender, receiver = loopback.batches(value, into, **options)
    move(sender, receiver)
    return sender, receiver


# --- memory


@pytest.mark.parametrize("sends", [True, False], ids=["sender", "receiver"])
def test_a_handle_that_is_waited_for_late_lets_go_of_its_own_memory_alone(loopback: Loopback, sends: bool) -> None:
    value, into = {"w": torch.ones(1 << 16)}, {"w": torch.zeros(1 << 16)}
    sender, receiver = registered(loopback, value, into)
    ours, theirs = (sender, receiver) if sends else (receiver, sender)
    tensors = value if sends else into

    def begin(batch: tessera.Batch) -> tessera.Handle:
        return batch.send(blocking=False) if batch is sender else batch.recv(blocking=False)

    first = begin(ours)
    begin(theirs).wait(LIMIT)
    until(lambda: first._beginning.ended())  # polled by nobody who would settle it
    second = begin(ours)
    first.wait()
    held = [memory for each in ours._last._held for memory in each.memory]  # type: ignore[union-attr]
    assert [each.data_ptr() for each in held] == [tensors["w"].data_ptr()]
    begin(theirs).wait(LIMIT)
    second.wait(LIMIT)
    assert not ours._last._held  # type: ignore[union-attr]
    assert torch.equal(into["w"], torch.ones(1 << 16))
    sender.close()
    receiver.close()


def test_memory_of_a_handle_that_nobody_waits_for_is_let_go_by_the_next_transfer(loopback: Loopback) -> None:
    value, into = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    sender, receiver = registered(loopback, value, into)
    handle = receiver.recv(blocking=False)
    last = receiver._last
    assert last is not None and last._held
    sender.send(timeout=LIMIT)
    until(lambda: last.core.done())
    del handle
    handle = receiver.recv(blocking=False)
    assert not last._held
    sender.send(timeout=LIMIT)
    handle.wait(LIMIT)
    sender.close()
    receiver.close()


# --- version counters


@pytest.fixture
def model() -> Any:
    return torch.nn.Linear(3, 3)


@pytest.fixture
def sides(loopback: Loopback, model: Any) -> Iterator[tuple[tessera.Batch, tessera.Batch]]:
    source = torch.nn.Linear(3, 3)
    sender, receiver = registered(loopback, source, model)
    with sender, receiver:
        yield sender, receiver


def loss_of(model: Any) -> Any:
    return model(torch.ones(2, 3, requires_grad=True)).sum()


def ended(handle: tessera.Handle, how: str) -> None:
    if how == "done":
        until(lambda: handle.done())
    elif how == "wait_for":
        assert handle.wait_for(LIMIT)
    else:
        handle.wait(LIMIT)


@pytest.mark.parametrize("how", ["done", "wait_for", "wait"])
def test_a_backward_across_the_end_of_a_receive_raises(
    sides: tuple[tessera.Batch, tessera.Batch], model: Any, how: str
) -> None:
    sender, receiver = sides
    before = loss_of(model)
    handle = receiver.recv(blocking=False)
    meanwhile = loss_of(model)
    sender.send(timeout=LIMIT)
    ended(handle, how)
    for loss in (before, meanwhile):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    loss_of(model).backward()


def test_a_receive_that_wrote_nothing_disturbs_no_backward(
    sides: tuple[tessera.Batch, tessera.Batch], model: Any
) -> None:
    _, receiver = sides
    loss = loss_of(model)
    with pytest.raises(tessera.DeadlineExceededError):
        receiver.recv(timeout=0.05)
    loss.backward()


def test_staging_disturbs_no_backward_and_a_commit_does(loopback: Loopback, model: Any) -> None:
    source = torch.nn.Linear(3, 3)
    sender, receiver = loopback.batches(source, model, mode="staged")
    with sender, receiver:
        sent = threading.Thread(target=sender.send, kwargs={"timeout": LIMIT})
        sent.start()
        across, pending = loss_of(model), loss_of(model)
        receiver.stage(timeout=LIMIT)
        pending.backward()
        receiver.commit()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            across.backward()
        sent.join(LIMIT)


def test_a_tied_tensor_with_a_counter_of_its_own_is_told(loopback: Loopback) -> None:
    """Its name is not received: that of the other one is."""
    model = torch.nn.Module()
    model.embed = torch.nn.Parameter(torch.zeros(3))
    model.head = torch.nn.Parameter(model.embed.data)
    sender, receiver = loopback.batches({"embed": ONES}, model)
    with sender, receiver:
        loss = (model.head * model.head).sum()
        before = model.embed._version, model.head._version
        for _ in range(3):  # the last ones are watched
            move(sender, receiver)
        assert receiver.names == ("embed",)
        assert (model.embed._version, model.head._version) == (before[0] + 3, before[1] + 3)
        assert model.head.tolist() == [1, 1, 1]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.head.data = torch.zeros(3)
        with pytest.raises(tessera.InvalidArgumentError, match="tensor head: it is tied to embed no more"):
            receiver.recv(timeout=LIMIT)


# --- how long a caller waits for the other job


@pytest.fixture
def lonely(loopback: Loopback) -> Iterator[tessera.Batch]:
    """A batch that the other job does not register."""
    with loopback.inference.register(W, "lonely") as batch:
        yield batch


def test_the_first_call_waits_no_longer_than_it_is_told(loopback: Loopback, lonely: tessera.Batch) -> None:
    for wait in (
        lambda: lonely.recv(timeout=0.2),
        lambda: lonely.recv(blocking=False, timeout=0.2).wait(),
        lambda: lonely.wait_version(1, timeout=0.2),
        lambda: loopback.inference.register(W, "soon", direction="recv", timeout=0.2),
    ):
        begin = time.monotonic()
        with pytest.raises(tessera.DeadlineExceededError, match="trainer/0"):
            wait()
        assert time.monotonic() - begin < LIMIT / 4  # of 30 that connect() was told
    for at_once in (
        lambda: lonely.recv(timeout=0),
        lambda: loopback.inference.register(W, "at-once", direction="recv", timeout=0),
    ):
        begin = time.monotonic()
        with pytest.raises(tessera.DeadlineExceededError):
            at_once()
        assert time.monotonic() - begin < LIMIT / 4


@pytest.mark.parametrize("timeout", [None, 2 * LIMIT])
def test_a_wait_for_a_registration_ends_when_another_thread_interrupts(
    lonely: tessera.Batch, timeout: float | None
) -> None:
    handle = lonely.recv(blocking=False, timeout=2 * LIMIT)
    main, waits = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        waits.wait(LIMIT)
        until(lambda: sys._current_frames()[main].f_code is threading.Condition.wait.__code__)
        _thread.interrupt_main()  # no signal comes, which would wake a lock

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    begin = time.monotonic()
    try:
        waits.set()
        with pytest.raises(KeyboardInterrupt):
            handle.wait(timeout)
    finally:
        interrupting.join(LIMIT)
        assert handle.cancel()
    assert time.monotonic() - begin < LIMIT / 2


def test_a_batch_that_another_thread_registers_is_waited_for_as_long(lonely: tessera.Batch) -> None:
    def register() -> None:
        with contextlib.suppress(tessera.DeadlineExceededError):
            lonely.recv(timeout=2)

    first = threading.Thread(target=register)
    first.start()
    until(lambda: lonely._attachment._registering)
    with pytest.raises(tessera.DeadlineExceededError, match="another thread has been registering it for more than 0.1"):
        lonely.recv(timeout=0.1)
    assert lonely.newest == 0
    first.join(LIMIT)


def test_the_newest_version_is_asked_for_without_waiting() -> None:
    asked, registered = threading.Event(), threading.Event()

    def send(bus: tessera.Bus) -> None:
        asked.wait(LIMIT)
        batch = bus.register({"w": ONES}, mode="staged")
        batch.send(7)
        registered.wait(LIMIT)

    def recv(bus: tessera.Bus) -> int:
        batch = bus.register(W, timeout=LIMIT)
        assert batch.newest == 0  # the other job has not come yet
        asked.set()
        until(lambda: batch.newest > 0)
        assert batch.newest == 7
        version = batch.recv()
        registered.set()
        return version

    assert run({"trainer": [send], "inference": [recv]}) == {"trainer": [None], "inference": [7]}


def test_what_asking_has_failed_with_is_raised_once(loopback: Loopback) -> None:
    with loopback.inference.register(W, "unanswered", timeout=0.1) as batch:
        assert batch.newest == 0
        until(lambda: batch._attachment._asked.done())
        with pytest.raises(tessera.DeadlineExceededError, match="trainer/0"):
            assert batch.newest
        assert batch.newest == 0  # it tries again


def test_closing_ends_what_asks(loopback: Loopback) -> None:
    batch = loopback.inference.register(W, "closed-meanwhile", timeout=LIMIT)
    assert batch.newest == 0
    until(lambda: batch._attachment._registering)
    batch.close()
    assert not batch._attachment._registering
    with pytest.raises(tessera.InvalidArgumentError, match="it is closed"):
        batch.recv()


def test_closing_a_batch_leaves_what_waits_for_another_alone(loopback: Loopback) -> None:
    kept, closed = (loopback.inference.register(W, name, timeout=LIMIT) for name in ("kept", "closed-beside"))
    for batch in (kept, closed):
        assert batch.newest == 0
    until(lambda: kept._attachment._registering and closed._attachment._registering)
    closed.close()
    with loopback.trainer.register({"w": ONES}, "kept", timeout=LIMIT) as sender:
        handle = sender.send(blocking=False, timeout=LIMIT)
        assert kept.recv(timeout=LIMIT) == handle.wait()
    kept.close()


# --- progress, and the end of the interpreter


def test_progress_is_drawn(loopback: Loopback, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    value, into = {"w": torch.ones(1 << 18)}, {"w": torch.zeros(1 << 18)}
    sender, receiver = loopback.batches(value, into)
    with sender, receiver:
        sent = threading.Thread(target=sender.send, kwargs={"timeout": LIMIT})
        sent.start()
        receiver.recv(timeout=LIMIT, progress=True)
        sent.join(LIMIT)
    drawn = capsys.readouterr().err
    assert "recv of batch" in drawn and "1.00M/1.00M" in drawn


def test_without_tqdm_nothing_is_begun(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    sender, receiver = registered(loopback, {"w": ONES}, W)
    with sender, receiver:
        for call in (sender.send, receiver.recv):
            with pytest.raises(tessera.InvalidArgumentError, match="pip install tqdm"):
                call(progress=True)
        assert move(sender, receiver) == 2


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "raise KeyError('uncaught')"])
def test_a_client_that_nobody_closes_keeps_no_process_from_ending(end: str, runtime_dir: Path) -> None:
    script = """
        import threading
        import torch
        from tessera.tensor_bus import TensorBusClient

        def handler(local, remote):
            client = TensorBusClient(agent_rank=0, namespace="nobody-closes")
            client.init_pair("weights", local, remote, 1)
            tensor = torch.zeros(2)
            return client, client.register_tensors("policy", [(tensor, "weights")]), tensor

        kept = []  # the tensors, too
        def serve():
            kept.append(handler("inference", "trainer"))
            kept[0][1].transfer("recv")

        thread = threading.Thread(target=serve)
        thread.start()
        mine = handler("trainer", "inference")
        mine[1].transfer("send")
        thread.join(30)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script) + end], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == ("uncaught" in end), done.stderr
    assert ("uncaught" in done.stderr) == ("uncaught" in end)


def test_a_batch_that_goes_while_the_interpreter_ends_starts_no_thread(runtime_dir: Path) -> None:
    """No more threads can be started by then: waiting for one would hang."""
    script = """
        import sys
        from tessera._bus.batch import Batch

        class Core:
            def version(self): return 0
            def close(self): raise AssertionError

        batch = Batch(None, "b", [], mode="inplace", timeout=1, snapshots=2, pinned=False, forget=print)
        batch._attachment.core = Core()
        sys.modules["kept"] = batch
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
