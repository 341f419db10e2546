"""Loops in which ranks make different numbers of steps, against plain torch in one process."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import pytest
import torch
from etp_wrong_calls import WIDTH, Model
from tessera import etp
from tessera.etp import told_writes
from torch_ranks import launch

BATCHES = {2: (3, 7), 3: (0, 7, 3)}
MOST = 1e-6


def _inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    return (model(_inputs(step, rank)) - rank).square().mean()


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _joined(rank: int, ranks: int, divides: bool, micro_batches: int) -> list[torch.Tensor]:
    model = etp.shard_module_(Model(), etp.init_group(timeout=30))
    optimizer = _optimizer(model)
    with etp.join(model, optimizer, divides):
        for step in range(BATCHES[ranks][rank]):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
            optimizer.zero_grad()
            for micro_batch in range(micro_batches):
                _loss(model, 10 * step + micro_batch, rank).backward()
            etp.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    return [etp.whole(each).detach().clone() for each in model.parameters()]


def _plain(ranks: int, divides: bool, micro_batches: int) -> list[torch.Tensor]:
    model = Model()
    optimizer = _optimizer(model)
    for step in range(max(BATCHES[ranks])):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.zero_grad()
        active = [rank for rank in range(ranks) if step < BATCHES[ranks][rank]]
        for micro_batch in range(micro_batches):
            losses = [_loss(model, 10 * step + micro_batch, rank) for rank in active]
            (torch.stack(losses).sum() / (ranks if divides else len(active))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_have_left_step_with_the_others(ranks: int, divides: bool, micro_batches: int) -> None:
    run = functools.partial(_joined, ranks=ranks, divides=divides, micro_batches=micro_batches)
    wanted = _plain(ranks, divides, micro_batches)
    for found in launch(run, ranks):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=MOST, atol=MOST)


def _fails(rank: int) -> tuple[str, float]:
    model = etp.shard_module_(Model(), etp.init_group(timeout=30))
    optimizer = _optimizer(model)
    begin = time.monotonic()
    try:
        with etp.join(model, optimizer):
            for step in range(4 * rank):
                if step == 2:
                    raise LookupError("no more memory of batches")
                _loss(model, step, rank).backward()
                optimizer.step()
    except Exception as error:
        return str(error), time.monotonic() - begin
    return "nothing", 0


def test_a_rank_that_raises_ends_those_that_have_left() -> None:
    (told, seconds), (own, _) = launch(_fails, 2)
    assert own == "no more memory of batches"
    assert told == "rank 1: LookupError: no more memory of batches (in etp.join())"
    assert seconds < 20


def _zeroed(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def _zeroed_one_by_one(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def _halved(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Momentum by hand: what is left of the gradient is added to the next one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(torch.tensor(0.5)).nan_to_num_()
                parameter.mul_(0.99)


def _clamped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if any(each.grad is not None for each in model.parameters()):  # torch refuses an empty list
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


WRITES = {each.__name__: each for each in (_zeroed, _zeroed_one_by_one, _halved, _clamped)}


def _written_loop(write: Any, losses: Any, model: torch.nn.Module, steps: int) -> list[torch.Tensor]:
    optimizer = _optimizer(model)
    with losses.loop(model, optimizer):
        for step in range(steps):
            write(model, optimizer)
            losses(model, step)
            write(model, optimizer)
            losses(model, step + 50)
            optimizer.step()
    return [etp.whole(each).detach().clone() for each in model.parameters()]


class _Sharded:
    def __init__(self, rank: int) -> None:
        self.rank, self.loop = rank, etp.join

    def __call__(self, model: torch.nn.Module, step: int) -> None:
        _loss(model, step, self.rank).backward()


class _Plain:
    def __init__(self, ranks: int) -> None:
        self.ranks, self.loop = ranks, lambda *_: contextlib.nullcontext()

    def __call__(self, model: torch.nn.Module, step: int) -> None:
        active = [rank for rank in range(self.ranks) if step % 50 < BATCHES[self.ranks][rank]]
        (torch.stack([_loss(model, step, rank) for rank in active]).sum() / self.ranks).backward()


def _joined_writes(ranks: int, rank: int) -> dict[str, list[torch.Tensor]]:
    with etp.init_group(timeout=30) as group:
        return {
            name: _written_loop(write, _Sharded(rank), etp.shard_module_(Model(), group), BATCHES[ranks][rank])
            for name, write in WRITES.items()
        }


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_have_left_write_with_the_others(ranks: int) -> None:
    found = launch(functools.partial(_joined_writes, ranks), ranks)
    for name, write in WRITES.items():
        wanted = _written_loop(write, _Plain(ranks), Model(), max(BATCHES[ranks]))
        for rank in found:
            for one, other in zip(rank[name], wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=MOST, atol=MOST, msg=name)


def _writes(rank: int) -> str:
    model = etp.shard_module_(Model(), etp.init_group(timeout=30))
    try:
        with etp.join(model, _optimizer(model)), torch.no_grad():
            if rank == 1:
                model[0].weight.add_(torch.ones_like(etp.whole(model[0].weight)))  # type: ignore[index]
    except Exception as error:
        return str(error)
    return "nothing"


def test_a_write_that_ranks_that_have_left_cannot_know_is_refused_by_name() -> None:
    for told in launch(_writes, 2):
        assert "etp.join(): add_ of sharded tensor 0.weight has operands that ranks that have left do not have" in told


def _closes(kind: str, rank: int) -> str:
    model = etp.shard_module_(Model(), etp.init_group(timeout=30))
    optimizer = _optimizer(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, 0, rank)
        loss.backward()
        return loss

    others = {
        "another optimiser": lambda: torch.optim.Adam(model.parameters()),
        "one of whole parameters": lambda: torch.optim.Adam([model[0].bias]),  # type: ignore[index]
    }
    other = others[kind]() if kind in others else None
    try:
        with etp.join(model, optimizer):
            for step in range(2 * rank):
                if other is None:
                    optimizer.step(closure)
                    continue
                _loss(model, step, rank).backward()
                other.step()
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("a closure", "SGD.step() has a closure, and ranks that have left have no inputs for it"),
        ("another optimiser", "Adam.step() of the model's parameters, and ranks that have left know SGD only"),
        ("one of whole parameters", "Adam.step() of the model's parameters, and ranks that have left know SGD only"),
    ],
)
def test_a_step_that_ranks_that_have_left_cannot_make_is_refused_on_all(kind: str, text: str) -> None:
    told = launch(functools.partial(_closes, kind), 2)
    assert told[1].startswith(f"etp.join(): {text}")
    assert told[0].startswith(f"rank 1: etp.join(): {text}")


STRANGE: dict[str, dict[str, Any]] = {
    "no operation": {"operation": "aten::no_such_.Scalar", "args": [], "kwargs": {}},
    "one that writes nothing": {"operation": "aten::mul.Tensor", "args": [], "kwargs": {}},
    "another package's": {"operation": "prims::copy_to", "args": [], "kwargs": {}},
    "no parameter": {"operation": "aten::zero_", "args": [{"of": ["parameter", 7]}], "kwargs": {}},
    "one from behind": {"operation": "aten::zero_", "args": [{"of": ["parameter", -1]}], "kwargs": {}},
    "no gradient": {"operation": "aten::zero_", "args": [{"of": ["gradient", 0]}], "kwargs": {}},
    "a state": {"operation": "aten::zero_", "args": [{"of": ["state", 0]}], "kwargs": {}},
    "a dtype": {"operation": "aten::zero_", "args": [{"number": 1, "dtype": "load", "dims": 0}], "kwargs": {}},
    "dims": {"operation": "aten::zero_", "args": [{"number": 1, "dtype": "float32", "dims": 10**9}], "kwargs": {}},
    "numbers": {"operation": "aten::zero_", "args": [{"number": [1, 2], "dtype": "float32", "dims": 1}], "kwargs": {}},
    "nothing": {},
}


@pytest.mark.parametrize("what", STRANGE)
def test_an_operation_that_cannot_be_is_not_made(what: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises((LookupError, AttributeError, TypeError, ValueError)):
        told_writes.decode(STRANGE[what], [parameter], [None])


def test_values_that_cannot_be_are_not_written() -> None:
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in ((2, 3), (), (0,))]
    parameters[1].grad = torch.full((), 2.0, dtype=torch.bfloat16)
    told = told_writes.pack(parameters)
    others = [torch.nn.Parameter(torch.zeros_like(each)) for each in parameters]
    for strange in (b"", told[:-1], told + b"\0", b"\0" + told[1:], b"\7" + told[1:]):
        with pytest.raises(ValueError, match="bytes"):
            told_writes.unpack(strange, others)
        assert not any(bool(each.any()) for each in others)
    told_writes.unpack(told, others)
    for one, other in zip(parameters, others, strict=True):
        assert torch.equal(one, other)
        assert (one.grad is None) is (other.grad is None)
    assert torch.equal(parameters[1].grad, others[1].grad)  # type: ignore[arg-type]
