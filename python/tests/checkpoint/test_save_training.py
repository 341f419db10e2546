"""Training goes on from a checkpoint, on other ranks, with the bytes of one process that never stopped."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from etp_generic_scenarios import Experts
from etp_models import Run, Tied, adamw, built
from saved_files import bytes_of, optimizer_index, require_nothing_but_elements, tensors_of
from tessera import checkpoint, etp
from torch.distributed.device_mesh import init_device_mesh
from torch_ranks import launch

GLOBAL = 4  # micro-batches of a step, whatever number of ranks does them
KINDS: dict[str, Any] = {"tied": Tied, "experts": Experts}


def _train(run: Run, model: Any, optimizer: torch.optim.Optimizer, first: int) -> None:
    """Two steps, after `first` others."""
    accumulation = GLOBAL // run.size
    run.done = first * accumulation
    run.train(model, optimizer, 2, accumulation)


def _stage(run: Run, kind: Any, first: int, folder: pathlib.Path) -> None:
    """Loads what was saved after `first` steps, makes two, and saves."""
    model = run.sharded(
        built(kind, seed=7 if first == 0 else 8), **({} if run.group is None else {"min_elements": 256})
    )
    optimizer = adamw(model.parameters(), amsgrad=True)
    group = run.group if run.dp is None else None
    if first > 0:
        loaded = checkpoint.load(model, optimizer, folder / str(first), group=group)
        assert loaded.metadata["steps"] == str(first)
    _train(run, model, optimizer, first)
    checkpoint.save(model, optimizer, folder / str(first + 2), metadata={"steps": str(first + 2)}, group=group)


def _on_ranks(rank: int, folder: pathlib.Path) -> None:
    """Two ranks, all four, and two groups of two; each goes on where the one before has saved."""
    pair = torch.distributed.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "etp"))
    for name, kind in KINDS.items():
        if rank < 2:
            with etp.init_group(pair, timeout=60) as group:
                _stage(Run(2, rank, group), kind, 0, folder / name)
        torch.distributed.barrier()
        with etp.init_group(timeout=60) as group:
            _stage(Run(4, rank, group), kind, 2, folder / name)
        with etp.init_group(mesh=mesh["etp"], timeout=60) as group, etp.init_group(mesh=mesh["dp"], name="dp") as dp:
            _stage(Run(4, rank, group, dp=dp), kind, 4, folder / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """After 2, 4 and 6 steps on ranks, and 8 in plain torch."""
    folder = tmp_path_factory.mktemp("training")
    launch(functools.partial(_on_ranks, folder=folder), 4)
    torch.set_num_threads(1)
    for name, kind in KINDS.items():
        _stage(Run(GLOBAL), kind, 6, folder / name)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on(saved: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    torch.set_num_threads(1)
    run, model = Run(GLOBAL), built(KINDS[kind], seed=7)
    optimizer = adamw(model.parameters(), amsgrad=True)
    for first in range(0, 8, 2):
        _train(run, model, optimizer, first)
        folder = saved / kind / str(first + 2)
        expected = tmp_path / str(first + 2)
        checkpoint.save(model, optimizer, expected)
        for index in (lambda each: None, optimizer_index):
            assert bytes_of(tensors_of(folder, index(folder))) == bytes_of(tensors_of(expected, index(expected)))
        assert require_nothing_but_elements(folder) == require_nothing_but_elements(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_the_plain_optimizer(saved: pathlib.Path, kind: str) -> None:
    """By torch's own state_dict(), under the names that are documented."""
    torch.set_num_threads(1)
    run, model = Run(GLOBAL), built(KINDS[kind], seed=7)
    optimizer = adamw(model.parameters(), amsgrad=True)
    for first in range(0, 4, 2):
        _train(run, model, optimizer, first)
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()["state"]
    flat = {f"{names[number]}.{key}": value for number, each in state.items() for key, value in each.items()}
    folder = saved / kind / "4"
    assert bytes_of(tensors_of(folder, optimizer_index(folder))) == bytes_of(flat)
