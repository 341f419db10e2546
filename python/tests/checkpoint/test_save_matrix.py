"""Rows of every count, saved on 1 to 4 ranks and loaded on 1 to 4: equal bytes, and none in a file but theirs."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from etp_models import Run, as_bytes
from saved_files import bytes_of, index_of, require_nothing_but_elements, tensors_of
from tessera import checkpoint, etp
from torch_ranks import launch

MOST = 4
# N - 1, N and N + 1 for 1 to 4 ranks are among them; of 17 and fewer rows, padding spans several ranks.
ROWS = (1, 2, 3, 4, 5, 15, 16, 17, 61, 30522)
TYPES = (torch.float32, torch.bfloat16)


class Weights(torch.nn.Module):
    """A matrix for each count of rows, experts whose rows are cut within an expert, and what is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        for number, rows in enumerate(ROWS):
            self.register_parameter(f"rows_{rows}", _random(rows, 3, dtype=TYPES[number % 2]))
        self.experts = _random(3, 7, 5)
        self.bias = _random(9, dtype=torch.float16)
        self.scalar = _random()
        self.none = _random(0, 4)
        self.register_buffer("counts", torch.randint(0, 100, (5,)))


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape).to(dtype))


def _built(seed: int) -> Weights:
    torch.manual_seed(seed)
    return Weights()


def _sharded(run: Run, seed: int) -> Any:
    return run.sharded(_built(seed), min_elements=2)


def _weights(run: Run, model: torch.nn.Module) -> dict[str, bytes]:
    return dict(sorted({**run.weights(model), "counts": as_bytes(model.get_buffer("counts"))}.items()))


def _each_size(rank: int, function: Callable[[Run], Any]) -> dict[int, Any]:
    """function(run) on groups of 1 to MOST of the ranks, one after another."""
    found = {}
    for size in range(1, MOST + 1):
        members = torch.distributed.new_group(range(size))
        if rank < size:
            with etp.init_group(members, timeout=60) as group:
                found[size] = function(Run(size, rank, group))
        torch.distributed.barrier()
    return found


def _save_and_load(rank: int, folder: pathlib.Path) -> dict[int, Any]:
    def save(run: Run) -> None:
        checkpoint.save(_sharded(run, 1), None, folder / str(run.size), group=run.group)

    def load(run: Run) -> Any:
        model = _sharded(run, 2)
        found = {}
        for size in range(1, MOST + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.counts.zero_()
            checkpoint.load(model, None, folder / str(size), group=run.group)
            found[size] = _weights(run, model)
        return found

    _each_size(rank, save)
    return _each_size(rank, load)


@pytest.fixture(scope="module")
def expected() -> dict[str, bytes]:
    return _weights(Run(1), _built(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[dict[int, Any]]]:
    folder = tmp_path_factory.mktemp("matrix")
    return folder, launch(functools.partial(_save_and_load, folder=folder), MOST)


@pytest.mark.parametrize("size", range(1, MOST + 1))
def test_files_hold_the_logical_tensors_and_nothing_else(saved: Any, expected: dict[str, bytes], size: int) -> None:
    folder = saved[0] / str(size)
    assert bytes_of(tensors_of(folder)) == expected
    total = sum(map(len, expected.values()))
    assert require_nothing_but_elements(folder) == total == index_of(folder)["metadata"]["total_size"]
    assert sorted(path.name for path in folder.iterdir()) == [
        *[f"model-1-{file + 1:05}-of-{size:05}.safetensors" for file in range(size)],
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("to", range(1, MOST + 1))
@pytest.mark.parametrize("size", range(1, MOST + 1))
def test_any_number_of_ranks_loads_what_any_other_has_saved(
    saved: Any, expected: dict[str, bytes], size: int, to: int
) -> None:
    assert [found[to][size] for found in saved[1][:to]] == [expected] * to
