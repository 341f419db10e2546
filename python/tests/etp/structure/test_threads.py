"""Threads that read a model while another one trains it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import as_bytes
from tessera import etp
from torch_ranks import launch


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(64, 64)
        self.a = torch.nn.Linear(64, 128)
        self.free = torch.nn.Parameter(torch.randn(128, 64) / 8)
        self.experts = torch.nn.Parameter(torch.randn(4, 64, 64) / 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.a(self.emb(ids)).relu() @ self.free
        return x @ self.experts[1] + torch.einsum("bk,ekf->bf", x, self.experts)


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(number))


def train(model: Any, rank: int, steps: int) -> bytes:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(batch(2 * step + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return b"".join(as_bytes(etp.whole(each)) for each in model.parameters())


def _evaluated(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        for mode in ("deferred", "inline"):
            torch.manual_seed(0)
            alone = train(etp.shard_module_(Net(), group, mode=mode), rank, 30)
            torch.manual_seed(0)
            model = etp.shard_module_(Net(), group, mode=mode)
            over, errors, outputs = threading.Event(), [], []

            def evaluate(model: Any = model, over: Any = over, errors: Any = errors, outputs: Any = outputs) -> None:
                try:
                    while not over.is_set():
                        with torch.no_grad():
                            outputs.append(model(batch(7)))
                except Exception as error:
                    errors.append(str(error))

            threads = [threading.Thread(target=evaluate) for _ in range(2)]
            for thread in threads:
                thread.start()
            beside = train(model, rank, 30)
            over.set()
            for thread in threads:
                thread.join()
            with torch.no_grad():
                last = model(batch(7))
            finite = all(bool(each.isfinite().all()) for each in outputs)
            found[mode] = (errors, beside == alone, len(outputs) > 0 and finite, last.shape == outputs[0].shape)
    return found


def test_evaluations_beside_a_training_change_nothing() -> None:
    for found in launch(_evaluated, 2):
        for mode in ("deferred", "inline"):
            assert found[mode] == ([], True, True, True)


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(tessera.Error) as caught:
        call()
    return str(caught.value)


def _two_trainers(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        torch.manual_seed(0)
        model = etp.shard_module_(Net(), group)

        def elsewhere(call: Callable[[], object]) -> str:
            told: list[str] = []
            thread = threading.Thread(target=lambda: told.append(error_of(call)), name="other")
            thread.start()
            thread.join()
            return told[0]

        def beside(_: torch.Tensor) -> None:
            found.setdefault("backward", elsewhere(lambda: model(batch(rank)).sum().backward()))

        x = model.emb(batch(rank))
        x.register_hook(beside)  # once the backward has come to another weight
        model.a(x).square().mean().backward()
        with etp.update(model):
            found["update"] = elsewhere(lambda: etp.update(model).__enter__())
        thread = threading.Thread(target=lambda: found.__setitem__("later", train(model, rank, 2)))
        thread.start()
        thread.join()
        train(model, rank, 1)
    return found


def test_a_second_training_thread_is_refused_by_name() -> None:
    first, second = launch(_two_trainers, 2)
    assert first["later"] == second["later"]
    for found in (first, second):
        for name, what in (("backward", "a backward"), ("update", "an update")):
            assert "thread 'other'" in found[name] and f"'MainThread' is within {what}" in found[name], found[name]
