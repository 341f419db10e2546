"""A wait that is in vain names where the missing ranks are, and for whom they wait."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import tessera
from ranks import LIMIT, connect, run

SHORT = 1.0  # seconds that a call waits which cannot succeed
_namespaces = (f"hints{number}" for number in itertools.count())


class Job(NamedTuple):
    pair: str
    role: str
    peer: str
    world: int = 1

    def connect(self, namespace: str, rank: int, timeout: float) -> tessera.Bus:
        return tessera.connect(
            self.pair,
            role=self.role,
            peer=self.peer,
            rank=rank,
            world=self.world,
            namespace=namespace,
            timeout=timeout,
            threads=1,
        )


def message_with(hint: str, wait: Callable[[], Any]) -> str:
    """The message of a wait that is repeated until the store shows the hint."""
    end = time.monotonic() + LIMIT
    while True:
        with pytest.raises(tessera.DeadlineExceededError) as caught:
            wait()
        if hint in str(caught.value):
            return str(caught.value)
        assert time.monotonic() < end, f"not {hint!r} but {caught.value}"


class Cycle:
    """Two jobs that wait for each other, again and again, until the messages of both have had their hints."""

    def __init__(self) -> None:
        self._hinted: set[str] = set()

    def wait(self, hint: str, wait: Callable[[], Any]) -> None:
        end = time.monotonic() + LIMIT
        while len(self._hinted) < 2:
            with pytest.raises((tessera.DeadlineExceededError, tessera.PeerLostError)) as caught:
                wait()
            if hint in str(caught.value):
                self._hinted.add(hint)
            assert time.monotonic() < end, f"{self._hinted}, and here {caught.value}"


@contextlib.contextmanager
def waiting(job: Job, ranks: list[int], namespace: str) -> Iterator[None]:
    """Ranks of a job that wait in the pair, in vain."""
    ended = threading.Event()

    def wait(rank: int) -> None:
        while not ended.is_set():
            with contextlib.suppress(tessera.DeadlineExceededError):
                job.connect(namespace, rank, 2 * SHORT).close()

    threads = [threading.Thread(target=wait, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(LIMIT)


@pytest.mark.parametrize(
    ("own", "other", "ranks", "hint"),
    [
        (
            Job("weights", "trainer", "engine"),
            Job("wieghts", "engine", "trainer", 2),
            [0, 1],
            "; job engine is here, in pair wieghts",
        ),
        (
            Job("weights", "trainer", "engine"),
            Job("scores", "engine", "judge", 2),
            [0],
            "; job engine is here, in pair scores with job judge, which is missing there",
        ),
        (
            Job("weights", "trainer", "inference"),
            Job("weights", "engine", "trainer", 2),
            [1],
            "; job engine is here and waits for job trainer: is inference meant to be engine?",
        ),
        (
            Job("weights", "trainer", "inference"),
            Job("wieghts", "engine", "trainer"),
            [0],
            "; job engine is here, in pair wieghts, and waits for job trainer: is inference meant to be engine?",
        ),
        (
            Job("weights", "trainer", "engine", 3),
            Job("wieghts", "trainer", "engine", 3),
            [1, 2],
            "; trainer/1-2 are here, in pair wieghts",
        ),
    ],
    ids=["another pair", "another job", "another name", "another pair and name", "ranks of the own job"],
)
def test_a_job_that_is_elsewhere_is_named(own: Job, other: Job, ranks: list[int], hint: str) -> None:
    namespace = next(_namespaces)
    with waiting(other, ranks, namespace):
        assert "missing: " in message_with(hint, lambda: own.connect(namespace, 0, SHORT))


def test_a_job_that_nobody_waits_for_says_whom_it_waits_for() -> None:
    """It joins, since the other job is there, and the other one waits for a name that it does not have."""
    namespace = next(_namespaces)
    trainer, engine = Job("weights", "trainer", "inference", 2), Job("weights", "engine", "trainer")
    with waiting(trainer, [0, 1], namespace), engine.connect(namespace, 0, LIMIT) as bus:
        batch = bus.register({"w": np.zeros(4)})
        hint = "; trainer/0-1 wait for job inference, not for engine: is inference meant to be engine?"
        message_with(hint, lambda: batch.recv(timeout=SHORT))


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_of_another_name_is_named(world: int) -> None:
    over = threading.Barrier(world + 1, timeout=LIMIT)

    def engine(bus: tessera.Bus) -> None:
        batch = bus.register({"w": np.zeros(4)}, batch="polcy")
        ended = threading.Thread(target=lambda: (over.wait(), batch.close()))
        ended.start()
        with pytest.raises(
            (tessera.CancelledError, tessera.PeerLostError)
        ):  # as a batch is closed, or the trainer leaves
            batch.recv(timeout=LIMIT)
        ended.join(LIMIT)

    def trainer(bus: tessera.Bus) -> None:
        batch = bus.register({"w": np.ones(4)}, batch="policy")
        names, have = ("engine/0", "has") if world == 1 else ("engine/0-1", "have")
        hint = f"; {names} {have} registered batch polcy of this pair, not policy"
        message_with(hint, lambda: batch.send(timeout=SHORT))
        over.wait()

    run({"trainer": [trainer], "engine": [engine] * world})


def test_the_batch_of_a_sender_to_several_jobs_is_named() -> None:
    """The trainer registers it with one engine, and another engine asks for it under another name."""
    namespace = next(_namespaces)
    over = threading.Barrier(3, timeout=LIMIT)

    def trainer() -> None:
        engines = ["engine0", "engine1"]
        with connect("trainer", engines, namespace) as bus, bus.register({"w": np.ones(4)}, batch="policy") as batch:
            batch.send(timeout=LIMIT)
            over.wait()

    def engine0() -> None:
        with connect("engine0", "trainer", namespace) as bus, bus.register({"w": np.zeros(4)}, batch="policy") as batch:
            batch.recv(timeout=LIMIT)
            over.wait()

    def engine1() -> None:
        with connect("engine1", "trainer", namespace) as bus:
            batch = bus.register({"w": np.zeros(4)}, batch="polcy")
            hint = "; trainer/0 has registered batch policy of this pair, not polcy"
            message_with(hint, lambda: batch.recv(timeout=SHORT))
            over.wait()

    with ThreadPoolExecutor(3) as pool:
        for job in [pool.submit(job) for job in (trainer, engine0, engine1)]:
            job.result(2 * LIMIT)


def test_two_jobs_that_wait_for_each_other_are_told_of_it() -> None:
    """Each registers first what the other one registers last."""
    cycle = Cycle()

    def job(other: str, first: str, second: str) -> Callable[[tessera.Bus], None]:
        def wait(bus: tessera.Bus) -> None:
            batch = bus.register({"w": np.zeros(4)}, batch=first)
            hint = f"{other}/0 has registered batch {second} of this pair, not {first}"
            cycle.wait(hint, lambda: batch.send(timeout=2 * SHORT))

        return wait

    run({"trainer": [job("engine", "weights", "scores")], "engine": [job("trainer", "scores", "weights")]})


def test_the_rank_that_is_late_is_named_and_not_those_that_wait_for_it() -> None:
    """The engine's rank 1 does not register: rank 0 and 2 wait for it, and the trainer for all."""
    over, named = threading.Barrier(4, timeout=2 * LIMIT), threading.Event()

    def engine(bus: tessera.Bus) -> None:
        if bus.rank == 1:
            over.wait()
            return
        batch = bus.register({"w": np.zeros(4 + bus.rank)})
        while not named.is_set():
            with pytest.raises(tessera.DeadlineExceededError, match=r"missing: engine/1$"):
                batch.recv(timeout=2 * SHORT)
        over.wait()

    def trainer(bus: tessera.Bus) -> None:
        batch = bus.register({"w": np.ones(4)})
        message_with("missing: engine/1", lambda: batch.send(timeout=SHORT))
        named.set()
        over.wait()

    run({"trainer": [trainer], "engine": [engine] * 3})


