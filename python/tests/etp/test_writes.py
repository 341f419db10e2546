"""Writes between steps: carried through alike on all ranks, with the bits of one process, or refused on all of them
before any rank sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
import torch.nn.functional as F
from etp_models import as_bytes
from tessera import etp
from torch_ranks import launch

ROWS, COLUMNS = 12, 5
Write = Callable[[torch.Tensor, float], Any]


def _seeded(write: Callable[[torch.Tensor], Any]) -> Write:
    def run(tensor: torch.Tensor, x: float) -> None:
        torch.manual_seed(int(8 * x))
        write(tensor)

    return run


def _put(index: Any) -> Write:
    def run(tensor: torch.Tensor, x: float) -> None:
        tensor[index] = x

    return run


def _assign(tensor: torch.Tensor, x: float) -> None:
    tensor.data = torch.full(tensor.shape, x)


@torch.library.custom_op("tessera_tests::add_to", mutates_args=("tensor",))
def _add_to(tensor: torch.Tensor, x: float) -> None:
    tensor += x


def _numbered(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) / 7


# What is written depends on x, which is one rank's own, or the same on all.
WRITES: dict[str, Write] = {
    "mul_": lambda t, x: t.mul_(1 + x),
    "sub_ alpha": lambda t, x: t.sub_(t.detach().clone(), alpha=x),
    "remainder_": lambda t, x: t.remainder_(x / 4),
    "clamp_": lambda t, x: t.clamp_(-x / 8, x / 8),
    "an operand": lambda t, x: t.add_(torch.full(tuple(t.shape), x)),
    "an operand of one row": lambda t, x: t.mul_(torch.full((t.shape[-1],), 1 + x)),
    "an operand of one column": lambda t, x: t.mul_(torch.full((t.shape[0], 1), 1 + x)),
    "an operand without dims": lambda t, x: t.mul_(torch.tensor(1 + x)),
    "copy_": lambda t, x: t.copy_(torch.full(tuple(t.shape), x)),
    "copy_ of a smaller one": lambda t, x: t.copy_(torch.full((1,), x)),
    "copy_ of doubles": lambda t, x: t.copy_(torch.full(tuple(t.shape), x, dtype=torch.float64)),
    "fill_": lambda t, x: t.fill_(x),
    "fill_ of a tensor": lambda t, x: t.fill_(torch.tensor(x)),
    "a row": _put(3),
    "rows": _put(slice(1, 9, 2)),
    "a list of rows": _put([0, 7, 2]),
    "a column": _put((slice(None), 2)),
    "an element": _put((5, 1)),
    "a mask": lambda t, x: t.__setitem__(_numbered(t) > x, 0.25),
    "a flat view": lambda t, x: t.view(-1)[7:19].fill_(x),
    "a transposed view": lambda t, x: t.t().mul_(1 + x),
    "a diagonal": lambda t, x: t.diagonal().add_(x),
    "a split": lambda t, x: t.split(5)[1].add_(x),
    "lerp_": lambda t, x: t.lerp_(torch.zeros(tuple(t.shape)), x / 8),
    "addcmul_": lambda t, x: t.addcmul_(_numbered(t), _numbered(t), value=x),
    "addmm_": lambda t, x: t.addmm_(torch.full((t.shape[0], 2), x), torch.ones(2, t.shape[1])),
    "masked_fill_": lambda t, x: t.masked_fill_(_numbered(t) > 2, x),
    "index_add_": lambda t, x: t.index_add_(0, torch.tensor([1, 8]), torch.full((2, t.shape[1]), x)),
    "scatter_": lambda t, x: t.scatter_(0, torch.tensor([[int(8 * x) % 7] * t.shape[1]]), torch.ones(1, t.shape[1])),
    "tril_": lambda t, x: t.tril_(int(8 * x) % 4),
    "cumsum_": lambda t, x: t.mul_(x).cumsum_(0),
    "renorm_": lambda t, x: t.renorm_(2, 0, x / 8),
    "out=": lambda t, x: torch.mul(t.detach(), 1 + x, out=t),
    "out= of products": lambda t, x: torch.mm(torch.full((t.shape[0], 2), x), torch.ones(2, t.shape[1]), out=t),
    "normal_": _seeded(lambda t: t.normal_()),
    "uniform_": _seeded(lambda t: t.uniform_(-1, 1)),
    "bernoulli_": _seeded(lambda t: t.bernoulli_(0.5)),
    "an initialiser": _seeded(torch.nn.init.kaiming_uniform_),
    "an orthogonal one": _seeded(torch.nn.init.orthogonal_),
    "dropout": _seeded(lambda t: F.dropout(t, 0.5, inplace=True)),
    "a list": lambda t, x: torch._foreach_mul_([t], 1 + x),  # type: ignore[func-returns-value]
    "a list of operands": lambda t, x: torch._foreach_add_([t], [torch.full(tuple(t.shape), x)]),  # type: ignore[func-returns-value]
    ".data": _assign,
    ".data of it": lambda t, x: t.data.mul_(1 + x),
    "an operator of one's own": lambda t, x: _add_to(t, x),
}
TARGETS = ("parameter", "gradient", "state")


def _made() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS, bias=False), torch.nn.Tanh())


def _trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    """One step: with a gradient and states, which are the same on all ranks."""
    torch.manual_seed(6)
    model(torch.randn(4, COLUMNS)).square().sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    optimizer.step()
    return optimizer


def _target(name: str, model: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    weight = model[0].weight
    found: torch.Tensor = {"parameter": weight, "gradient": weight.grad}.get(name)
    return optimizer.state[weight]["exp_avg"] if name == "state" else found


def _write(name: str, tensor: torch.Tensor, x: float) -> None:
    with torch.no_grad():
        WRITES[name](tensor, x)


def _read(tensor: torch.Tensor) -> torch.Tensor:
    return etp.whole(tensor).detach().clone()


def _plainly(name: str, tensor: torch.Tensor, x: float) -> bytes:
    tensor = tensor.clone()
    _write(name, tensor, x)
    return as_bytes(tensor)


def _on_ranks(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        for target in TARGETS:
            model = etp.shard_module_(_made(), group, min_elements=0)
            optimizer = _trained(model)
            tensor = _target(target, model, optimizer)
            first = _read(tensor)
            for name in WRITES:
                version = model[0].weight.etp.version if target == "parameter" else 0
                refused = ""
                try:
                    _write(name, tensor, 2.5 if rank == size - 1 else 1.25)  # one rank's own
                    _read(tensor)
                except tessera.InvalidArgumentError as error:
                    refused = str(error)
                kept = target != "parameter" or (
                    torch.equal(_read(tensor), first) and model[0].weight.etp.version == version
                )
                # The group goes on, and what all write alike is right.
                _write("copy_", tensor, 0.0)
                with torch.no_grad():
                    tensor.copy_(first)
                    _write(name, tensor, 1.25)
                    right = as_bytes(_read(tensor)) == _plainly(name, first, 1.25)
                    tensor.copy_(first)
                found[f"{name}, {target}"] = (refused, kept, right)
    return found


@pytest.fixture(scope="module", params=[2, 3])
def written(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(functools.partial(_on_ranks, size=request.param), request.param)


@pytest.mark.parametrize("target", TARGETS)
def test_what_ranks_write_differently_is_refused_on_all(written: list[dict[str, Any]], target: str) -> None:
    for name in WRITES:
        for each in written:
            refused, kept, _ = each[f"{name}, {target}"]
            assert "different values" in refused or "not written the same" in refused, (name, refused)
            assert kept, name


@pytest.mark.parametrize("target", TARGETS)
def test_what_they_write_alike_has_the_bits_of_one_process(written: list[dict[str, Any]], target: str) -> None:
    for name in WRITES:
        for each in written:
            assert each[f"{name}, {target}"][2], name
