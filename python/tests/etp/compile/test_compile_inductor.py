"""Models that inductor has compiled: minutes, as it calls the C++ compiler for each graph."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from etp_compile_scenarios import Called
from etp_models import Tied, batch, built, loss_of
from tessera import etp
from torch._dynamo.utils import counters
from torch_ranks import launch

pytestmark = pytest.mark.slow

BOUND = 1e-5  # of each weight's largest element, after the steps below; 6e-7 was seen
STEPS = 3


Kind = Callable[[], torch.nn.Module]
KINDS: list[Kind] = [Tied, Called]


def _trained(model: Any, called: Any, numbers: Callable[[int], list[int]], scale: float) -> list[tuple[Any, ...]]:
    """What the compiler has done, after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    counters.clear()
    for step in range(STEPS):
        for number in numbers(step):
            (loss_of(called, number) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((dict(counters["frames"]), dict(counters["stats"]), dict(counters["inductor"])))
    with torch.no_grad():
        called(batch(3)[0])
    return seen


def _sharded(
    kind: Kind, folder: pathlib.Path, size: int, rank: int
) -> tuple[list[tuple[Any, ...]], list[torch.Tensor]]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    torch._dynamo.reset()
    model = built(kind)
    names = [name for name, each in model.named_parameters() if each.dim() > 1]
    with etp.init_group(timeout=300) as group:  # compiling takes longer on one rank than on the other
        etp.shard_module_(model, group, {name.replace(".", r"\."): "f32" for name in names}, min_elements=256)
        called = torch.compile(model)
        if size == 1:
            seen = _trained(model, called, lambda step: [2 * step, 2 * step + 1], 0.5)
        else:
            seen = _trained(model, called, lambda step: [size * step + rank], 1)
        return seen, [etp.whole(each).detach().clone() for each in model.parameters()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_one_rank_and_close_to_plain_torch(
    kind: Kind, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    torch._dynamo.reset()
    plain = built(kind)
    _trained(plain, torch.compile(plain), lambda step: [2 * step, 2 * step + 1], 0.5)
    seen, alone = _sharded(kind, folder, 1, 0)
    for ours, theirs in zip(alone, plain.parameters(), strict=True):
        assert (ours - theirs).abs().max() <= BOUND * theirs.abs().max()
    assert seen[0][1]["unique_graphs"] >= 2
    assert seen[1] == seen[-1]  # later steps compile nothing

    ranks = launch(functools.partial(_sharded, kind, folder, 2), 2)
    for _, weights in ranks:
        assert all(torch.equal(ours, one) for ours, one in zip(weights, alone, strict=True))
