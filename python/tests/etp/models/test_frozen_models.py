"""Backwards through a model that is frozen: each rank makes as many as it wants, as nothing is added."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from tessera import etp
from torch.nn import functional as F
from torch_ranks import launch

MODES = ("deferred", "inline")
IN, MIDDLE, OUT = 37, 41, 10


class Classifier(torch.nn.Module):
    """Products, a convolution, a parameter of its own, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Conv1d(1, 33, 3, padding=1)
        self.up = torch.nn.Linear(IN, MIDDLE)
        self.norm = torch.nn.BatchNorm1d(MIDDLE)
        self.mix = torch.nn.Parameter(torch.randn(MIDDLE, MIDDLE) / 8)
        self.head = torch.nn.Linear(MIDDLE, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(self.conv(x[:, None]).mean(1)))
        return self.head(self.norm(h) @ self.mix)  # type: ignore[no-any-return]


def images(rank: int, number: int = 0) -> torch.Tensor:
    return torch.randn(4, IN, generator=torch.Generator().manual_seed(10 * number + rank))


def attacked(model: Any, x: torch.Tensor, steps: int) -> torch.Tensor:
    """Return inputs that are moved along gradients, in the ways that torch has."""
    for step in range(steps):
        x = x.detach().requires_grad_()
        loss = model(x).square().sum()
        if step % 2 == 0:
            (gradient,) = torch.autograd.grad(loss, x)
        else:
            loss.backward()
            assert x.grad is not None
            gradient = x.grad
        x = x + 0.01 * gradient.sign()
    return x.detach()


def _attacks(rank: int, mode: str) -> list[bool]:
    """Attack a frozen model by other numbers of backwards on each rank, then train it, three times."""
    model: Any = Classifier()
    plain = copy.deepcopy(model)
    group = etp.init_group(timeout=20)
    etp.shard_module_(model, group, min_elements=64, mode=mode)
    size = group.size
    right = []
    for number in range(3):
        for each in (model, plain):
            each.eval().requires_grad_(False)
        steps = 1 + 2 * rank + number
        x, wanted = (attacked(each, images(rank, number), steps) for each in (model, plain))
        right.append(torch.allclose(x, wanted, atol=1e-5))
        for each in (model, plain):  # with running statistics as they are: ranks have other ones of their own batches
            each.requires_grad_(True)
        model(images(rank, number)).square().mean().backward()
        (sum(plain(images(other, number)).square().mean() for other in range(size)) / size).backward()
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
        named = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            whole = etp.whole(parameter) if isinstance(parameter, etp.LogicalTensor) else parameter
            right.append(torch.allclose(whole, named[name], atol=1e-5))
    group.close()
    return right


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_make_as_many_backwards_through_a_frozen_model_as_they_want(size: int, mode: str) -> None:
    assert all(all(right) for right in launch(functools.partial(_attacks, mode=mode), size))


def _fails_once(rank: int, mode: str) -> str:
    model: Any = Classifier().eval().requires_grad_(False)
    group = etp.init_group(timeout=20)
    etp.shard_module_(model, group, min_elements=64, mode=mode)
    said = ""
    x = images(rank).requires_grad_()
    if rank == 0:
        x.register_hook(_fail)
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        said = str(error)
    for _ in range(rank):
        model(images(rank).requires_grad_()).sum().backward()
    model.requires_grad_(True)
    model(images(rank)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    group.close()
    return said


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("rank 0's own")


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_through_a_frozen_model_that_fails_is_its_ranks_own(mode: str) -> None:
    assert launch(functools.partial(_fails_once, mode=mode), 3) == ["rank 0's own", "", ""]


def _statistics(rank: int) -> list[torch.Tensor]:
    """Make equal numbers of backwards through a frozen model whose forwards change buffers."""
    model: Any = Classifier().train().requires_grad_(False)
    group = etp.init_group(timeout=20)
    etp.shard_module_(model, group, min_elements=64, buffers="mean")
    for number in range(2):
        model(images(rank, number).requires_grad_()).sum().backward()
    group.close()
    return [model.norm.running_mean, model.norm.running_var]


def test_running_statistics_of_a_frozen_model_are_made_equal() -> None:
    first, second = launch(_statistics, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert bool(first[0].abs().sum() > 0)
