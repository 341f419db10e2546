"""Lines of plain torch around a sharded model that torch does not bring before it: assignments of .data, collectives
of torch.distributed, DLPack, inference mode, other models; and copies that one rank drops before another reads them."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
import torch.distributed as dist
from etp_models import as_bytes, built, loss_of
from tessera import _core, etp
from torch_ranks import launch

Habit = Callable[[Any, int], Any]
SIZE = 2


def _values(model: torch.nn.Module) -> list[bytes]:
    return [as_bytes(etp.whole(each)) for each in model.parameters()]


def plain_parameter_takes_data(model: Any, rank: int) -> Any:
    """A copy: in plain torch it would be the same memory."""
    found = []
    for number in range(4):
        copied = copy.deepcopy(model)  # whose memory nothing else has, in plain torch either
        weight = copied.up.weight
        sharded = (weight, weight.data, weight.data * 0.5, copied.state_dict()["up.weight"])[number]
        plain = torch.nn.Linear(*reversed(model.up.weight.shape))
        plain.weight.data = sharded
        plain(torch.ones(plain.in_features)).sum().backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        found.append(float(plain.weight.detach().sum()))
    return found


def averaged_weights_are_swapped_in_and_out(model: Any, rank: int) -> Any:
    averaged = [each.detach().clone() * 0.5 for each in model.parameters()]
    found = []
    for way in ("tuple", "three lines", "detached", "plain tensors"):
        if way == "plain tensors":
            averaged = [torch.full(each.shape, 0.25) for each in model.parameters()]
        for _ in range(2):
            for parameter, other in zip(model.parameters(), averaged, strict=True):
                if way == "tuple":
                    parameter.data, other.data = other.data, parameter.data
                else:
                    kept = parameter.detach() if way == "detached" else parameter.data
                    parameter.data = other.data
                    other.data = kept
            found.append(_values(model))
    return found, [as_bytes(etp.whole(each)) for each in averaged]


def gradients_are_averaged_by_hand(model: Any, rank: int) -> Any:
    """Once more: what all ranks have alike stays as it is."""
    loss_of(model, 3).backward()
    for parameter in model.parameters():
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX, async_op=True).wait()
            dist.broadcast(parameter.grad, 0)
            parameter.grad /= SIZE
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
    return _values(model)


def weights_are_gathered_into(model: Any, rank: int) -> Any:
    weight = model.up.weight
    rows = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
    if dist.is_initialized():
        dist.all_gather_into_tensor(weight.data, rows.chunk(SIZE)[rank].contiguous())
    else:
        weight.data.copy_(rows)
    return _values(model)


def memory_by_dlpack(model: Any, rank: int) -> Any:
    return [as_bytes(torch.from_dlpack(torch.utils.dlpack.to_dlpack(model.up.weight.detach())))]


def copied_in_inference_mode(model: Any, rank: int) -> Any:
    with torch.inference_mode():
        copied = copy.deepcopy(model)
        return float(loss_of(copied, 5)), _values(copied)


def classes_are_asked_for(model: Any, rank: int) -> Any:
    """As in the documentation of Module.apply(), and as tables of classes are made."""
    table = {torch.nn.Linear: 1.5, torch.nn.Embedding: 0.25}

    @torch.no_grad()
    def initialise(module: torch.nn.Module) -> None:
        if type(module) == torch.nn.Linear:  # noqa: E721
            module.weight.fill_(1.0)
        if type(module) in table:
            module.weight.mul_(table[type(module)])
        if type(module) in (torch.nn.LayerNorm, torch.nn.Embedding):
            module.weight.add_(2.0)

    model.apply(initialise)
    kinds = [type(each) for each in model.modules()]
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    same = [[kind == other for other in (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm)] for kind in kinds]
    other = [kind != torch.nn.Linear for kind in kinds]
    kind = type(model.up)
    made = kind(3, 4)
    files = [type(pickle.loads(pickle.dumps(each))).__name__ for each in (kind, made)]
    inherits = isinstance(torch.nn.Linear(2, 2), kind), issubclass(torch.nn.LazyLinear, kind), isinstance(made, kind)
    return _values(model), names, same, other, len(set(kinds)), str(model), files, inherits


def a_layer_of_a_derived_class(model: Any, rank: int) -> Any:
    """Derives a class from that of a layer, as adapters and quantisers do."""

    class Doubled(type(model.up)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    layer = Doubled(model.up.in_features, model.up.out_features)
    layer.load_state_dict(model.up.state_dict())
    model.up = layer
    with torch.no_grad():
        loss = float(loss_of(model, 5))
    values = trained(model, rank)
    with contextlib.ExitStack() as opened:
        if isinstance(model.down.weight, etp.LogicalTensor):
            opened.enter_context(etp.summon(model))
        names = type(model.up).__name__, type(model.up) == torch.nn.Linear, isinstance(model.up, Doubled)  # noqa: E721
    return loss, values, names


def trained(model: Any, rank: int) -> list[bytes]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, 5).backward()
    optimizer.step()
    return _values(model)


HABITS: dict[str, Habit] = {
    habit.__name__: habit
    for habit in (
        plain_parameter_takes_data, averaged_weights_are_swapped_in_and_out, gradients_are_averaged_by_hand,
        weights_are_gathered_into, memory_by_dlpack, copied_in_inference_mode, classes_are_asked_for,
        a_layer_of_a_derived_class,
    )
}  # fmt: skip


def _sharded_runs(rank: int) -> dict[str, Any]:
    found = {}
    with etp.init_group(timeout=30) as group:
        for name, habit in HABITS.items():
            found[name] = habit(etp.shard_module_(built(), group, min_elements=256), rank)
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return launch(_sharded_runs, SIZE)


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_has_the_bits_of_plain_torch(runs: list[dict[str, Any]], name: str) -> None:
    """The ranks have the same tokens, so that gradients are those of one process."""
    expected = HABITS[name](built(), 0)
    for run in runs:
        assert run[name] == expected


def _looked_at_by_one(rank: int) -> Any:
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group, min_elements=256)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shapes: list[torch.Size] = []
        if rank == 0:
            for each in model.parameters():
                if isinstance(each, etp.LogicalTensor):
                    each.register_hook(lambda gradient: shapes.append(gradient.shape))
        for number in range(4):
            loss_of(model, SIZE * number + rank).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return shapes, [etp.whole(each).detach() for each in model.parameters()]


def test_one_rank_may_look_at_gradients_of_weights_by_hooks() -> None:
    plain = built()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(4):
        for rank in range(SIZE):
            (loss_of(plain, SIZE * number + rank) / SIZE).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    (shapes, _), *others = ranks = launch(_looked_at_by_one, SIZE)
    assert len(shapes) == 4 * 3 and all(not seen for seen, _ in others)
    for _, weights in ranks:
        torch.testing.assert_close(weights, [parameter.detach() for parameter in plain.parameters()])


def _reduced_to_one(rank: int) -> str:
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group, min_elements=256)
        with pytest.raises(tessera.InvalidArgumentError) as caught:
            dist.reduce(model.up.weight.data, 0)
        before = built().up.weight.detach()
        assert torch.equal(etp.whole(model.up.weight), before)
        return str(caught.value)


def test_a_collective_that_leaves_other_values_on_ranks_is_refused() -> None:
    assert all("reduce_ of sharded tensor up.weight" in text for text in launch(_reduced_to_one, SIZE))


def _sharded_in_inference_mode(rank: int) -> list[bytes]:
    model = built()
    with etp.init_group(timeout=30) as group:
        with torch.inference_mode():
            etp.shard_module_(model, group, min_elements=256)
        return trained(model, rank)


def test_a_model_is_sharded_in_inference_mode() -> None:
    expected = trained(built(), 0)
    assert all(found == expected for found in launch(_sharded_in_inference_mode, SIZE))


def _read_after_one_has_dropped(rank: int) -> list[Any]:
    """The other rank's memory would be given to whatever comes next there."""
    found: list[Any] = []
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group, min_elements=256)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for reader in range(SIZE):
            copied = copy.deepcopy(model)
            with torch.no_grad():
                copied.up.weight.mul_(0.5)
            optimizer = torch.optim.Adam(copied.parameters(), lr=0.01)
            loss_of(copied, 7).backward()
            optimizer.step()
            if rank == reader:
                dist.barrier()
                with torch.no_grad():
                    found.append(float(loss_of(copied, 8)))
                found += _values(copied)
                found += [as_bytes(etp.whole(each.grad)) for each in copied.parameters()]
                found += [as_bytes(etp.whole(optimizer.state[each]["exp_avg"])) for each in copied.parameters()]
            else:
                del copied, optimizer
                gc.collect()
                others = []
                for size in sorted({each.numel() for each in model.parameters()}):
                    for part in (1, 2, 4, 8):
                        for _ in range(8):
                            memory = torch.from_dlpack(_core.shared_bytes(max(8, size * part // 2 // 8 * 8)))
                            others.append(memory.fill_(255))
                dist.barrier()
    return found


def test_a_rank_reads_on_what_another_one_has_dropped() -> None:
    model = built()
    with torch.no_grad():
        model.up.weight.mul_(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, 7).backward()
    optimizer.step()
    with torch.no_grad():
        expected: list[Any] = [float(loss_of(model, 8))]
    expected += _values(model)
    expected += [as_bytes(each.grad) for each in model.parameters() if each.grad is not None]
    expected += [as_bytes(optimizer.state[each]["exp_avg"]) for each in model.parameters()]
    for found in launch(_read_after_one_has_dropped, SIZE):
        assert found == expected


def _steps_beside_a_refused_change(rank: int) -> tuple[str, list[bytes]]:
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group, min_elements=256)
        torch.manual_seed(rank)
        model.more = torch.nn.Linear(3, 3)
        with pytest.raises(tessera.MismatchError) as caught:
            loss_of(model, 1)
        torch.manual_seed(0)
        other = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        other(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return str(caught.value), [as_bytes(each) for each in other.parameters()]


def test_a_model_that_ranks_have_changed_differently_stops_no_other() -> None:
    torch.manual_seed(0)
    other = torch.nn.Linear(3, 3)
    other(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    for text, values in launch(_steps_beside_a_refused_change, SIZE):
        assert "differs between ranks" in text
        assert values == [as_bytes(each) for each in other.parameters()]
