"""Buffers: compared when a model is sharded, and made equal after forwards have changed them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from tessera import etp
from tessera.etp import buffers
from torch_ranks import launch


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.second = torch.nn.Linear(64, 64)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(4, 64), persistent=False)
        self.register_buffer("by_hand", torch.zeros(64))
        self.register_buffer("large", torch.zeros(300, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu() + self.table[0]
        if self.training:
            self.steps += 1
            self.large[0].add_(x.detach().mean(0))
            # which counts no version, as batch_norm
            torch.nn.functional.batch_norm(x.detach(), self.by_hand, torch.ones(64), training=True)
        return self.second(x)


def built(kind: Callable[[], torch.nn.Module] = Net) -> Any:
    torch.manual_seed(3)
    return kind()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank)) + rank


def train(model: torch.nn.Module, rank: int, steps: int = 3, first: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(first, first + steps):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: torch.nn.Module) -> dict[str, Any]:
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(tessera.Error) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def _trained(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        for mode in ("deferred", "inline"):
            model = etp.shard_module_(built(), group, mode=mode)
            train(model, rank)
            found["broadcast", mode] = values(model)
        model.eval()
        found["evaluated"] = model(torch.ones(2, 64)).tolist()
        model = etp.shard_module_(built(), group, buffers="mean")
        train(model, rank, 1)
        found["mean"] = values(model)
        model = etp.shard_module_(built(), group, buffers={r"norm\..*": "own"})
        train(model, rank, 1)
        found["own"] = values(model)
        model = etp.shard_module_(built(), group)
        model.late = torch.nn.BatchNorm1d(64)
        model.second = torch.nn.Sequential(model.second, model.late)
        train(model, rank)
        found["late"] = values(model)
    return found


def _plainly(rank: int, steps: int, mean: bool) -> dict[str, Any]:
    """Of one rank, whose weights are trained with both ranks' gradients."""
    models = [built() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for step in range(steps):
        for number, model in enumerate(models):
            model(batch(step, number)).square().mean().backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            one.grad = other.grad = one.grad / 2 + other.grad / 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(*(model.buffers() for model in models), strict=True):
            one.copy_(torch.stack([one, other]).mean(0) if mean and one.is_floating_point() else one)
            other.copy_(one)
    return values(models[rank])


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return launch(_trained, 2)


def close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value == pytest.approx(other[name], abs=1e-5) if name == "steps" else True
        torch.testing.assert_close(torch.tensor(value), torch.tensor(other[name]), msg=name)


def test_ranks_take_those_of_rank_0(trained: list[dict[str, Any]]) -> None:
    for mode in ("deferred", "inline"):
        assert trained[0]["broadcast", mode] == trained[1]["broadcast", mode]
        close(trained[0]["broadcast", mode], _plainly(0, 3, False))
    assert trained[0]["evaluated"] == trained[1]["evaluated"]


def test_the_mean_is_over_ranks(trained: list[dict[str, Any]]) -> None:
    assert trained[0]["mean"] == trained[1]["mean"]
    close(trained[0]["mean"], _plainly(0, 1, True))


def test_each_rank_may_keep_its_own(trained: list[dict[str, Any]]) -> None:
    own = [rank["own"] for rank in trained]
    assert own[0]["norm.running_mean"] != own[1]["norm.running_mean"]
    assert own[0]["by_hand"] == own[1]["by_hand"]


def test_buffers_that_come_later_are_made_equal(trained: list[dict[str, Any]]) -> None:
    assert trained[0]["late"] == trained[1]["late"]
    assert sum("running_mean" in name for name in trained[0]["late"]) == 2


def _different(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        for name, dtype in (("table", None), ("steps", None), ("mask", torch.bool), ("scale", torch.float8_e4m3fn)):
            model = built()
            if dtype is not None:
                model.register_buffer(name, torch.zeros(64, dtype=dtype))
            if rank == 1:
                model.get_buffer(name).copy_(torch.tensor(2.0 if name == "table" else 1.0))
            found[name] = error_of(lambda model=model: etp.shard_module_(model, group))
            etp.shard_module_(model, group, buffers={name: "own"})
        model = etp.shard_module_(built(), group)
        train(model, rank, 1)
        model.register_buffer("late", torch.full((3,), float(rank)))
        found["late"] = error_of(lambda: model(batch(0, rank)))
        del model.late
        train(model, rank, 1)
        found["mode"] = error_of(lambda: etp.shard_module_(built(), group, buffers="first"))
        found["pattern"] = error_of(lambda: etp.shard_module_(built(), group, buffers={"(": "own"}))
    return found


def test_differences_are_refused_by_name() -> None:
    for found in launch(_different, 2):
        for name in ("table", "steps", "mask", "scale", "late"):
            assert f"buffer {name} differs between ranks 0 and 1" in found[name]
            assert f"buffers={{'{name}': 'own'}}" in found[name]
        assert "'first'" in found["mode"] and "broadcast" in found["mode"]
        assert "buffers" in found["pattern"]


def _shapes(rank: int) -> dict[str, Any]:
    """A buffer that grows with what a rank has seen."""

    class Seen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x.detach()[: rank + 1, 0]])
            return self.layer(x)

    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(Seen), group)
        train(model, rank, 2)
        found["seen"] = model.seen.tolist()
        model = etp.shard_module_(built(Seen), group, buffers="mean")
        found["mean"] = error_of(lambda: train(model, rank, 1))
    return found


def test_shapes_may_differ_where_rank_0_is_taken() -> None:
    first, second = launch(_shapes, 2)
    assert first["seen"] == second["seen"] and len(first["seen"]) == 2
    assert "buffer seen is" in first["mean"] and first["mean"] == second["mean"]


def _conditions(rank: int) -> list[str]:
    found = []
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group)
        found.append(str(etp.exactness(model)))
        model.eval()
        found.append(str(etp.exactness(model)))
        model.train()
        train(model, rank, 1)
        found.append(str(etp.exactness(model)))
    return found


def test_exactness_names_what_forwards_change() -> None:
    for before, evaluated, after in launch(_conditions, 2):
        assert "NO  buffers: forwards change norm.running_mean" in before and "take rank 0's" in before
        assert "ok  buffers" in evaluated
        assert "NO  buffers: forwards change" in after


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}", b"[2, [2], {}]", b"[2, [-1], {}]", b'[2, ["0"], {}]', b'[2, [], {"0": [[3], "torch.nn"]}]',
     b'[2, [], {"0": [[-3], "torch.float32"]}]', b'[2, [], {"0": 7}]', b"[2, 1, {}]"],
)  # fmt: skip
def test_what_another_rank_tells_is_checked(answer: bytes) -> None:
    with pytest.raises(tessera.MismatchError, match="rank 1 tells what cannot be true of the model's 2 buffers"):
        buffers._read([b"[2, [], {}]", answer], 2)


def test_what_can_be_true_is_taken() -> None:
    told = [2, [0, 1], {"1": [[3, 0], "torch.float32"]}]
    assert buffers._read([json.dumps(told).encode()], 2) == [told]
