"""A job that ends before it has registered anything, and is started again, meets the job that has lived on."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import numpy as np
import pytest
import tessera
from jobs import Jobs, Rank

PATIENCE = 60  # seconds that a call may wait for another process
ROWS = 8
ENDS = ["leaves", "raises", "killed", "misfits"]


def rows_of(rank: int, world: int) -> slice:
    return slice(rank * ROWS // world, (rank + 1) * ROWS // world)


def weights(scale: float) -> Any:
    return scale * np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)


def registered(bus: tessera.Bus, rank: Rank, mode: Any, scale: float, rows: int = ROWS) -> tuple[tessera.Batch, Any]:
    """A batch with this rank's rows, and these."""
    own = weights(scale)[rows_of(rank.rank, rank.world)].copy()
    layout = tessera.Layout(f"{rank.world}:S0")
    tensor = (own, layout, (ROWS, 3)) if rows == ROWS else np.ones((rows, 3), np.float32)
    return bus.register({"w": tensor}, mode=mode), own


def transfer(rank: Rank, batch: tessera.Batch, own: Any, mode: Any) -> bool:
    """Sends, or takes and compares."""
    if rank.job == "trainer":
        batch.send(timeout=PATIENCE)
        if mode == "staged":
            batch.wait_peers(1, version=batch.version, timeout=PATIENCE)
        return True
    batch.recv(timeout=PATIENCE)
    return np.array_equal(own, weights(2.0)[rows_of(rank.rank, rank.world)])


def other(rank: Rank) -> str:
    return "engine" if rank.job == "trainer" else "trainer"


def live_on(rank: Rank, mode: Any) -> bool:
    """Calls again and again, as the guide says that it may."""
    with rank.connect("weights", peer=other(rank), timeout=PATIENCE) as bus:
        rank.tell("here")
        batch, own = registered(bus, rank, mode, 2.0 if rank.job == "trainer" else 0)
        for attempt in range(50):
            with contextlib.suppress(tessera.PeerLostError, tessera.MismatchError, tessera.InvalidArgumentError):
                return transfer(rank, batch, own, mode)
            if attempt % 2:
                batch.close()
                batch, own = registered(bus, rank, mode, 2.0 if rank.job == "trainer" else 0)
    return False


def begin_and_end(rank: Rank, mode: Any, how: str) -> None:
    with contextlib.suppress(RuntimeError, tessera.Error), rank.connect("weights", peer=other(rank)) as bus:
        rank.tell("here")
        rank.hear()
        if how == "raises":
            raise RuntimeError("a bug in the program")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "misfits":
            batch, _ = registered(bus, rank, mode, 1.0, ROWS + 1)
            (batch.send if rank.job == "trainer" else batch.recv)(timeout=PATIENCE)


def begin_again(rank: Rank, mode: Any) -> bool:
    with rank.connect("weights", peer=other(rank), timeout=PATIENCE) as bus:
        batch, own = registered(bus, rank, mode, 2.0 if rank.job == "trainer" else 0)
        return transfer(rank, batch, own, mode)


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("mode", ["inplace", "staged"])
@pytest.mark.parametrize("job", ["trainer", "engine"])
def test_a_job_that_ended_before_it_registered_is_met_again(forked_jobs: Jobs, job: str, mode: str, how: str) -> None:
    stays = "engine" if job == "trainer" else "trainer"
    living = forked_jobs.start(stays, live_on, mode, world=2)
    first = forked_jobs.start(job, begin_and_end, mode, how)[0]
    first.hear()
    for process in living:
        process.hear()
    if how == "killed":
        first._forgiven = True
    first.tell()
    if how == "killed":
        first.popen.wait(PATIENCE)
    else:
        first.result()
    again = forked_jobs.start(job, begin_again, mode)[0]
    assert again.result()
    assert [process.result() for process in living] == [True, True]


def call_often(rank: Rank) -> int:
    """Receives with a deadline much shorter than the sender's, again and again."""
    with rank.connect("weights", peer="trainer", timeout=PATIENCE) as bus:
        batch, own = registered(bus, rank, "inplace", 0)
        rank.tell("here")
        for calls in range(1, 10_000):
            with contextlib.suppress(tessera.DeadlineExceededError, tessera.PeerLostError):
                batch.recv(timeout=0.05)
                assert np.array_equal(own, weights(3.0)[rows_of(rank.rank, rank.world)])
                return calls
    return 0


def send_once(rank: Rank) -> None:
    with rank.connect("weights", peer="engine", timeout=PATIENCE) as bus:
        rank.tell("here")
        rank.hear()
        batch, _ = registered(bus, rank, "inplace", 3.0)
        batch.send(timeout=PATIENCE)


def test_deadlines_of_the_other_job_do_not_end_a_longer_call(forked_jobs: Jobs) -> None:
    engine = forked_jobs.start("engine", call_often)[0]
    trainer = forked_jobs.start("trainer", send_once, world=2)
    for process in (engine, *trainer):
        process.hear()
    for process in trainer:
        process.tell()
    for process in trainer:
        process.result()
    assert engine.result() >= 1
