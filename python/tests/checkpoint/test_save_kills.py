"""Whatever happens while a checkpoint is saved, the folder holds the last one or the new one, whole."""

from __future__ import annotations

import ast
import errno
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from killing import die, on_ranks, stepping
from safetensors.torch import load_file
from saved_files import bytes_of, index_of, optimizer_index, require_nothing_but_elements, tensors_of
from tessera import checkpoint
from tessera.checkpoint import _load

State = dict[str, bytes]


def _trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Weights and states that differ with `steps`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return model, optimizer


def _saved(folder: pathlib.Path) -> State:
    """By safetensors' own reader."""
    return bytes_of(tensors_of(folder) | tensors_of(folder, optimizer_index(folder)))


def _save(steps: int, folder: pathlib.Path, at: int, act: Callable[[], None]) -> str:
    model, optimizer = _trained(steps)
    with stepping(at, act) as moments:
        checkpoint.save(model, optimizer, folder, metadata={"steps": str(steps)})
    return "\n".join(moments.names)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """After 0, 1, 2 and 3 steps."""
    found = []
    for steps in range(4):
        folder = tmp_path_factory.mktemp("states")
        checkpoint.save(*_trained(steps), folder)
        found.append(_saved(folder))
    return found


def _old(folder: pathlib.Path, size: int) -> list[list[str]]:
    """Saves there, twice; returns the steps of the second save, by rank."""
    on_ranks(size, lambda rank: _save(0, folder, -1, die))
    return [str(each).split("\n") for each in on_ranks(size, lambda rank: _save(1, folder, -1, die))]


def _nothing_left(folder: pathlib.Path) -> None:
    names = set(index_of(folder)["weight_map"].values()) | set(optimizer_index(folder)["weight_map"].values())
    names |= {"model.safetensors.index.json", index_of(folder)["metadata"]["tessera"]["optimizer"]}
    assert set(os.listdir(folder)) == names


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_that_is_killed_at_any_step(tmp_path: pathlib.Path, states: list[State], size: int) -> None:
    steps = _old(tmp_path / "old", size)
    assert set(steps[0]) >= {"makedirs", "open", "create", "write_slice", "sync", "rename", "fsync", "unlink"}
    seen = set()
    for victim, at in [(rank, at) for rank in range(size) for at in range(len(steps[rank]))]:
        folder = shutil.copytree(tmp_path / "old", tmp_path / f"{victim}-{at}")
        said = on_ranks(
            size, lambda rank, to=folder, at=at, victim=victim: _save(2, to, at if rank == victim else -1, die)
        )
        assert said[victim] == signal.SIGKILL
        found = states.index(_saved(folder))
        assert found in (1, 2)
        seen.add(found)
        assert checkpoint.load(*_trained(0), folder).metadata["steps"] == str(found)
        checkpoint.save(*_trained(3), folder)  # removes what has been left
        assert _saved(folder) == states[3]
        _nothing_left(folder)
    assert seen == {1, 2}


def test_a_first_save_that_is_killed_leaves_none_or_a_whole_one(tmp_path: pathlib.Path, states: list[State]) -> None:
    steps = on_ranks(1, lambda rank: _save(2, tmp_path / "first", -1, die))
    seen = set()
    for at in range(len(str(steps[0]).split("\n"))):
        folder = tmp_path / str(at)
        assert on_ranks(1, lambda rank, to=folder, at=at: _save(2, to, at, die)) == [signal.SIGKILL]
        whole = (folder / "model.safetensors.index.json").exists()
        seen.add(whole)
        if whole:
            assert _saved(folder) == states[2]
        else:  # nothing that a reader takes for a checkpoint, but complete data files
            for path in folder.glob("*.safetensors") if folder.exists() else ():
                assert bytes_of(load_file(path)).items() <= states[2].items()
        checkpoint.save(*_trained(3), folder)
        assert _saved(folder) == states[3]
        _nothing_left(folder)
    assert seen == {True, False}


