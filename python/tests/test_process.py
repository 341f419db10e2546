"""Tests that need a separate process: Ctrl-C, forks, exit, environment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LIMIT = 200.0

# Python cannot interrupt threads, so the main thread waits, and another thread plays the other job.
PEERS = """
import os, signal, sys, threading
import numpy as np
import tessera

tessera._core.report_leaks(True)

def interrupted(call):
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        call()
    except KeyboardInterrupt:
        return True

def in_the_end(call):
    while True:
        try:
            return call()
        except tessera.PeerLostError as error:  # what the other job had been told, or has told since
            assert "gave up" in str(error), error

def connect(role, peer, **options):
    return tessera.connect("weights", role=role, peer=peer, rank=0, world=1, **options)
"""


def run(body: str, runtime_dir: Path, **environment: str) -> str:
    script = PEERS + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore::ResourceWarning", "-c", script],
        env={**os.environ, "TESSERA_NAMESPACE": f"p{abs(hash(body))}", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nanobind: leaked" not in done.stderr
    return done.stdout


def test_ctrl_c_ends_a_wait_for_the_other_job(runtime_dir: Path) -> None:
    said = run(
        """
        print(interrupted(lambda: connect("trainer", "inference", timeout=30)))
        try:  # the rank is free again
            connect("trainer", "inference", timeout=0.1)
        except tessera.DeadlineExceededError:
            print("late")
        """,
        runtime_dir,
    )
    assert said.split() == ["True", "late"]


def test_ctrl_c_ends_a_group_that_waits_for_its_other_rank_at_the_store(runtime_dir: Path) -> None:
    said = run(
        """
        import time

        began = time.monotonic()
        join = lambda: tessera._core.ShardGroup.over_store("auto", "job", 0, 2, "job", 60.0)
        print(interrupted(join), time.monotonic() - began < 30)
        """,
        runtime_dir,
    )
    assert said.split() == ["True", "True"]


def test_ctrl_c_ends_a_transfer_that_nobody_has_begun_and_the_next_one_goes_well(runtime_dir: Path) -> None:
    said = run(
        """
        value, target = np.arange(4.0), np.zeros(4)
        sends = threading.Event()

        def train():
            with connect("trainer", "inference", timeout=30) as bus:
                batch = bus.register({"w": value}, direction="send")
                sends.wait(30)
                batch.send()

        trainer = threading.Thread(target=train)
        trainer.start()
        with connect("inference", "trainer", timeout=30) as bus:
            batch = bus.register({"w": target}, direction="recv")
            print(interrupted(lambda: batch.recv(timeout=30)))
            handle = batch.recv(timeout=30, blocking=False)
            print(interrupted(handle.wait), not handle.done())
            sends.set()
            print(handle.wait(), target.tolist())
            trainer.join(30)
        """,
        runtime_dir,
    )
    assert said.splitlines() == ["True", "True True", "1 [0.0, 1.0, 2.0, 3.0]"]


def test_ctrl_c_ends_a_wait_and_the_same_call_then_goes_well(runtime_dir: Path) -> None:
    said = run(
        """
        value, target = np.arange(4.0), np.zeros(4)
        offers, sends = threading.Event(), threading.Event()

        def train():
            with connect("trainer", "inference", timeout=30) as bus:
                offers.wait(30)
                batch = in_the_end(lambda: bus.register({"w": value}, direction="send"))
                sends.wait(30)
                batch.send()

        trainer = threading.Thread(target=train)
        trainer.start()
        with connect("inference", "trainer", timeout=30) as bus:
            print(interrupted(lambda: bus.manifest()))
            register = lambda: bus.register({"w": target}, direction="recv")
            print(interrupted(register))
            offers.set()
            batch = in_the_end(register)
            print(interrupted(lambda: batch.wait_version(1, timeout=30)))
            sends.set()
            print(batch.wait_version(1, timeout=30), batch.recv(), target.tolist())
            trainer.join(30)
        """,
        runtime_dir,
    )
    assert said.splitlines() == ["True", "True", "True", "1 1 [0.0, 1.0, 2.0, 3.0]"]


def test_ctrl_c_ends_init_pair_which_can_be_called_again(runtime_dir: Path) -> None:
    said = run(
        """
        from tessera.tensor_bus import TensorBusClient

        value, target = np.arange(4.0), np.zeros(4)

        def train():
            with TensorBusClient(agent_rank=0) as client:
                client.init_pair("weights", "trainer", "inference", 1)
                client.register_tensors("policy", [(value, "weights")]).transfer("send")

        trainer = threading.Thread(target=train)
        with TensorBusClient(agent_rank=0) as client:
            print(interrupted(lambda: client.init_pair("weights", "inference", "trainer", 1)))
            trainer.start()
            client.init_pair("weights", "inference", "trainer", 1)
            print(interrupted(lambda: client.init_pair("more", "inference", "trainer", 1)))
            client.register_tensors("policy", [(target, "weights")]).transfer("recv")
            print(target.tolist())
            trainer.join(30)
        """,
        runtime_dir,
    )
    assert said.splitlines() == ["True", "True", "[0.0, 1.0, 2.0, 3.0]"]


def test_a_process_may_end_without_closing_anything(runtime_dir: Path) -> None:
    said = run(
        """
        value, target = np.arange(4.0), np.zeros(4)
        buses = {}

        def train():
            buses["trainer"] = connect("trainer", "inference", timeout=30)
            buses["sends"] = buses["trainer"].register({"w": value})
            buses["sends"].send()

        trainer = threading.Thread(target=train)
        trainer.start()
        bus = connect("inference", "trainer", timeout=30)
        batch = bus.register({"w": target})
        print(batch.recv())
        trainer.join(30)
        pending = batch.recv(blocking=False)
        """,
        runtime_dir,
    )
    assert said.split() == ["1"]


def test_a_forked_child_is_told_and_harms_nothing(runtime_dir: Path) -> None:
    said = run(
        """
        value, target = np.arange(4.0), np.zeros(4)
        goes_on = threading.Event()

        def train():
            with connect("trainer", "inference", timeout=30) as bus:
                batch = bus.register({"w": value})
                batch.send()
                goes_on.wait(30)
                batch.send()

        trainer = threading.Thread(target=train)
        trainer.start()
        with connect("inference", "trainer", timeout=30) as bus:
            batch = bus.register({"w": target})
            batch.recv()
            child = os.fork()
            if child == 0:
                try:
                    batch.recv()
                except tessera.InvalidArgumentError as error:
                    print("forked child" in str(error), flush=True)
                del batch, bus
                os._exit(0)
            print(os.waitpid(child, 0)[1], flush=True)
            goes_on.set()
            print(batch.recv())
            trainer.join(30)
        """,
        runtime_dir,
    )
    assert said.split() == ["True", "0", "2"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "3"}, "1 3"),
        ({"RANK": "1", "WORLD_SIZE": "3", "TESSERA_RANK": "2", "TESSERA_WORLD_SIZE": "4"}, "2 4"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "9"}, "1 2"),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "9"}, "5 9"),
        ({"SLURM_NTASKS": "9"}, "0 1"),  # in a shell that salloc has given
        ({}, "0 1"),
        ({"RANK": "two", "WORLD_SIZE": "3"}, 'RANK is "two", not a number from 0 up'),
        ({"RANK": "3", "WORLD_SIZE": "3"}, "rank 3 of world 3 (rank from RANK, world from WORLD_SIZE)"),
    ],
)
def test_rank_and_world_are_what_the_launcher_says(
    environment: dict[str, str], expected: str, runtime_dir: Path
) -> None:
    said = run(
        """
        from tessera._launch import launch
        try:
            print(*launch(None, None))
        except tessera.InvalidArgumentError as error:
            print(error)
        """,
        runtime_dir,
        **dict.fromkeys(("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"), "") | environment,
    )
    assert expected in said


@pytest.mark.parametrize(
    ("environment", "given", "expected"),
    [
        ({}, "None, None", "1 2"),
        ({"SLURM_NTASKS": "9"}, "None, None", "1 2"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "None, None", "0 3"),
        ({"TESSERA_RANK": "0"}, "None, None", "0 2"),
        ({}, "0, None", "0 2"),
        ({}, "2, None", "rank 2 of world 2 (rank from the arguments, world from torch's default process group)"),
    ],
)
def test_torchs_process_group_is_asked_last(
    environment: dict[str, str], given: str, expected: str, runtime_dir: Path
) -> None:
    pytest.importorskip("torch")
    said = run(
        f"""
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from tessera._launch import launch
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        try:
            print(*launch({given}))
        except tessera.InvalidArgumentError as error:
            print(error)
        """,
        runtime_dir,
        **dict.fromkeys(("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"), "") | environment,
    )
    assert expected in said


def test_signals_are_delivered_while_a_wait_is_short(runtime_dir: Path) -> None:
    """A handler that does not raise does not end the wait."""
    said = run(
        """
        heard = []
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        try:
            connect("trainer", "inference", timeout=1)
        except tessera.DeadlineExceededError:
            print(heard)
        """,
        runtime_dir,
    )
    assert said.strip() == "[1]"
