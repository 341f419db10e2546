"""Checkpoints that are written while the training goes on hold what was there when they were begun."""

from __future__ import annotations

import copy
import functools
import pathlib
import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from etp_generic_scenarios import Experts
from etp_models import Run, adamw, as_bytes, built
from tessera import etp
from torch_ranks import launch

pytestmark = pytest.mark.skipif(not hasattr(dcp.staging, "DefaultStager"), reason="torch stages in another way")


class _Held(dcp.DefaultSavePlanner):
    """Nothing is written before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.reached.set()
        assert self.go_on.wait(60)
        return super().resolve_data(write_item)


def _made(run: Run, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = run.sharded(built(Experts, seed=seed), min_elements=256)
    return model, adamw(model.parameters())


def _bytes_of(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    states = etp.optimizer_state_dict(optimizer, full=True)["state"]
    return run.weights(model), [as_bytes(each["exp_avg"]) for each in states.values()]


def _saved(rank: int, folder: pathlib.Path) -> list[Any]:
    found = []
    with etp.init_group(timeout=30) as group:
        run = Run(2, rank, group)
        model, optimizer = _made(run, 7)
        for name in ("staged", "blocking"):
            run.train(model, optimizer)
            expected = _bytes_of(run, model, optimizer)
            state = {"model": model.state_dict(), "optimizer": etp.optimizer_state_dict(optimizer)}
            planner = _Held()
            options: dict[str, Any] = {"checkpoint_id": folder / name}
            if name == "blocking":  # which stages by itself
                options = {"storage_writer": dcp.FileSystemWriter(folder / name)}
            future = dcp.async_save(state, planner=planner, **options)
            assert planner.reached.wait(60)
            run.train(model, optimizer)
            assert _bytes_of(run, model, optimizer) != expected
            assert not future.done()
            planner.go_on.set()
            future.result(60)
            found.append(expected)
    return found


def _loaded(rank: int, size: int, folder: pathlib.Path) -> list[Any]:
    found = []
    with etp.init_group(timeout=30) as group:
        run = Run(size, rank, group)
        for name in ("staged", "blocking"):
            model, optimizer = _made(run, 8)
            state = {"model": model.state_dict(), "optimizer": etp.optimizer_state_dict(optimizer, init=True)}
            dcp.load(state, checkpoint_id=folder / name)
            model.load_state_dict(state["model"])
            etp.load_optimizer_state_dict(optimizer, state["optimizer"])
            found.append(_bytes_of(run, model, optimizer))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[Any]]:
    folder = tmp_path_factory.mktemp("saved")
    first, second = launch(functools.partial(_saved, folder=folder), 2)
    assert first == second
    return folder, first


@pytest.mark.parametrize("size", [1, 4])
def test_what_was_saved_by_2_ranks_while_they_trained(saved: tuple[pathlib.Path, list[Any]], size: int) -> None:
    folder, expected = saved
    assert launch(functools.partial(_loaded, size=size, folder=folder), size) == [expected] * size


def _states() -> tuple[Any, Any]:
    model = etp.shard_module_(built(Experts), etp.init_group(), formats={".*": "bf16"}, min_elements=256)
    return model, model.state_dict()


def test_a_staged_state_is_a_copy() -> None:
    model, state = _states()
    staged = dcp.staging.BlockingAsyncStager().stage(state)
    weight = model.emb.weight
    before = as_bytes(etp.whole(weight))
    with torch.no_grad():
        weight.zero_()
    assert type(staged["emb.weight"]) is torch.Tensor
    assert as_bytes(staged["emb.weight"]) == before != as_bytes(etp.whole(weight))


def test_a_copied_state_is_apart_and_the_models_own_is_a_view_of_it() -> None:
    model, state = _states()
    mine = copy.deepcopy(state)
    before = etp.whole(model.emb.weight).detach().clone()
    mine["emb.weight"].mul_(2)
    assert torch.equal(etp.whole(model.emb.weight), before)
    state["emb.weight"].copy_(mine["emb.weight"])  # as in plain torch, this writes the weight
    assert torch.equal(etp.whole(model.emb.weight), before * 2)
    assert torch.zeros_like(mine["emb.weight"], dtype=torch.float64).dtype is torch.float64
    assert mine["emb.weight"].new_empty(3).shape == (3,)
