"""Sends of a Trainer that are refused, interrupted or late, of several threads and ranks: the worker's real code in
processes, a real trainer over HTTP and the bus."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import tessera
import torch
from fault_ranks import Place, contents, made
from fault_servers import LIMIT, Server
from jobs import Jobs, Process, Rank
from tessera.engines import EngineUpdate
from test_vllm_client import Played


def drive(rank: Rank, engines: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Makes a Trainer, and calls what it hears, until that is None: `send` of (number of contents, version)."""
    from tessera.engines.vllm import Trainer

    tensors = contents(1)
    kept = dict(tensors)
    try:
        trainer = Trainer(tensors, engines, role="trainer", rank=rank.rank, world=rank.world, **options)
    except Exception as error:
        rank.tell(error)
        return

    def send(number: int, version: int | None = None) -> Any:
        for name, tensor in contents(number).items():
            kept[name].copy_(tensor)
        return trainer.send(version)

    def timed(number: int, timeout: float) -> Any:
        """Others take longer on a busy machine."""
        sends = trainer._sends
        usual, sends._timeout = sends._timeout, timeout
        began = time.monotonic()
        updates = send(number)
        sends._timeout = usual
        return updates, time.monotonic() - began

    def spoil(size: int | None) -> None:
        """Puts a tensor of that size in the place of one, or the right one back."""
        name = min(kept)
        tensors[name] = kept[name] if size is None else torch.zeros(size)

    def threads(count: int) -> list[EngineUpdate]:
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return [sending.result()["engine"] for sending in [pool.submit(trainer.send) for _ in range(count)]]

    with trainer:
        rank.tell(trainer.run)
        while (asked := rank.hear()) is not None:
            name, *arguments = asked
            try:
                rank.tell({"send": send, "threads": threads, "spoil": spoil, "timed": timed}[name](*arguments))
            except BaseException as error:
                rank.tell(error)


def ask(process: Process, *asked: Any) -> Any:
    process.tell(asked)
    reply = process.hear()
    return reply["engine"] if isinstance(reply, dict) and reply else reply


@pytest.fixture
def jobs(folder: Any) -> Iterator[Jobs]:
    with Jobs(folder, forked=True) as started:
        yield started


@pytest.fixture
def server(folder: Any) -> Iterator[Server]:
    engine = Server(folder, "engine", 1)
    yield engine
    engine.close()


def begin(jobs: Jobs, server: Server, world: int = 1, **options: Any) -> list[Process]:
    """A trainer."""
    return jobs.start("trainer", drive, {"engine": server.url}, {"timeout": LIMIT, **options}, world=world)


def end(ranks: list[Process]) -> None:
    for process in ranks:
        process.tell(None)
    for process in ranks:
        process.result()


def came(update: EngineUpdate) -> tuple[bool, int | None, str]:
    return update.ok, update.version, update.error


def test_a_version_that_was_refused_does_not_count(jobs: Jobs, server: Server) -> None:
    (trainer,) = begin(jobs, server)
    run = trainer.hear()
    assert came(ask(trainer, "send", 1, 5)) == (True, 5, "")
    for version in (3, 5, -1, "7"):
        assert isinstance(ask(trainer, "send", 2, version), ValueError)
    assert came(ask(trainer, "send", 3)) == (True, 6, "")
    assert server.serves({run: 3 - 6}) == 3 and server.shown == "6"
    end([trainer])


def test_the_first_version_may_be_zero(jobs: Jobs, server: Server) -> None:
    (trainer,) = begin(jobs, server)
    run = trainer.hear()
    for number, version in ((1, 0), (2, None), (3, 7)):
        shown = number - 1 if version is None else version
        assert came(ask(trainer, "send", number, version)) == (True, shown, "")
        assert server.call("holds", number) == [""] and server.shown == str(shown)
        (status,) = server.call("tessera_status")
        assert (status["run"], status["version"], status["verdict"]["version"]) == (run, shown, shown)
    end([trainer])


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_sends_of_several_threads_come_one_after_the_other(jobs: Jobs, server: Server) -> None:
    (trainer,) = begin(jobs, server)
    trainer.hear()
    assert ask(trainer, "send", 1).ok
    updates = ask(trainer, "threads", 4)
    assert sorted(map(came, updates)) == [(True, version, "") for version in (2, 3, 4, 5)]
    assert server.shown == "5"
    end([trainer])


