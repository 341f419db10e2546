"""Jobs started and restarted by torchrun; data loaders that fork beside a bus."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
LIMIT = 400.0

TRAINER = """
import os
import signal
import sys
import torch
import tessera

rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
held = torch.zeros(6, 3)
with tessera.connect("weights", role="trainer", peer="inference", timeout=60) as bus:
    assert bus.rank == rank and bus.world == 2
    batch = bus.register({"w": (held, "2:S0", (12, 3))})
    for step in (range(1, 6) if restart == 0 else range(6, 11)):
        held.fill_(step)
        batch.send(version=step, timeout=60)
        if restart == 0 and step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
print("rank", rank, "ended", flush=True)
"""

WITH_GROUPS = """
import os
import torch
import torch.distributed as dist
import tessera

dist.init_process_group("gloo")
groups = dict(dist.distributed_c10d._world.pg_map)
held = torch.full((6, 3), 10.0)
with tessera.connect("weights", role="trainer", peer="inference", timeout=60) as bus:
    bus.register({"w": (held, "2:S0", (12, 3))}).send(version=10, timeout=60)
assert dist.distributed_c10d._world.pg_map == groups
summed = torch.ones(1)
dist.all_reduce(summed)
assert summed == 2
groups.clear()  # or gloo's threads outlive destroy_process_group(), and may meet an interpreter that ends
dist.destroy_process_group()
"""

SERVER = """
import torch
import tessera

held = torch.zeros(12, 3)
with tessera.connect("weights", role="inference", peer="trainer", rank=0, world=1, timeout=60) as bus:
    batch = bus.register({"w": held})
    version, lost = 0, 0
    while version < 10:
        try:
            version = batch.recv(timeout=60)
            assert (held == version).all(), (version, held)
        except tessera.PeerLostError as error:
            lost += 1
            assert lost < 5, error
    print("lost", lost, flush=True)
"""

LOADER = """
import os
import torch
import tessera
from torch.utils.data import DataLoader, TensorDataset


class Watching(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):  # in a forked worker
        try:
            batch.send()
        except tessera.InvalidArgumentError as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("a forked child has sent")
        assert not opened & descriptors(), opened & descriptors()
        return torch.tensor([index])


def descriptors():
    return {(fd, what_is_open(fd)) for fd in os.listdir("/proc/self/fd")}


def what_is_open(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # closed by now: a thread of the loader's hands tensors over
        return ""


held = torch.zeros(12, 3)
before = descriptors()
with tessera.connect("weights", role="trainer", peer="inference", rank=0, world=1, timeout=60) as bus:
    batch = bus.register({"w": held})
    for version in (1, 2, 10):
        held.fill_(version)
        batch.send(version=version, timeout=60)
        # Pipes are of the loader before, whose threads may still be closing them; the bus opens none.
        opened = {(fd, what) for fd, what in descriptors() - before if not what.startswith("pipe:")}
        assert any("memfd" in what or "socket" in what for _, what in opened), opened
        seen = sorted(int(each) for each in DataLoader(Watching(), num_workers=2, multiprocessing_context="fork"))
        assert seen == list(range(8))
"""


def outputs(folder: Path, *commands: list[str]) -> list[str]:
    """The output of each command, once all have ended well; the first that fails ends the others."""
    environment = {**os.environ, "TESSERA_NAMESPACE": folder.name, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    deadline = time.monotonic() + LIMIT
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command], env=environment, stdout=output, stderr=subprocess.STDOUT
                    )
                )
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        ends = [process.returncode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [log.read_text() for log in logs]
    told = "\n".join(f"--- {end}: {command}\n{text}" for end, command, text in zip(ends, commands, said, strict=True))
    assert ends == [0] * len(processes), told
    return said


def script(text: str, folder: Path, name: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_job_that_torchrun_restarts_registers_again(tmp_path: Path, runtime_dir: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    trainer, server = outputs(
        tmp_path, [*torchrun, script(TRAINER, tmp_path, "trainer")], [script(SERVER, tmp_path, "server")]
    )
    assert trainer.count("rank 1 ended") == 1  # rank 0 may have, before it was started again
    assert "lost 0" not in server


def test_process_groups_are_left_alone(tmp_path: Path, runtime_dir: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outputs(tmp_path, [*torchrun, script(WITH_GROUPS, tmp_path, "trainer")], [script(SERVER, tmp_path, "server")])


def test_forked_data_loaders_harm_nothing(tmp_path: Path, runtime_dir: Path) -> None:
    outputs(tmp_path, [script(LOADER, tmp_path, "loader")], [script(SERVER, tmp_path, "server")])
