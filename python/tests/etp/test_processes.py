"""Processes around a sharded model: models that are built again and again, data loaders that fork, torchrun's
restarts."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch
from etp_models import Run, adamw, built, plainly
from tessera import etp
from test_torchrun import outputs, script
from torch.utils.data import DataLoader
from torch_ranks import launch


def _trained(run: Run) -> dict[str, bytes]:
    model = run.sharded(built())
    run.train(model, adamw(model.parameters()))
    return run.weights(model)


# --- built again


def _held() -> dict[str, int]:
    """What a process can leak."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": sum(1 for line in maps if line.split()[1][3] == "s"),
    }


def _again_and_again(rank: int) -> list[dict[str, int]]:
    found = []
    with etp.init_group(timeout=30) as group:
        for unsharded in (False, False, True, False, True, False):
            model = etp.shard_module_(built(), group, formats={"emb.weight": "nvfp4"})
            run = Run(2, rank, group)
            run.train(model, adamw(model.parameters()), steps=2)
            if unsharded:
                etp.unshard_(model)
            torch.distributed.barrier()  # a group's end is told to its other ranks, which must not wait for them
            del model
            gc.collect()
            torch.distributed.barrier()
            found.append(_held())
    gc.collect()
    return found


def test_models_that_are_built_again_leave_nothing() -> None:
    for first, *others in launch(_again_and_again, 2):  # the last model's group is kept, unless it has been unsharded
        assert all(each[what] <= first[what] for each in others for what in first), (first, others)


# --- data loaders


class Numbers(torch.utils.data.Dataset[Any]):
    """In forked workers, which have the sharded model, and hold its memory no longer than they live."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.model.up.weight.etp.name == "up.weight"
        gc.collect()
        return torch.tensor([index, os.getpid()])


def _loading(rank: int) -> Any:
    with etp.init_group(timeout=30) as group:
        run = Run(2, rank, group)
        model = run.sharded(built())
        optimizer = adamw(model.parameters())
        seen = []
        for _ in range(3):
            loader = DataLoader(Numbers(model), num_workers=2, multiprocessing_context="fork")
            for index, worker in (each[0].tolist() for each in loader):
                assert worker != os.getpid()
                seen.append(index)
            run.train(model, optimizer, steps=1)  # while workers may be ending
        return seen, run.weights(model)


def test_forked_data_loaders_harm_nothing() -> None:
    for seen, weights in launch(_loading, 2):
        assert seen == list(range(6)) * 3
        assert weights == plainly(_trained, 2)


TOUCHING = """
import os
import torch
import tessera
from tessera import etp

torch.manual_seed(0)
model = etp.shard_module_(torch.nn.Linear(64, 64), etp.init_group(), formats={"weight": "nvfp4"})
model(torch.ones(2, 64)).sum().backward()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    said = "nothing"
    try:
        model(torch.ones(2, 64)).sum().backward()
    except tessera.Error as error:
        said = str(error)
    os.write(writer, said.encode())
    os._exit(0)  # as workers of data loaders end
os.close(writer)
print(os.read(reader, 1000).decode(), os.waitpid(child, 0)[1])
child = os.fork()
if child == 0:
    raise SystemExit(5)  # through the end of the interpreter
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
torch.optim.AdamW(model.parameters()).step()
model(torch.ones(2, 64)).sum().backward()
print("went on")
"""


def test_a_forked_child_that_uses_a_model_is_told_so(tmp_path: Path, runtime_dir: Path) -> None:
    (said,) = outputs(tmp_path, [script(TOUCHING, tmp_path, "touching")])
    assert "went on" in said
    assert said.startswith("sharded weights are used in a forked child") and said.splitlines()[0].endswith(" 0")


LEAVING = """
import os
import sys
import torch
from tessera import etp

torch.distributed.init_process_group("gloo")
group = etp.init_group(timeout=30)
torch.manual_seed(0)
model = etp.shard_module_(torch.nn.Linear(64, 64), group)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
for each in vars(torch.distributed.nn.functional).values():
    for value in getattr(each, "__defaults__", None) or ():
        assert not isinstance(value, torch.distributed.ProcessGroup)
child = os.fork()
if child == 0:
    sys.exit(5)  # which waits for threads of Gloo, if they are still there
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
model(torch.ones(2, 64)).sum().backward()
sys.stdout.write("went on\\n")
"""


def test_nothing_keeps_a_process_group_that_is_destroyed(tmp_path: Path, runtime_dir: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (said,) = outputs(tmp_path, [*torchrun, script(LEAVING, tmp_path, "leaving")])
    assert said.count("went on") == 2


# --- restarts

TRAINER = f"""
import os
import signal
import sys

sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]!r}
import torch
from etp_models import Run, adamw, built
from tessera import etp

torch.set_num_threads(1)
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with etp.init_group(store="auto", timeout=60) as group:
    run = Run(2, rank, group)
    model = run.sharded(built())
    optimizer = adamw(model.parameters())
    run.train(model, optimizer, steps=2)
    if restart == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.train(model, optimizer, steps=1)
    if rank == 0:
        torch.save(run.weights(model), sys.argv[1])
    else:
        run.weights(model)
sys.stdout.write(f"rank {{rank}} ended in life {{restart}}\\n")  # at once: both ranks write to one pipe
"""


def test_a_job_that_torchrun_restarts_trains_from_the_start(tmp_path: Path, runtime_dir: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    weights = tmp_path / "weights"
    (said,) = outputs(tmp_path, [*torchrun, script(TRAINER, tmp_path, "trainer"), str(weights)])
    assert "rank 0 ended in life 1" in said and "rank 1 ended in life 1" in said
    assert torch.load(weights) == plainly(_trained, 2)
