"""One checkpoint of torch.distributed.checkpoint of layers that a tp_group cuts, read by any other cut and by plain
layers."""

from __future__ import annotations

import functools
import io
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from etp_models import HIDDEN, WIDTH, WORDS, Run, adamw, as_bytes, batch, built
from tessera import checkpoint, etp
from torch_ranks import launch

GRIDS = ((2, 2), (2, 1), (1, 2), (4, 1))  # ranks of tensor parallelism, and of ETP
SAVES = ((2, 2), (2, 1))
Bytes = dict[str, bytes]


class Language(torch.nn.Module):
    """With a vocabulary that does not divide, a gate, and a bias that is cut."""

    def __init__(self, tp_group: Any = None, group: etp.Group | None = None) -> None:
        super().__init__()
        options = {"tp_group": tp_group, "etp_group": group}
        self.emb = etp.Embedding(WORDS, WIDTH, parallel_mode="vocab", **options)
        self.mlp = etp.LayerNormMLP(WIDTH, HIDDEN, activation="swiglu", set_parallel_mode=True, **options)
        self.head = etp.Linear(WIDTH, WORDS, parallel_mode="column", **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(self.emb(ids)))


def _loss(model: torch.nn.Module, number: int) -> torch.Tensor:
    return model(batch(number)[0]).sin().sum() / 100


def _part(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """By the rules of Megatron; words that are left over go to the first ranks."""
    if name in ("emb.weight", "head.weight", "head.bias"):
        return whole.tensor_split(size)[rank]
    if name == "mlp.fc2_weight":
        return whole.chunk(size, 1)[rank]
    if name.startswith("mlp.fc1"):
        return torch.cat([each.chunk(size)[rank] for each in whole.chunk(2)])
    return whole


@contextmanager
def _on_grid(rank: int, tp: int, size: int) -> Iterator[tuple[Run, Any, etp.Group | None]]:
    """A step has two micro-batches."""
    tp_groups = [torch.distributed.new_group(list(range(tp * i, tp * (i + 1)))) for i in range(size)]
    etp_groups = [torch.distributed.new_group(list(range(i, tp * size, tp))) for i in range(tp)]
    if size == 1:
        yield Run(2), tp_groups[0], None
        return
    with etp.init_group(etp_groups[rank % tp], timeout=30) as group:
        yield Run(2, rank // tp, group), tp_groups[rank // tp], group


def _state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": etp.optimizer_state_dict(optimizer, **options)}


def _saved(rank: int, tp: int, size: int, folder: pathlib.Path) -> dict[str, Any]:
    """What two steps give is saved; whole tensors of it, and this rank's parts after another step."""
    with _on_grid(rank, tp, size) as (run, tp_group, group):
        model = built(functools.partial(Language, tp_group, group))
        optimizer = adamw(model.parameters())
        run.train(model, optimizer, steps=2, loss=_loss)
        state = _state_of(model, optimizer)
        dcp.save(state, checkpoint_id=folder / "dcp")
        checkpoint.save(model, optimizer, folder / "tessera")
        shapes = {name: each.shape for name, each in state["model"].items()}
        assert shapes == {name: each.shape for name, each in Language().state_dict().items()}
        found: dict[str, Any] = {"weights": _full(state["model"])}
        whole = etp.optimizer_state_dict(optimizer, full=True)["state"]
        found["states"] = [{key: as_bytes(each[key]) for key in sorted(each)} for each in whole.values()]
        before = run.weights(model)
        model.load_state_dict(state["model"])
        with etp.summon(model):
            stream = io.BytesIO()
            torch.save(model.state_dict(), stream)  # this rank's parts
        stream.seek(0)
        model.load_state_dict(torch.load(stream))
        assert run.weights(model) == before
        run.train(model, optimizer, steps=1, loss=_loss)
        found["after"] = run.weights(model)
        return found


def _full(state: dict[str, Any]) -> Bytes:
    return {name: as_bytes(etp.whole(each)) for name, each in state.items()}


def _loaded(rank: int, tp: int, size: int, folder: pathlib.Path) -> tuple[Bytes, Bytes]:
    """Parts of the weights, and those after a step."""
    with _on_grid(rank, tp, size) as (run, tp_group, group):
        model = built(functools.partial(Language, tp_group, group), seed=9)
        optimizer = adamw(model.parameters())
        state = _state_of(model, optimizer, init=True)
        dcp.load(state, checkpoint_id=folder / "dcp")
        model.load_state_dict(state["model"])
        etp.load_optimizer_state_dict(optimizer, state["optimizer"])
        weights = run.weights(model)
        run.done = 2
        run.train(model, optimizer, steps=1, loss=_loss)
        return weights, run.weights(model)


def _plain(folder: pathlib.Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    model = built(Language, seed=9)
    optimizer = adamw(model.parameters())
    Run(2).train(model, optimizer, steps=1, loss=_loss)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp")
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


@pytest.mark.parametrize("grid", SAVES)
def test_it_is_whole_whatever_cut_it(tmp_path: pathlib.Path, grid: tuple[int, int]) -> None:
    saved = launch(functools.partial(_saved, tp=grid[0], size=grid[1], folder=tmp_path), grid[0] * grid[1])
    model, optimizer = _plain(tmp_path)
    weights = {name: each.detach() for name, each in model.named_parameters()}
    states = [{key: as_bytes(each[key]) for key in sorted(each)} for each in optimizer.state_dict()["state"].values()]
    for each in saved:
        assert each["weights"] == {name: as_bytes(value) for name, value in weights.items()}
        assert each["states"] == states
    other = built(Language, seed=9)
    checkpoint.load(other, None, tmp_path / "tessera")
    assert {name: as_bytes(each) for name, each in other.named_parameters()} == saved[0]["weights"]
    for tp, size in GRIDS:
        found = launch(functools.partial(_loaded, tp=tp, size=size, folder=tmp_path), tp * size)
        for rank, (before, after) in enumerate(found):
            assert before == {name: as_bytes(_part(name, each, rank % tp, tp)) for name, each in weights.items()}
            if tp == grid[0]:  # other sums
                assert after == saved[rank % tp]["after"]


def _of_one_layer(rank: int) -> list[Any]:
    torch.manual_seed(0)
    whole = torch.nn.Linear(6, 4)
    layer = etp.Linear(6, 4, parallel_mode="row", tp_group=torch.distributed.group.WORLD)
    found = []
    for weight in (whole.weight.detach(), whole.weight.detach().chunk(2, 1)[rank]):  # all of it, or the part
        torch.nn.init.zeros_(layer.weight)
        layer.load_state_dict({"weight": weight, "bias": whole.bias.detach()})
        found.append(torch.equal(layer.weight, whole.weight.chunk(2, 1)[rank]))
    state = layer.state_dict()
    found += [torch.equal(etp.whole(state["weight"]), whole.weight), tuple(state["weight"].shape), type(state["bias"])]
    return found


def test_whole_tensors_and_parts_are_loaded() -> None:
    assert launch(_of_one_layer, 2) == [[True, True, True, (4, 6), torch.Tensor]] * 2