def pairs_of(namespace: str, role: str, peer: str, stack: contextlib.ExitStack, *pairs: str) -> list[tessera.Bus]:
    return [stack.enter_context(Job(pair, role, peer).connect(namespace, 0, LIMIT)) for pair in pairs]


def test_two_jobs_that_wait_for_each_other_over_two_pairs_are_told_of_it() -> None:
    """Both have joined both pairs; each registers the batch of another one first."""
    namespace, cycle = next(_namespaces), Cycle()
    joined = threading.Barrier(2, timeout=LIMIT)

    def job(role: str, peer: str, index: int, batches: tuple[str, str]) -> None:
        with contextlib.ExitStack() as stack:
            bus = pairs_of(namespace, role, peer, stack, "weights", "samples")[index]
            batch = bus.register({"w": np.zeros(4)}, batch=batches[0])
            other = "samples" if index == 0 else "weights"
            hint = f"{peer}/0 has registered batch {batches[1]} of pair {other}, and waits for {role}/0 there"
            joined.wait()
            cycle.wait(hint, lambda: batch.send(timeout=2 * SHORT))
            joined.wait()

    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(job, "trainer", "engine", 0, ("policy", "texts")),
            pool.submit(job, "engine", "trainer", 1, ("texts", "policy")),
        ]
        for ended in jobs:
            ended.result(2 * LIMIT)


def test_a_job_that_connects_while_the_other_one_registers_is_told_of_it() -> None:
    """The engine joins a second pair, and the trainer waits for a batch in the first."""
    namespace, cycle = next(_namespaces), Cycle()
    joined = threading.Barrier(2, timeout=LIMIT)

    def trainer() -> None:
        with contextlib.ExitStack() as stack:
            (bus,) = pairs_of(namespace, "trainer", "engine", stack, "weights")
            batch = bus.register({"w": np.zeros(4)}, batch="policy")
            joined.wait()
            cycle.wait("engine/0 waits for trainer/0 in pair samples", lambda: batch.send(timeout=2 * SHORT))
            joined.wait()

    def engine() -> None:
        with contextlib.ExitStack() as stack:
            pairs_of(namespace, "engine", "trainer", stack, "weights")
            joined.wait()
            cycle.wait(
                "job trainer has registered batch policy of pair weights, and waits for engine/0 there",
                lambda: Job("samples", "engine", "trainer").connect(namespace, 0, 2 * SHORT),
            )
            joined.wait()

    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(trainer), pool.submit(engine)]:
            ended.result(2 * LIMIT)


def test_a_job_that_is_alone_says_where_it_has_looked() -> None:
    """So that two users, and two values of a variable, can be compared."""
    program = (
        "import tessera; tessera.connect('weights', role='trainer', peer='engine', rank=0, world=1, "
        f"timeout={SHORT}, namespace='mine')"
    )
    with tempfile.TemporaryDirectory() as folder:  # a short path, since sockets lie in it
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TESSERA_RUNTIME_DIR": folder, "TESSERA_STORE": "auto"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    assert f"; looked in namespace mine of store auto, folder {folder}" in ended.stderr, ended.stderr
