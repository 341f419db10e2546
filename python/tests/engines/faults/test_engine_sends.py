"""Sends of a Trainer that are refused, interrupted or late, of several threads and ranks: the worker's real code in
processes, a real trainer over HTTP and the bus."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from fault_ranks import contents
from fault_servers import LIMIT, Server
from jobs import Jobs, Process, Rank
from tessera.engines import EngineUpdate


def drive(rank: Rank, engines: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Makes a Trainer, and calls what it hears, until that is None: `send` of (number of contents, version)."""
    from tessera.engines.vllm import Trainer

    tensors = contents(1)
    trainer = Trainer(tensors, engines, role="trainer", rank=rank.rank, world=rank.world, **options)

    def send(number: int, version: int | None = None) -> Any:
        for name, tensor in contents(number).items():
            tensors[name].copy_(tensor)
        return trainer.send(version)

    def threads(count: int) -> list[EngineUpdate]:
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return [sending.result()["engine"] for sending in [pool.submit(trainer.send) for _ in range(count)]]

    with trainer:
        rank.tell(trainer.run)
        while (asked := rank.hear()) is not None:
            name, *arguments = asked
            try:
                rank.tell({"send": send, "threads": threads}[name](*arguments))
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