def test_after_an_interrupt_the_next_send_waits_and_brings_its_version(jobs: Jobs, server: Server) -> None:
    (trainer,) = begin(jobs, server)
    trainer.hear()
    assert ask(trainer, "send", 1).ok
    with server._lock:  # no call of its workers is answered
        trainer.tell(("send", 2))
        until(lambda: server.asked["v1/tessera/update"] == 2)
        os.kill(trainer.pid, signal.SIGINT)
        assert isinstance(trainer.hear(), KeyboardInterrupt)
        trainer.tell(("send", 3))
        assert not trainer.connection.poll(0.3)
    assert came(trainer.hear()["engine"]) == (True, 3, "")
    assert server.call("holds", 3) == [""] and server.shown == "3"
    end([trainer])


@pytest.mark.parametrize("what", ["http", "workers", "processes"])
def test_a_server_that_stood_still_takes_the_newest_version_once_it_is_back(
    jobs: Jobs, server: Server, what: str
) -> None:
    timeout = 3.0
    (trainer,) = begin(jobs, server)
    run = trainer.hear()
    assert ask(trainer, "send", 1).ok
    with contextlib.ExitStack() as still:
        if what == "http":
            server.answering.clear()
            still.callback(server.answering.set)
        elif what == "workers":
            still.enter_context(server._lock)
        else:
            os.kill(server.pid(0), signal.SIGSTOP)
            still.callback(os.kill, server.pid(0), signal.SIGCONT)
        for number in (2, 3):
            update, seconds = ask(trainer, "timed", number, timeout)
            assert not update["engine"].ok and "has not answered in" in update["engine"].error
            assert seconds < timeout + 2  # of which one is for a machine that is busy
    assert came(ask(trainer, "send", 4)) == (True, 4, "")
    assert server.serves({run: 0}) == 4 and server.shown == "4" and not server.paused
    assert came(ask(trainer, "send", 5)) == (True, 5, "")
    end([trainer])


def load(rank: Rank, extra: dict[str, Any]) -> str:
    """Loads a model as a worker of `--load-format tessera` does."""
    import stub_vllm

    stub_vllm.install(0, 1)
    from tessera.engines import on_meta
    from tessera.engines.vllm import _joined, worker
    from tessera.engines.vllm.loader import TesseraModelLoader

    _joined.on_meta = on_meta  # type: ignore[assignment]
    model = made(Place(0, 1, 0, False, 60))
    rank.tell("begins")
    try:
        loader = TesseraModelLoader(types.SimpleNamespace(model_loader_extra_config=extra))
        loader.load_weights(model, types.SimpleNamespace(quantization="none", dtype=None))
    except tessera.Error as error:
        return str(error)
    serving = worker._LOADED[model]
    wanted = made(Place(0, 1, 0, False, 60))
    wanted.load_weights(contents(serving.version).items())
    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in model.state_dict().items())
    return f"version {serving.version}"


@pytest.mark.parametrize("pair", ["weights", "of-a-second-experiment"])
@pytest.mark.parametrize("engine", ["engine", "engine7"])
def test_a_server_that_waits_under_another_name_is_told(jobs: Jobs, server: Server, engine: str, pair: str) -> None:
    server.refuses = True  # as one that is not up while it loads
    (trainer,) = begin(jobs, server, pair=pair)
    trainer.hear()
    assert "waits for this trainer" not in ask(trainer, "send", 1).error
    (loader,) = jobs.start(
        engine, load, {"engine": engine, "pair": pair, "timeout": 10 if engine == "engine7" else LIMIT}
    )
    assert loader.hear() == "begins"
    if engine == "engine":
        assert loader.result() == "version 1"
        assert "waits for this trainer" not in ask(trainer, "send", 2).error
    else:
        errors: set[str] = set()
        until(lambda: errors.add(ask(trainer, "send", 1).error) or len(errors) > 1)
        (error,) = [error for error in errors if "engine7 waits for this trainer" in error]
        assert "or give it the name 'engine' in --model-loader-extra-config" in error
        text = loader.result()
        assert "trainer is there, and offers nothing to 'engine7': name this server so" in text
        assert "in --model-loader-extra-config" in text
    end([trainer])


def test_experiments_with_a_pair_of_their_own_share_a_machine(jobs: Jobs, folder: Any) -> None:
    pairs = ["weights", "one", "two"]
    servers = [Server(folder, "engine", 1) for _ in pairs]
    trainers = [begin(jobs, server, pair=pair)[0] for server, pair in zip(servers, pairs, strict=True)]
    for trainer in trainers:
        trainer.hear()
    for number, trainer in enumerate(trainers, 1):
        assert came(ask(trainer, "send", number)) == (True, 1, "")
    for number, server in enumerate(servers, 1):
        assert server.call("holds", number) == [""]
    for pair in pairs:  # of one that is there already
        (second,) = begin(jobs, servers[0], pair=pair)
        error = second.hear()
        assert isinstance(error, tessera.AlreadyExistsError)
        assert "duplicate rank" in str(error) and "give each a pair= of its own" in str(error) and pair in str(error)
    end(trainers)
    for server in servers:
        server.close()