def _fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_that_fails_at_any_step_fails_all(tmp_path: pathlib.Path, states: list[State], size: int) -> None:
    steps = _old(tmp_path / "old", size)
    files = set(os.listdir(tmp_path / "old"))
    for victim, at in [(rank, at) for rank in range(size) for at in range(len(steps[rank]))]:
        folder = shutil.copytree(tmp_path / "old", tmp_path / f"{victim}-{at}")
        said = on_ranks(
            size, lambda rank, to=folder, at=at, victim=victim: _save(2, to, at if rank == victim else -1, _fail)
        )
        name, later = steps[victim][at], steps[victim][at + 1 :]
        if "rename" in steps[victim][at:] or "sync" in steps[victim][at:]:  # nothing has been replaced
            for rank, each in enumerate(said):
                assert str(each).startswith("ResourceExhaustedError: "), said
                assert (f"rank {victim}: " in str(each)) == (rank != victim)
            assert _saved(folder) == states[1], (name, at, steps[victim])
            assert set(os.listdir(folder)) == files, name
        else:
            failed = ["ResourceExhaustedError" in str(each) for each in said]
            assert failed == [name == "fsync"] * size, (name, later)  # what cannot be removed is left to the next
            assert _saved(folder) == states[2]


def test_a_file_size_limit_leaves_the_old_one(tmp_path: pathlib.Path, states: list[State]) -> None:
    checkpoint.save(*_trained(1), tmp_path / "saved")
    files = set(os.listdir(tmp_path / "saved"))

    def limited(rank: int) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        checkpoint.save(*_trained(2), tmp_path / "saved")
        return "saved"

    said = on_ranks(2, limited)
    assert all(str(each).startswith("ResourceExhaustedError") and "ulimit -f" in str(each) for each in said), said
    assert _saved(tmp_path / "saved") == states[1]
    assert set(os.listdir(tmp_path / "saved")) == files


def test_a_second_save_into_a_folder_is_refused_while_one_is_under_way(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "saved"

    def twice(rank: int) -> str:
        said = []

        def other() -> None:
            child = os.fork()  # another job
            if child == 0:
                try:
                    checkpoint.save(*_trained(1), folder)
                except BaseException as error:
                    os._exit(7 if "another save() into this folder is under way" in str(error) else 1)
                os._exit(0)
            said.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        _save(2, folder, 6, other)
        return str(said)

    assert on_ranks(1, twice) == ["[7]"]
    assert require_nothing_but_elements(folder) > 0


def test_a_load_while_another_job_saves_has_the_old_one_or_the_new_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    checkpoint.save(*_trained(1), folder)
    opened = _load.open_reader

    def late(path: str) -> Any:
        """What happens to one who has read the old index."""
        monkeypatch.setattr(_load, "open_reader", opened)
        old = index_of(folder)["weight_map"]["0.weight"]
        checkpoint.save(*_trained(2), folder, metadata={"steps": "2"})
        return opened(str(folder / old))

    monkeypatch.setattr(_load, "open_reader", late)
    model, optimizer = _trained(0)
    assert checkpoint.load(model, optimizer, folder).metadata["steps"] == "2"
    assert bytes_of(model.state_dict()) == bytes_of(_trained(2)[0].state_dict())


def test_a_file_that_ends_while_it_is_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "saved"
    checkpoint.save(*_trained(1), folder)
    opened = _load.open_reader

    def shortened(path: str) -> Any:
        reader = opened(path)
        (name,) = set(index_of(folder)["weight_map"].values())
        os.truncate(folder / name, (folder / name).stat().st_size - 8)
        return reader

    monkeypatch.setattr(_load, "open_reader", shortened)
    with pytest.raises(tessera.InvalidArgumentError, match="truncated; the model holds only a part of the checkpoint"):
        checkpoint.load(_trained(0)[0], None, folder)


def test_a_full_disk_leaves_the_old_one(tmp_path: pathlib.Path, states: list[State]) -> None:
    """A tmpfs of its own, in a process with mounts of its own."""
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import pathlib, test_save_kills as kills, torch, tessera\n"
        "from tessera import checkpoint\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "checkpoint.save(*kills._trained(1), folder)\n"
        "files = sorted(path.name for path in folder.iterdir())\n"
        "try:\n"
        "    checkpoint.save(torch.nn.Linear(1000, 1000), None, folder)\n"
        "except tessera.ResourceExhaustedError as error:\n"
        "    assert 'cannot write 4' in str(error) and 'bytes free' in str(error), error\n"
        "    assert sorted(path.name for path in folder.iterdir()) == files\n"
        "    print(repr(kills._saved(folder)))\n"
    )
    mounted = f'mount -t tmpfs -o size=2m none {tmp_path} && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mounted, sys.executable, script]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if run.returncode != 0 and ("unshare" in run.stderr or "mount" in run.stderr):
        pytest.skip("no right to mount a tmpfs")
    assert run.returncode == 0, run.stderr
    assert ast.literal_eval(run.stdout) == states[1]
