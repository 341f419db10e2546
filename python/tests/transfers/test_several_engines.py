"""One trainer that feeds several engines: each with its own pace, world, layout and failures."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from typing import Any

import numpy as np
import pytest
import tessera
from jobs import Jobs, Rank

SHAPE = (24, 10)
LAST = 6
LIMIT = 120.0


def weights(version: int) -> np.ndarray[Any, Any]:
    return np.arange(240, dtype=np.float32).reshape(SHAPE) + 1000 * version


def rows(rank: int, world: int) -> tuple[slice, tessera.Layout]:
    size = SHAPE[0] // world
    return slice(rank * size, (rank + 1) * size), tessera.Layout(tessera.Mesh([world]), [tessera.Shard(0)])


def registered(bus: Any, rank: int, world: int, **options: Any) -> tuple[Any, np.ndarray[Any, Any], slice]:
    part, layout = rows(rank, world)
    local = np.zeros((SHAPE[0] // world, SHAPE[1]), np.float32)
    return bus.register({"w": (local, layout)}, **options), local, part


def train(rank: Rank, mode: str, engines: list[str], versions: int) -> dict[str, Any]:
    """Sends a number of versions each time it is told which engines will take them, until it is told None."""
    with rank.connect("weights", peer=engines, timeout=LIMIT) as bus:
        batch, local, part = registered(bus, rank.rank, rank.world, mode=mode, grace=LIMIT)
        version = 0
        while (wanted := rank.hear()) is not None:
            batch.wait_peers(len(wanted), timeout=LIMIT)
            for _ in range(versions):
                version += 1
                local[:] = weights(version)[part]
                handle = batch.send(version, timeout=LIMIT)
                batch.wait_peers(len(wanted), version, timeout=LIMIT)
                assert {name for name, peer in handle.peers.items() if peer.version >= version} == set(wanted)
            rank.tell({name: (peer.attached, peer.version, type(peer.error)) for name, peer in batch.peers.items()})
        return {"allocations": batch.stats.allocations, "snapshot_bytes": batch.stats.snapshot_bytes}


def serve(rank: Rank, last: int, **options: Any) -> int:
    """Takes versions until it has the last one, and stays until it is told; returns how many it took."""
    with rank.connect("weights", peer="trainer", timeout=LIMIT) as bus:
        batch, local, part = registered(bus, rank.rank, rank.world, **options)
        taken = 0
        while batch.version < last:
            try:
                batch.recv(timeout=LIMIT)
            except tessera.PeerLostError:  # it was stopped, and the others went on
                continue
            assert (local == weights(batch.version)[part]).all()
            taken += 1
        rank.tell()
        rank.hear()  # until nobody looks at it any more
    return taken


MODES = pytest.mark.parametrize("mode", ["staged", "inplace"])


@MODES
def test_three_engines_take_every_version(jobs: Jobs, mode: str) -> None:
    engines = {"engine0": 1, "engine1": 2, "engine2": 3}
    trainers = jobs.start("trainer", train, mode, list(engines), LAST, world=2)
    ranks = [rank for name, world in engines.items() for rank in jobs.start(name, serve, LAST, world=world)]
    for trainer in trainers:
        trainer.tell(list(engines))
    for trainer in trainers:
        assert trainer.hear() == dict.fromkeys(engines, (True, LAST, type(None)))
    for process in ranks + trainers:
        process.tell(None)
    results = jobs.results()
    for name, world in engines.items():
        assert results[name] == [LAST] * world
    part = 4 * SHAPE[0] * SHAPE[1] // 2
    copies = 3 * -(-part // 4096) * 4096 if mode == "staged" else 0  # whatever the number of engines
    assert results["trainer"] == [{"allocations": 0, "snapshot_bytes": copies}] * 2


@MODES
@pytest.mark.parametrize("trouble", ["absent", "stopped", "killed"])
def test_one_in_trouble_delays_nobody_and_is_served_when_it_is_back(jobs: Jobs, mode: str, trouble: str) -> None:
    trainers = jobs.start("trainer", train, mode, ["engine0", "engine1"], LAST, world=2)
    healthy = jobs.start("engine0", serve, 3 * LAST, world=2)
    engines = [] if trouble == "absent" else jobs.start("engine1", serve, 3 * LAST, world=2)
    there = ["engine0"] if trouble == "absent" else ["engine0", "engine1"]

    def send(wanted: list[str]) -> dict[str, Any]:
        for trainer in trainers:
            trainer.tell(wanted)
        (said,) = {tuple(sorted(trainer.hear().items())) for trainer in trainers}
        return dict(said)

    send(there)
    for engine in engines:
        engine.kill(signal.SIGSTOP if trouble == "stopped" else signal.SIGKILL)
    peers = send(["engine0"])
    assert peers["engine0"] == (True, 2 * LAST, type(None))
    attached, version, error = peers["engine1"]
    if trouble == "absent":
        assert (attached, version, error) == (False, 0, type(None))
    else:
        assert version == LAST
    if trouble == "killed":
        assert not attached and error is tessera.PeerLostError
    if trouble == "stopped":
        for engine in engines:
            engine.kill(signal.SIGCONT)
    else:
        engines = jobs.start("engine1", serve, 3 * LAST, world=3)
    assert send(["engine0", "engine1"])["engine1"] == (True, 3 * LAST, type(None))
    for process in healthy + engines + trainers:
        process.tell(None)
    assert [process.result() for process in healthy] == [3 * LAST] * 2
    for process in engines + trainers:
        process.result()


def receive_from_two(rank: Rank) -> list[float]:
    """One process with one place on the bus, and two senders, in two threads."""
    found: dict[str, float] = {}

    def take(trainer: str) -> None:
        with rank.connect("weights", peer=trainer, timeout=LIMIT) as bus:
            tensor = np.zeros(4, np.float32)
            bus.register({"w": tensor}).recv(timeout=LIMIT)
            found[trainer] = float(tensor[0])

    threads = [threading.Thread(target=take, args=(trainer,)) for trainer in ("trainer0", "trainer1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found["trainer0"], found["trainer1"]]


def send_one(rank: Rank, value: float) -> None:
    with rank.connect("weights", peer="engine", timeout=LIMIT) as bus:
        bus.register({"w": np.full(4, value, np.float32)}).send(timeout=LIMIT)


def test_one_process_receives_from_two_trainers(jobs: Jobs) -> None:
    jobs.start("engine", receive_from_two, world=2)
    for number, value in enumerate((3.0, 5.0)):
        jobs.start(f"trainer{number}", send_one, value)
    assert jobs.results()["engine"] == [[3.0, 5.0]] * 2


def send_by_two(rank: Rank) -> None:
    """Two connect() calls of one process, to two jobs, under one pair name; the batches have the same name, too."""
    with (
        rank.connect("weights", peer="engine0", timeout=LIMIT) as first,
        rank.connect("weights", peer="engine1", timeout=LIMIT) as second,
    ):
        batches = [bus.register({"w": np.full(4, value, np.float32)}) for bus, value in ((first, 3.0), (second, 5.0))]
        for batch in batches:
            batch.send(timeout=LIMIT)


def take_one(rank: Rank) -> float:
    with rank.connect("weights", peer="trainer", timeout=LIMIT) as bus:
        tensor = np.zeros(4, np.float32)
        bus.register({"w": tensor}).recv(timeout=LIMIT)
        return float(tensor[0])


def test_several_connects_of_one_process_share_its_place(jobs: Jobs) -> None:
    for engine in ("engine0", "engine1"):
        jobs.start(engine, take_one)
    jobs.start("trainer", send_by_two, world=2)
    results = jobs.results()
    assert (results["engine0"], results["engine1"]) == ([3.0], [5.0])


def share(rank: Rank) -> list[str]:
    """What a second connect() of a process refuses, and that the last one releases the rank."""
    import multiprocessing

    errors = []
    one = rank.connect("a", peer=["engine"], timeout=LIMIT, threads=1)
    for options in ({"world": 2}, {"threads": 3}):
        try:
            tessera.connect("b", **{"role": rank.job, "peer": ["engine"], "rank": 0, "world": 1, **options})
        except tessera.InvalidArgumentError as error:
            errors.append(str(error))
    two = rank.connect("b", peer=["engine"], timeout=LIMIT)
    one.close()
    two.register({"w": np.zeros(4, np.float32)}, mode="staged").send()  # it goes on
    # A forked child is another process: it may not take its parent's rank, and does not wait for its parent's locks.
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe()
    child = context.Process(target=_connect_in_child, args=(rank.job, writer))
    child.start()
    errors.append(reader.recv())
    child.join()
    two.close()
    with tessera.connect("c", role=rank.job, peer=["engine"], rank=0, world=1):
        pass
    return errors


def _connect_in_child(job: str, writer: Any) -> None:
    try:
        tessera.connect("b", role=job, peer=["engine"], rank=0, world=1, timeout=LIMIT)
        writer.send("connected")
    except tessera.AlreadyExistsError as error:
        writer.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def test_what_several_connects_cannot_share_is_refused_by_name(jobs: Jobs) -> None:
    (process,) = jobs.start("trainer", share)
    world, threads, child = process.result()
    assert "world 2: this process is on the bus as trainer/0 of a world of 1 already" in world
    assert "threads 3: this process is on the bus as trainer/0 with 1 already" in threads
    assert child.startswith("AlreadyExistsError: duplicate rank: trainer/0 is pid")


@pytest.mark.parametrize(
    ("peer", "says"),
    [
        ([], "give the name of a job, or a list"),
        (["engine", 1], "give a str"),
        (["engine", "engine"], "peer engine is named twice"),
        (["trainer"], "job trainer cannot be paired with itself"),
        (["engine", ""], "peer job"),
        ([f"engine{i}" for i in range(65)], "65 peers: at most 64 are possible"),
    ],
    ids=["none", "number", "twice", "itself", "empty", "many"],
)
def test_a_list_of_peers_that_cannot_be_is_refused(peer: Any, says: str, runtime_dir: pathlib.Path) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=says):
        tessera.connect("weights", role="trainer", peer=peer, rank=0, world=1)


def test_a_batch_is_received_from_one_job(runtime_dir: pathlib.Path) -> None:
    with tessera.connect("weights", role="engine", peer=["trainer0", "trainer1"], rank=0, world=1) as bus:
        with pytest.raises(tessera.InvalidArgumentError, match="received from one job"):
            bus.register({"w": np.zeros(4, np.float32)}).recv()
        with pytest.raises(tessera.InvalidArgumentError, match="received from one job"):
            bus.manifest()


def test_a_send_that_nobody_takes_says_who_is_missing(runtime_dir: pathlib.Path) -> None:
    with tessera.connect("weights", role="trainer", peer=["engine0", "engine1"], rank=0, world=1) as bus:
        staged = bus.register({"w": np.zeros(4, np.float32)}, "staged", mode="staged")
        assert staged.send(version=7).wait() == 7  # whoever comes takes it
        assert {name: (peer.attached, peer.version) for name, peer in staged.peers.items()} == {
            "engine0": (False, 0),
            "engine1": (False, 0),
        }
        inplace = bus.register({"w": np.zeros(4, np.float32)}, "inplace")
        with pytest.raises(tessera.DeadlineExceededError, match="no job is attached: job engine0; job engine1"):
            inplace.send(timeout=0.2)
        with pytest.raises(tessera.DeadlineExceededError, match="missing: job engine0; job engine1"):
            inplace.wait_peers(timeout=0.2)


def change_places(rank: Rank, other: str) -> None:
    """Transfers once as its job, and once as the other one. It keeps everything that it has closed."""
    kept = []
    for role, peer in ((rank.job, other), (other, rank.job)):
        with tessera.connect("weights", role=role, peer=peer, rank=0, world=1, timeout=LIMIT) as bus:
            batch = bus.register({"w": np.zeros(4, np.float32)})
            start = batch.send if role == "trainer" else batch.recv
            handle: Any = start(blocking=False, timeout=LIMIT)
            handle.wait()
            kept.append((bus, batch, handle))
        rank.tell()
        rank.hear()


def test_a_rank_is_free_once_its_bus_is_closed_although_batches_and_handles_are_kept(jobs: Jobs) -> None:
    ranks = jobs.start("trainer", change_places, "engine") + jobs.start("engine", change_places, "trainer")
    for _ in range(2):
        for each in ranks:
            each.hear()
        for each in ranks:
            each.tell()
    jobs.results()
