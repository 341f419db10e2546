"""States of models and optimisers: training goes on, on other numbers of ranks and in plain torch, with equal bytes."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
import torch.distributed.checkpoint as dcp
from etp_generic_scenarios import Experts
from etp_models import HIDDEN, WIDTH, WORDS, Run, Tied, adamw, as_bytes, built
from tessera import etp
from tessera.etp.chunks import Cut, boxes_of, pieces_of, shard_at
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch_ranks import launch

GLOBAL = 4  # micro-batches of a step, whatever number of ranks does them
Kind = Callable[[], torch.nn.Module]


def _train(run: Run, model: Any, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    accumulation = GLOBAL // run.size
    run.done = first * accumulation
    run.train(model, optimizer, steps, accumulation)


def _plain(kind: Kind, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    model = built(kind)
    optimizer = adamw(model.parameters())
    _train(Run(GLOBAL), model, optimizer, 0, steps)
    return model, optimizer


def _bytes_of(model: Any, state: dict[str, Any]) -> Any:
    weights = {name: as_bytes(parameter) for name, parameter in model.named_parameters()}
    return weights, [{key: as_bytes(each[key]) for key in sorted(each)} for each in state["state"].values()]


def _states_of(state: dict[str, Any]) -> list[dict[str, bytes]]:
    """By the order of the parameters, whatever they are called."""
    order = [key for group in state["param_groups"] for key in group["params"] if key in state["state"]]
    return [{key: as_bytes(state["state"][each][key]) for key in sorted(state["state"][each])} for each in order]


def _pack(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _on_whole_states(rank: int, size: int, first: int, packed: bytes | None) -> bytes:
    """Two steps; from and to what torch.save() writes."""
    with etp.init_group(timeout=30) as group:
        model = built()
        state = None if packed is None else torch.load(io.BytesIO(packed))
        if state is not None:
            model.load_state_dict(state["model"])
        run = Run(size, rank, group)
        run.sharded(model)
        optimizer = adamw(model.parameters())
        if state is not None:
            etp.load_optimizer_state_dict(optimizer, state["optimizer"])
        _train(run, model, optimizer, first, 2)
        saved = etp.optimizer_state_dict(optimizer, full=True)
        with etp.summon(model):
            return _pack({"model": model.state_dict(), "optimizer": saved})


def test_whole_states_go_from_2_ranks_to_4_to_plain_torch() -> None:
    packed = launch(functools.partial(_on_whole_states, size=2, first=0, packed=None), 2)[0]
    packed = launch(functools.partial(_on_whole_states, size=4, first=2, packed=packed), 4)[1]
    state = torch.load(io.BytesIO(packed))
    model, optimizer = _plain(Tied, 0)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    _train(Run(GLOBAL), model, optimizer, 4, 2)
    expected, its_optimizer = _plain(Tied, 6)
    assert _bytes_of(model, optimizer.state_dict()) == _bytes_of(expected, its_optimizer.state_dict())


def _on_checkpoints(rank: int, size: int, replicas: int, first: int, folder: pathlib.Path) -> Any:
    """Two steps; from and to what torch.distributed.checkpoint writes."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("dp", "etp"))
    with etp.init_group(mesh=mesh["etp"], timeout=30) as group, etp.init_group(mesh=mesh["dp"]) as dp:
        run = Run(size, rank, group, dp=dp)
        model = run.sharded(built(Experts, seed=7 if first == 0 else 8), min_elements=256)
        optimizer = adamw(model.parameters())
        if first > 0:
            before = run.weights(model)
            state = {"model": model.state_dict(), "optimizer": etp.optimizer_state_dict(optimizer, init=True)}
            dcp.load(state, checkpoint_id=folder / str(first))
            assert run.weights(model) == before  # other ranks may read them
            model.load_state_dict(state["model"])
            etp.load_optimizer_state_dict(optimizer, state["optimizer"])
        _train(run, model, optimizer, first, 2)
        state = {"model": model.state_dict(), "optimizer": etp.optimizer_state_dict(optimizer)}
        dcp.save(state, checkpoint_id=folder / str(first + 2))
        return run.weights(model)


