"""Ready-made maps between checkpoints', transformers' and an engine's names, against the engine's own slicing."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from ranks import transfer
from tessera import maps
from tiny_models import (
    MODELS,
    Model,
    assert_engines_same,
    assert_no_byte_twice,
    assert_same,
    bytes_of,
    registered,
)

CASES = [(kind, {}, tp) for kind in MODELS for tp in (1, 2, 4)]
CASES += [(kind, {"num_key_value_heads": kv}, 4) for kind in ("llama", "qwen3_moe") for kv in (8, 1)]
CASES += [("qwen3", {"vocab_size": 40}, 4)]  # of which the engine's last rank has nothing

_models: dict[str, Model] = {}


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    kind, changes = request.param
    key = f"{kind}{changes}"
    if key not in _models:
        _models[key] = Model(kind, tmp_path_factory.mktemp(kind), **changes)
    return _models[key]


def _case_id(kind: str, changes: dict[str, int], tp: int) -> str:
    return "-".join([kind, *(f"{field}={value}" for field, value in changes.items()), f"tp{tp}"])


cases = pytest.mark.parametrize(
    ("model", "tp"),
    [pytest.param((kind, changes), tp, id=_case_id(kind, changes, tp)) for kind, changes, tp in CASES],
    indirect=["model"],
)


@cases
def test_checkpoint_to_engine(model: Model, tp: int) -> None:
    engines = model.engines(tp, load=False)
    figures = transfer([(model.checkpoint, None)], registered(engines))
    assert_engines_same(engines, model.engines(tp, load=True))
    assert_no_byte_twice(figures, bytes_of(*(one.params for one in engines)) - model.padding)


@cases
def test_engine_to_checkpoint(model: Model, tp: int) -> None:
    found = model.empty_checkpoint()
    figures = transfer(registered(model.engines(tp, load=True)), [(found, None)])
    assert_same(found, model.checkpoint)
    assert_no_byte_twice(figures, bytes_of(found))


@cases
def test_transformers_to_engine(model: Model, tp: int) -> None:
    engines = model.engines(tp, load=False)
    figures = transfer([(model.memory, maps.transformers(model.config))], registered(engines))
    assert_engines_same(engines, model.engines(tp, load=True))
    assert_no_byte_twice(figures, bytes_of(*(one.params for one in engines)) - model.padding)


@cases
def test_engine_to_transformers(model: Model, tp: int) -> None:
    found = model.empty()
    figures = transfer(registered(model.engines(tp, load=True)), [(found, maps.transformers(model.config))])
    assert_same(found.state_dict(), model.memory.state_dict())
    assert_no_byte_twice(figures, bytes_of(model.checkpoint))


both_ways = pytest.mark.parametrize(
    "model",
    [pytest.param((kind, {}), id=kind) for kind in MODELS],
    indirect=True,
)


@both_ways
def test_checkpoint_to_transformers(model: Model) -> None:
    found = model.empty()
    figures = transfer([(model.checkpoint, None)], [(found, maps.transformers(model.config))])
    assert_same(found.state_dict(), model.memory.state_dict())
    assert_no_byte_twice(figures, bytes_of(model.checkpoint))


@both_ways
def test_transformers_to_checkpoint(model: Model) -> None:
    found = model.empty_checkpoint()
    figures = transfer([(model.memory, maps.transformers(model.config))], [(found, None)])
    assert_same(found, model.checkpoint)
    assert_no_byte_twice(figures, bytes_of(found))
