"""Batches that agent daemons transfer for their ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera
from jobs import Jobs, Rank

COMMAND = Path(tessera.__file__).parent / "bin" / "tessera"
WORLDS = {"trainer": 2, "inference": 1}

pytestmark = pytest.mark.skipif(not COMMAND.exists(), reason="the package was built without the command")


@pytest.fixture
def agents(folder: Path) -> Iterator[None]:
    """One for each rank, which is ready."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tessera", "agent", "--job", job, "--rank", str(rank), "--json"],
            env=environment | {"TESSERA_RUNTIME_DIR": str(folder / "run")},
            stdout=subprocess.PIPE,
        )
        for job, world in WORLDS.items()
        for rank in range(world)
    ]
    try:
        for agent in started:
            assert agent.stdout is not None
            assert "address" in json.loads(agent.stdout.readline())
        yield
    finally:
        for agent in started:
            agent.terminate()
        for agent in started:
            agent.communicate(timeout=60)


def rows(version: int) -> np.ndarray[Any, Any]:
    return np.arange(6 * 5, dtype=np.float32).reshape(6, 5) + 100 * version


def send(rank: Rank, mode: Any) -> list[int]:
    with rank.connect("weights", peer="inference", agent="daemon") as bus:
        own = tessera.zeros((3, 5), np.float32)
        batch = bus.register({"w": (own, "2:S0", (6, 5))}, mode=mode)
        sent = []
        for version in (1, 2):
            own[...] = rows(version)[3 * rank.rank :][:3]
            sent.append(batch.send(version, timeout=100).version)
            rank.hear()
        return sent


def take(rank: Rank, mode: Any) -> str:
    with rank.connect("weights", peer="trainer", agent="daemon") as bus:
        taken = tessera.zeros((6, 5), np.float32)
        batch = bus.register({"w": taken}, mode=mode)
        for version in (1, 2):
            assert batch.recv(version, timeout=100) == version
            np.testing.assert_array_equal(taken, rows(version))
            rank.tell(version)
        assert batch.stats.transfers == 2
        return repr(batch)


@pytest.mark.parametrize("mode", ["inplace", "staged"])
@pytest.mark.usefixtures("agents")
def test_a_batch_is_moved_by_agents(mode: str, jobs: Jobs) -> None:
    senders = jobs.start("trainer", send, mode, world=WORLDS["trainer"])
    (receiver,) = jobs.start("inference", take, mode)
    for version in (1, 2):
        assert receiver.hear() == version
        for sender in senders:
            sender.tell()
    results = jobs.results()
    assert results["trainer"] == [[1, 2], [1, 2]]
    assert results["inference"] == [f"Batch(weights/default: 1 tensors, {mode}, receives, version 2)"]


def send_early(rank: Rank) -> str:
    with rank.connect("weights", peer="inference", agent="daemon") as bus:
        held = tessera.zeros(3, np.float32)
        batch = bus.register({"w": held}, direction="send", timeout=100)
        held[:] = rank.rank
        with pytest.raises(tessera.MismatchError) as caught:
            batch.send(timeout=100)
        rank.tell()
        rank.hear()
        held[:] = 5
        batch.send(timeout=100)
        return str(caught.value)


def take_once(rank: Rank) -> list[float]:
    with rank.connect("weights", peer="trainer", agent="daemon") as bus:
        taken = tessera.zeros(3, np.float32)
        bus.register({"w": taken}, timeout=100).recv(timeout=100)
        return taken.tolist()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("agents")
def test_replicas_of_a_batch_that_is_registered_early_are_compared(jobs: Jobs) -> None:
    senders = jobs.start("trainer", send_early, world=WORLDS["trainer"])
    jobs.start("inference", take_once)
    for sender in senders:
        sender.hear()
    for sender in senders:
        sender.tell()
    results = jobs.results()
    assert all("differ: w (ranks 0: " in text for text in results["trainer"])
    assert results["inference"] == [[5, 5, 5]]