def test_distributed_checkpoints_go_from_2_ranks_to_4_to_replicas_to_plain_torch(folder: pathlib.Path) -> None:
    for first, (size, replicas) in enumerate([(2, 1), (4, 1), (4, 2)]):
        step = functools.partial(_on_checkpoints, size=size, replicas=replicas, first=2 * first, folder=folder)
        found = launch(step, size)
        expected, its_optimizer = _plain(Experts, 2 * first + 2)
        assert found == [_bytes_of(expected, its_optimizer.state_dict())[0]] * size
    model, optimizer = _plain(Experts, 1)  # there is something to load into
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder / "6")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert _bytes_of(model, optimizer.state_dict()) == _bytes_of(expected, its_optimizer.state_dict())


def _load_and_step(optimizer: torch.optim.Optimizer, load: Callable[[Any], Any], state: dict[str, Any]) -> None:
    load(state)
    optimizer.step()


def _other_states(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        run = Run(2, rank, group)
        model = run.sharded(built())
        optimizer = adamw(model.parameters())
        found["nothing yet"] = etp.optimizer_state_dict(optimizer)["state"] == {}
        run.train(model, optimizer)
        expected = _states_of(etp.optimizer_state_dict(optimizer, full=True))
        # torch's own are whole tensors, and whole in a file.
        own = torch.load(io.BytesIO(_pack(optimizer.state_dict())))
        found["plain in a file"] = type(own["state"][0]["exp_avg"]) is torch.Tensor
        found["whole in a file"] = _states_of(own) == expected
        logical = etp.optimizer_state_dict(optimizer)
        found["logical"] = repr(logical["state"]["emb.weight"]["exp_avg"])
        found["whole"] = logical["state"]["up.weight"]["exp_avg"].shape == model.up.weight.shape == (HIDDEN, WIDTH)
        # Each of them loads by each way. torch's own load shares the tensors that it is given.
        again = adamw(model.parameters())
        same = []
        for load in (again.load_state_dict, lambda state: etp.load_optimizer_state_dict(again, state)):
            for state in (optimizer.state_dict(), own, logical):
                run.train(model, again, steps=1)
                load(copy.deepcopy(state))
                same.append(_states_of(etp.optimizer_state_dict(again, full=True)) == expected)
        found["same"] = all(same)
        etp.load_optimizer_state_dict(again, logical)
        for each in logical["state"].values():
            each["exp_avg"] = None
        with torch.no_grad():
            again.state[model.up.weight]["exp_avg"].zero_()
        found["a copy"] = _states_of(etp.optimizer_state_dict(optimizer, full=True)) == expected
        found["unlike"] = _states_of(etp.optimizer_state_dict(again, full=True)) != expected
        # Rows are taken for nothing by their shape.
        rows = optimizer.state_dict()
        rows["state"] = {0: {key: etp.local(each).clone() for key, each in rows["state"][0].items()}}
        for load in (again.load_state_dict, lambda state: etp.load_optimizer_state_dict(again, state)):
            with pytest.raises(tessera.InvalidArgumentError) as caught:
                _load_and_step(again, load, rows)
            found.setdefault("rows", []).append(str(caught.value))
        # torch's helpers give it by name.
        helped = get_optimizer_state_dict(model, optimizer)
        dcp.save({"optimizer": helped}, checkpoint_id=folder / "helped")
        plain = built()
        its_optimizer = adamw(plain.parameters())
        run.train(plain, its_optimizer, steps=1)
        wanted = get_optimizer_state_dict(plain, its_optimizer)
        dcp.load({"optimizer": wanted}, checkpoint_id=folder / "helped")
        set_optimizer_state_dict(plain, its_optimizer, wanted)
        found["by name"] = _states_of(its_optimizer.state_dict()) == expected
        # What init makes changes no weight, and is only made once.
        before = run.weights(model)
        fresh = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        momentum = etp.optimizer_state_dict(fresh, init=True)["state"]["emb.weight"]["momentum_buffer"]
        found["made"] = (bool((momentum == 0).all()), tuple(momentum.shape), fresh.param_groups[0]["lr"])
        found["unchanged"] = run.weights(model) == before and model.up.weight.grad is None
    return found


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(functools.partial(_other_states, folder=tmp_path_factory.mktemp("states")), 2)


@pytest.mark.parametrize(
    "what",
    [
        "nothing yet",
        "plain in a file",
        "whole in a file",
        "whole",
        "same",
        "a copy",
        "unlike",
        "by name",
        "unchanged",
    ],
)
def test_optimizer_states(others: list[dict[str, Any]], what: str) -> None:
    assert all(each[what] for each in others)


def test_what_optimizer_states_say(others: list[dict[str, Any]]) -> None:
    for each in others:
        assert "LogicalTensor(\"the state 'exp_avg' of emb.weight\", (203, 32)" in each["logical"]
        assert all("whole tensors" in text and "emb.weight" in text for text in each["rows"])
        assert each["made"] == (True, (WORDS, 32), 0.5)


class _Cut:
    def __init__(
        self,
        shape: tuple[int, ...],
        matrix: tuple[int, int],
        rows: tuple[int, int],
        lead: tuple[int, ...] = (),
        tp_cut: Cut | None = None,
    ) -> None:
        self.shape, self.matrix, self.rows, self.lead = torch.Size(shape), torch.Size(matrix), rows, torch.Size(lead)
        self.tp_cut = tp_cut


@pytest.mark.parametrize(
    ("shape", "dims"), [((7, 3), 1), ((1, 3), 1), ((3, 4, 2), 2), ((2, 3, 4, 2), 3), ((6, 2, 3, 3), 1), ((1, 5, 2), 2)]
)
def test_boxes_cover_rows_once_and_in_order(shape: tuple[int, ...], dims: int) -> None:
    total, columns = math.prod(shape[:dims]), math.prod(shape[dims:])
    numbers = torch.arange(total * columns).view(shape)
    for begin, end in itertools.combinations_with_replacement(range(total + 1), 2):
        boxes = boxes_of(_Cut(shape, (total, columns), (begin, end)))
        parts = [
            numbers[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].flatten()
            for box in boxes
        ]
        rows = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        assert rows.tolist() == list(range(begin * columns, end * columns))
        assert [box.rows[1] - box.rows[0] for box in boxes] == [len(part) // columns for part in parts]
        assert len(boxes) <= 2 * dims - 1


def test_a_rank_has_a_box_of_a_stack() -> None:
    numbers = torch.arange(3 * 5 * 2).view(3, 5, 2)
    for begin, end in itertools.combinations_with_replacement(range(6), 2):
        weight, local = _Cut((3, 5, 2), (5, 2), (begin, end), (3,)), numbers[:, begin:end].contiguous()
        for box in boxes_of(weight):
            assert box.offsets == (0, begin, 0) and box.sizes == (3, end - begin, 2)
            assert shard_at(weight, local, box.offsets).equal(local)
        assert len(boxes_of(weight)) == (begin < end)


@pytest.mark.parametrize(("shape", "dim", "halves"), [((7, 3), 0, 1), ((8, 3), 0, 2), ((4, 6), 1, 1), ((6,), 0, 1)])
def test_pieces_of_what_tensor_parallelism_has_cut_cover_the_whole_once(
    shape: tuple[int, ...], dim: int, halves: int
) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    block = shape[dim] // halves
    for bound, first in itertools.product(range(block + 1), range(shape[0] + 1)):
        count = torch.zeros(shape, dtype=torch.int64)
        for begin, end in ((0, bound), (bound, block)):
            cut = Cut(dim, halves, shape[dim], begin, end)
            part = cut.part_of(whole)
            assert cut.whole(tuple(part.shape)) == torch.Size(shape)
            split = min(first, part.shape[0])
            for rows in ((0, split), (split, part.shape[0])):
                matrix = (part.shape[0], part.shape[1:].numel())
                weight, local = _Cut(tuple(part.shape), matrix, rows, tp_cut=cut), part[slice(*rows)].contiguous()
                for piece in pieces_of(weight):
                    place = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
                    assert shard_at(weight, local, piece.offsets).equal(whole[place])
                    count[place] += 1
        assert bool((count == 1).all())
