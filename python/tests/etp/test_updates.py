"""etp.update(): writes of a program's own as one batch, of which ranks compare the end, or which is void by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tessera
import torch
from etp_models import as_bytes, built, loss_of
from tessera import etp
from torch_ranks import launch


def _sharded(group: Any) -> Any:
    return etp.shard_module_(built(), group, reduction="sum", min_elements=256)


def _step(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.mul_(0.99).sub_(parameter.grad, alpha=0.1)
            parameter.clamp_(-0.5, 0.5)
    model.zero_grad()


def _by_hand(rank: int) -> Any:
    with etp.init_group(timeout=30) as group:
        model = _sharded(group)
        for number in range(3):
            loss_of(model, 2 * number + rank).backward()
            with etp.update(model):
                _step(model)
        report = etp.report(model)
        return [as_bytes(etp.whole(each)) for each in model.parameters()], report.updates, report.writes


def test_writes_within_are_one_update() -> None:
    torch.set_num_threads(1)
    plain = built()
    for number in range(3):
        for rank in range(2):
            loss_of(plain, 2 * number + rank).backward()
        _step(plain)
    for weights, updates, writes in launch(_by_hand, 2):
        assert weights == [as_bytes(each) for each in plain.parameters()]
        assert (updates, writes) == (3, 0)


def _refused(rank: int, what: str) -> list[str]:
    with etp.init_group(timeout=20) as group:
        model = _sharded(group)
        texts = []

        def update() -> None:
            with etp.update(model), torch.no_grad():
                if what == "other numbers":
                    model.up.weight.mul_(rank + 2)
                elif what == "other weights":
                    (model.up.weight if rank == 0 else model.down.weight).mul_(2)
                elif what == "an error on one rank":
                    model.up.weight.mul_(2)
                    if rank == 1:
                        raise ValueError("no")
                else:
                    raise ValueError(f"rank {rank} says no")

        with pytest.raises((tessera.Error, ValueError)) as caught:
            update()
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
        try:
            loss_of(model, rank)
        except tessera.InvalidArgumentError as error:
            texts.append(str(error))
        model.load_state_dict(built().state_dict())
        loss_of(model, rank).backward()
        with etp.update(model):
            _step(model)
        return texts


def test_other_numbers_are_named_at_its_end() -> None:
    for refused, used in launch(functools.partial(_refused, what="other numbers"), 2):
        assert "etp.update() has not written the same on ranks 0 and 1, first into sharded tensor up.weight" in refused
        assert "emb.weight is damaged" in used


def test_other_weights_are_named_at_its_end() -> None:
    (first, _), (second, _) = launch(functools.partial(_refused, what="other weights"), 2)
    assert "ranks 0 and 1, first into sharded tensor up.weight" in first
    assert "ranks 0 and 1, first into sharded tensor down.weight" in second


def test_an_error_behind_a_write_is_named_on_all() -> None:
    (first, first_used), (second, second_used) = launch(functools.partial(_refused, what="an error on one rank"), 2)
    assert "rank 1: etp.update() has failed: ValueError: no; etp.update() had written a part" in first
    assert second.startswith("ValueError: no")
    assert "emb.weight is damaged" in first_used and "emb.weight is damaged" in second_used


def test_an_error_before_a_write_leaves_everything_as_it_was() -> None:
    for texts in launch(functools.partial(_refused, what="nothing"), 2):
        (text,) = texts
        assert text.startswith("ValueError: rank")
