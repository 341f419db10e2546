"""Norms of logical gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import tessera
import torch
from etp_models import Run, adamw, as_bytes, built
from tessera import etp
from torch_ranks import launch

ORDERS = (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0)


def _norms(rank: int, size: int) -> dict[str, Any]:
    with etp.init_group() as group:
        model = built()
        run = Run(size, rank, group if size > 1 else None)
        run.sharded(model)
        for _ in range(4 // size):
            run.backward(model, scale=size / 4)
        gradient = model.emb.weight.grad
        found: dict[str, Any] = {
            "etp": [as_bytes(etp.clip_grad_norm_(model.parameters(), math.inf, order)) for order in ORDERS],
            "torch": [
                [torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf, order, foreach=foreach).item()]
                for order in ORDERS
                for foreach in (None, True)
            ],
            "one": [gradient.norm().item(), torch.norm(gradient).item(), torch.linalg.vector_norm(gradient, 1).item()],
            "by rows": as_bytes(torch.linalg.vector_norm(gradient, 2, dim=1)),
            "doubled": as_bytes(etp.whole(gradient * 2)),
            "largest": gradient.abs().max().item(),
            "rows": etp.local(gradient).shape[0],
            "plain": type(etp.local(gradient)) is torch.Tensor,
        }
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        found["clipped"] = etp.clip_grad_norm_(model.parameters(), math.inf).item()
        optimizer = adamw(model.parameters())
        optimizer.step()
        found["kept"] = type(model.emb.weight.grad).__name__
        return found


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    return {size: launch(functools.partial(_norms, size=size), size) for size in (1, 2, 4)}


def test_every_number_of_ranks_gives_the_same_bytes(found: dict[int, list[dict[str, Any]]]) -> None:
    assert all(each["etp"] == found[1][0]["etp"] for ranks in found.values() for each in ranks)


def test_torchs_functions_give_the_logical_norm(found: dict[int, list[dict[str, Any]]]) -> None:
    for ranks in found.values():
        for each in ranks:
            assert torch.allclose(torch.tensor(each["torch"]), torch.tensor(found[1][0]["torch"]), rtol=1e-5)
            assert each["one"] == pytest.approx(found[1][0]["one"], rel=1e-5)


def test_clipping_by_torch_leaves_the_norm_that_is_wanted(found: dict[int, list[dict[str, Any]]]) -> None:
    assert all(each["clipped"] == pytest.approx(0.05, rel=1e-4) for ranks in found.values() for each in ranks)


def test_all_else_sees_the_whole_gradient(found: dict[int, list[dict[str, Any]]]) -> None:
    (expected,) = found[1]
    for ranks in found.values():
        for each in ranks:
            assert all(each[what] == expected[what] for what in ("by rows", "doubled", "largest"))


def test_only_local_gives_this_ranks_rows(found: dict[int, list[dict[str, Any]]]) -> None:
    assert [each["rows"] for each in found[4]] == [64, 64, 64, 11]
    assert all(each["plain"] for each in found[4])
    assert {each["kept"] for each in found[4]} == {"LogicalTensor"}


def _apart(rank: int) -> dict[str, str]:
    """Take norms of what each rank has made of its rows by a number of its own."""
    found: dict[str, str] = {}
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)
        weight = model.up.weight
        takes = {
            "norm": lambda tensor: tensor.norm(),
            "vector_norm": torch.linalg.vector_norm,
            "foreach": lambda tensor: torch._foreach_norm([tensor, torch.ones(3)]),
            "sum": lambda tensor: tensor.sum(),
        }
        for name, take in takes.items():
            average = weight.detach().clone()
            average.lerp_(weight.detach() * 2, 0.1 * (rank + 1))
            with pytest.raises(tessera.Error) as caught:
                take(average)
            found[name] = str(caught.value)
        same = weight.detach().clone().mul_(2)
        assert all(math.isfinite(float(each)) for each in (same.norm(), *torch._foreach_norm([same])))
    return found


def test_norms_of_what_ranks_have_not_written_alike_are_refused() -> None:
    for found in launch(_apart, 2):
        for name, text in found.items():
            assert "up.weight: ranks 0 and 1 have not written the same" in text, (name, text)
