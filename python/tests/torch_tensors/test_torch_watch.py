"""What a Watch notices without locating anything, and what it leaves to locate()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tessera import InvalidArgumentError
from tessera._bus.registration import Registration
from torch import nn


def registered(tensors: Any, hold: Any = "strong") -> Registration:
    made = Registration.collect(tensors, lambda name: True, rank=0, fallback=None, missing_ok=False, hold=hold)
    made.locate()  # from now on they are watched
    return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def refuse(self: Registration, name: str) -> None:
    raise AssertionError(f"{name} was located")


@pytest.fixture
def no_locating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registration, "_locate", refuse)


def test_what_has_not_moved_is_not_located(request: pytest.FixtureRequest) -> None:
    model, state = Model(), {"w": torch.ones(3), "nested": {"b": torch.ones(2, 2).t()}}
    batches = [registered(model), registered(state)]
    request.getfixturevalue("no_locating")
    for batch in batches:
        assert len(batch.locate().memory) == 2


def test_the_storage_is_held_and_let_go() -> None:
    state = {"w": torch.ones(3)}
    batch = registered(state)
    (held,) = batch.locate().memory
    assert held.data_ptr() == state["w"].untyped_storage().data_ptr()
    state["w"].data = torch.zeros(3)  # frees nothing that is held
    assert bytes(held.tolist()) == bytes(torch.ones(3).view(torch.uint8).tolist())


def test_counters_are_bumped() -> None:
    model = Model()
    batch = registered(model)
    before = model.w._version, model.steps._version  # type: ignore[operator, union-attr]
    batch.locate().written()
    assert (model.w._version, model.steps._version) == tuple(each + 1 for each in before)  # type: ignore[union-attr]


def replace_data(model: Model) -> None:
    model.w.data = torch.ones(4, 6)


def replace_parameter(model: Model) -> None:
    model.w = nn.Parameter(torch.ones(4, 6))


def transpose(model: Model) -> None:
    model.w.data = model.w.data.view(6, 4).t()


def reinterpret(model: Model) -> None:
    model.w.data = model.w.data.view(torch.int32).to(torch.float32).view(4, 6)


def remove(model: Model) -> None:
    del model.w


@pytest.mark.parametrize("change", [replace_data, replace_parameter, transpose, reinterpret, remove])
def test_what_has_changed_is_located(change: Callable[[Model], None], request: pytest.FixtureRequest) -> None:
    model = Model()
    batch = registered(model)
    change(model)
    request.getfixturevalue("no_locating")
    with pytest.raises(AssertionError, match="was located"):
        batch.locate()


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(Model()), nn.Linear(2, 2), Model())


@pytest.mark.parametrize("path", ["0.0", "0", "1", "2"])
def test_modules_that_were_replaced_are_located(
    path: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = nested(), nested()
    batch = registered(model)
    model.set_submodule(path, other.get_submodule(path))
    with monkeypatch.context() as patch:
        patch.setattr(Registration, "_locate", refuse)
        with pytest.raises(AssertionError, match="was located"):
            batch.locate()
    batch.locate()
    batch.settle()
    batch.locate()  # from now on the other one is watched
    request.getfixturevalue("no_locating")
    batch.locate()


def test_a_module_beside_them_is_looked_at_once(request: pytest.FixtureRequest) -> None:
    model = nested()
    batch = registered(model)
    model.append(nn.ReLU())  # type: ignore[operator]
    batch.locate()
    request.getfixturevalue("no_locating")
    assert len(batch.locate().memory) == len(model.state_dict())


def test_storage_that_was_resized_is_refused() -> None:
    state = {"w": torch.ones(64)}
    batch = registered(state, "weak")
    state["w"].untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match="tensor w: its storage was resized from 256 to 0 bytes"):
        batch.locate()


def test_a_tensor_that_has_gone_is_refused() -> None:
    state = {"w": torch.ones(64)}
    batch = registered(state, "weak")
    del state["w"]
    with pytest.raises(InvalidArgumentError, match="tensor w: its memory was freed"):
        batch.locate()


def test_inference_tensors_are_located_each_time() -> None:
    with torch.inference_mode():
        state = {"w": torch.ones(3)}
    batch = registered(state)
    batch.locate().written()  # they have no counter