# --- several ranks


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("is_late", [False, True])
def test_ranks_may_come_to_their_first_send_one_after_the_other(
    jobs: Jobs, server: Server, first: int, is_late: bool
) -> None:
    server.refuses = is_late
    ranks = begin(jobs, server, world=2)
    (run, _) = [process.hear() for process in ranks]
    server.refuses = False
    for number in (1, 2):
        ranks[first].tell(("send", number))
        assert not ranks[first].connection.poll(0.5) or first == 1
        ranks[1 - first].tell(("send", number))
        updates = [process.hear() for process in ranks]
        assert updates[1] == {} and came(updates[0]["engine"]) == (True, number, "")
    assert server.serves({run: 0}) == 2
    end(ranks)


@pytest.mark.parametrize(
    ("answer", "text"), [(None, "has no routes for updates"), (500, "answered 500"), (b"<html>", "is no vLLM server")]
)
def test_a_server_that_refuses_is_told_to_every_rank(jobs: Jobs, answer: Any, text: str) -> None:
    played = Played({"v1/tessera/join": answer})
    ranks = jobs.start("trainer", drive, {"engine": played.url}, {"timeout": LIMIT}, world=3)
    errors = [process.hear() for process in ranks]
    assert {(type(error) in (tessera.UnavailableError,), str(error)) for error in errors} == {(True, str(errors[0]))}
    assert text in str(errors[0])
    played.close()


def test_what_rank_0_raises_is_raised_once_by_the_others(jobs: Jobs, server: Server) -> None:
    ranks = begin(jobs, server, world=2)
    (run, _) = [process.hear() for process in ranks]

    def send(number: int) -> list[Any]:
        for process in ranks:
            process.tell(("send", number))
        return [process.hear() for process in ranks]

    assert came(send(1)[0]["engine"]) == (True, 1, "")
    ask(ranks[0], "spoil", 3)
    error, *heard = send(2)
    assert isinstance(error, tessera.InvalidArgumentError)
    ask(ranks[0], "spoil", None)
    for number in (3, 4):
        updates, reply = send(number)
        assert came(updates["engine"]) == (True, number, "")
        assert server.serves({run: 0}) == number  # of one call, on all ranks
        heard.append(reply)
    assert [(type(reply), str(reply)) for reply in heard if reply] == [(type(error), str(error))]
    assert heard[2] == {}  # by the next call, or at once
    end(ranks)


def test_what_all_ranks_raise_is_raised_once(jobs: Jobs, server: Server) -> None:
    ranks = begin(jobs, server, world=2)
    for process in ranks:
        process.hear()
    for fails in (False, True, False, True, False):
        for process in ranks:
            ask(process, "spoil", 3 if fails else None)
            process.tell(("send", 1))
        first, second = (process.hear() for process in ranks)
        if fails:
            assert isinstance(first, tessera.InvalidArgumentError)
            assert isinstance(second, tessera.InvalidArgumentError)
        else:
            assert first["engine"].ok and second == {}
    end(ranks)


def test_no_rank_leaves_while_a_server_is_busy(jobs: Jobs, server: Server) -> None:
    ranks = begin(jobs, server, world=3)
    (run, *_) = [process.hear() for process in ranks]
    for process in ranks:
        process.tell(("send", 1))
    updates, *others = [process.hear() for process in ranks]
    assert updates["engine"].ok and others == [{}, {}]
    with server._lock:  # no call of its workers is answered
        for process in ranks:
            process.tell(("send", 2))
            process.tell(None)
        until(lambda: server.asked["v1/tessera/update"] == 2)
        assert [process.hear() for process in ranks[1:]] == [{}, {}]
        with pytest.raises(AssertionError):
            until_ended(ranks, 0.5)
    assert came(ranks[0].hear()["engine"]) == (True, 2, "")
    for process in ranks:
        process.result()
    assert server.serves({run: 0}) == 2


def until_ended(ranks: list[Process], seconds: float) -> None:
    end = time.monotonic() + seconds
    while all(process.popen.poll() is None for process in ranks):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_rank_0_that_was_killed_is_told_to_the_others(jobs: Jobs, server: Server) -> None:
    ranks = begin(jobs, server, world=2)
    for process in ranks:
        process.hear()
        process.tell(("send", 1))
    for process in ranks:
        process.hear()
    with server._lock:
        for process in ranks:
            process.tell(("send", 2))
        until(lambda: server.asked["v1/tessera/update"] == 2)
        ranks[0].kill()
        assert ranks[1].hear() == {}
        error = ask(ranks[1], "send", 3)
        assert isinstance(error, tessera.PeerLostError) and "rank 0 of this trainer is gone" in str(error)
        end(ranks[1:])
