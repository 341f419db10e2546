"""load_state_dict() of a model that fails, on one rank or on all: others are told, what is published is what was
written, and the next load is a good one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from etp_models import as_bytes, built, loss_of
from tessera import etp
from torch_ranks import launch

SIZE = 2
FORMATS: dict[str, dict[str, str]] = {"plain": {}, "nvfp4": {".*weight": "nvfp4"}}
Error = tuple[str, str]


def _state(value: float) -> dict[Any, torch.Tensor]:
    return {name: torch.full_like(each, value) for name, each in built().state_dict().items()}


def _without(state: dict[Any, torch.Tensor], name: str) -> dict[Any, torch.Tensor]:
    del state[name]
    return state


def _raising_hook(*_: Any) -> None:
    raise ValueError("not this one")


def _failing_hook(model: torch.nn.Module) -> None:
    model.down.register_load_state_dict_pre_hook(_raising_hook)


Load = Callable[[torch.nn.Module], Any]
FAILURES: dict[str, Load] = {
    "a key that is no text": lambda model: model.load_state_dict({**_state(0.5), 3: torch.zeros(1)}),
    "a missing key": lambda model: model.load_state_dict(_without(_state(0.5), "up.bias")),
    "a missing sharded key": lambda model: model.load_state_dict(_without(_state(0.5), "up.weight")),
    "another shape": lambda model: model.load_state_dict({**_state(0.5), "down.weight": torch.ones(2, 2)}),
    "a hook": lambda model: (_failing_hook(model), model.load_state_dict(_state(0.5))),
}
TEXTS = {
    "a key that is no text": "'int' object has no attribute 'startswith'",
    "a missing key": 'Missing key(s) in state_dict: "up.bias"',
    "a missing sharded key": 'Missing key(s) in state_dict: "up.weight"',
    "another shape": "down.weight",
    "a hook": "not this one",
}
DIFFERENCES = {  # which ranks find before they write
    "a missing key": "the state of rank 0 has up.bias of shape (80,), and that of rank 1 has no tensor up.bias",
    "a missing sharded key": "the state of rank 0 has up.weight of shape (80, 32), and that of rank 1 has no tensor "
    "up.weight",
    "another shape": "the state of rank 0 has down.weight of shape (32, 80), and that of rank 1 has down.weight of "
    "shape (2, 2)",
}


def _error_of(call: Callable[[], Any]) -> Error:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _load_well(model: torch.nn.Module) -> None:
    model.load_state_dict(_state(0.5))


def _forward(model: torch.nn.Module) -> bytes:
    with torch.no_grad():
        return as_bytes(loss_of(model, 3))


def _failing(what: str, format: str, everywhere: bool, group: etp.Group, rank: int) -> Any:
    model = etp.shard_module_(built(), group, min_elements=256, formats=FORMATS[format])
    loss_of(model, rank).backward()
    load = FAILURES[what] if everywhere or rank == SIZE - 1 else _load_well
    told = [_error_of(lambda: load(model))]
    while not everywhere and len(told) < 3 and not told[-1][0]:  # a rank that has loaded is told in its next call
        told.append(_error_of(lambda: loss_of(model, rank).backward()))
    model.down._load_state_dict_pre_hooks.clear()
    model.load_state_dict(_state(0.25))
    other = etp.shard_module_(built(), group, min_elements=256, formats=FORMATS[format])
    other.load_state_dict(_state(0.25))
    assert _forward(model) == _forward(other)
    model.zero_grad()
    loss_of(model, rank).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return told[-1], _forward(model)


CASES = [(what, format, everywhere) for what in FAILURES for format in FORMATS for everywhere in (True, False)]


def _fail(rank: int) -> Any:
    with etp.init_group(timeout=20) as group:
        return {case: _failing(*case, group, rank) for case in CASES}


@pytest.fixture(scope="module")
def failures() -> list[Any]:
    return launch(_fail, SIZE)


@pytest.mark.parametrize(("what", "format", "everywhere"), CASES)
def test_a_load_that_fails_is_told_to_all(failures: list[Any], what: str, format: str, everywhere: bool) -> None:
    found = [rank[what, format, everywhere] for rank in failures]
    told = [text for (_, text), _ in found]
    if not everywhere and what in DIFFERENCES:
        assert told == [f"load_state_dict(): {DIFFERENCES[what]}: give all ranks the same; nothing was written"] * SIZE
    else:
        assert all(TEXTS[what] in text for text in told)
        assert ("rank 1: " in told[0]) is not everywhere
        assert not re.match(r"rank \d", told[1])
    assert found[0][1] == found[1][1]  # the weights behind the next load and a step


class Normed(torch.nn.Module):
    """A whole parameter that torch would assign before it comes to a sharded one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.down = torch.nn.Linear(32, 32)


def _assign(rank: int) -> Any:
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(Normed), group, min_elements=256)
        before = model.norm.weight, model.norm.weight.detach().clone()
        state = {name: torch.ones_like(each) for name, each in built(Normed).state_dict().items()}
        told = _error_of(lambda: model.load_state_dict(state_dict=state, assign=True))
        assert model.norm.weight is before[0] and torch.equal(*before)
        model.load_state_dict({"norm.weight": state["norm.weight"]}, strict=False, assign=True)  # of no sharded one
        return told, [as_bytes(etp.whole(each)) for each in model.parameters()]


def test_a_refused_assignment_replaces_nothing() -> None:
    found = launch(_assign, SIZE)
    assert found[0] == found[1]
    assert "down.weight is sharded, and load_state_dict(assign=True) would replace its memory" in found[0][0][1]
