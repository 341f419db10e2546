"""What save() and load() refuse, by name; and files that are damaged or hostile."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from killing import on_ranks
from safetensors.torch import save_file
from saved_files import bytes_of, index_of, optimizer_index, tensors_of
from tessera import checkpoint
from tessera.checkpoint import _save
from tessera.checkpoint._ranks import Ranks
from torch import nn


def _model(**changed: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    for name, shape in {"a": (3, 4), "b": (5,), **changed}.items():
        if shape is not None:
            model.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return model


def _adam(model: nn.Module, steps: int = 1, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    for _ in range(steps):
        optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    model = _model()
    checkpoint.save(model, _adam(model), tmp_path / "saved", metadata={"step": "1"})
    return tmp_path / "saved"


def _refused(kind: type[tessera.Error], pattern: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


# --- names, shapes and types


def test_missing_and_unexpected_names_are_told_and_nothing_is_written(saved: pathlib.Path) -> None:
    model = _model(b=None, c=(2,))
    before = bytes_of(model.state_dict())
    _refused(
        tessera.InvalidArgumentError,
        "saved: it is no checkpoint of this model: missing: c; not in the model: b; strict=False loads",
        lambda: checkpoint.load(model, None, saved),
    )
    assert bytes_of(model.state_dict()) == before
    loaded = checkpoint.load(model, None, saved, strict=False)
    assert (loaded.missing, loaded.unexpected) == (["c"], ["b"])
    assert bytes_of(model.state_dict()) == {"a": bytes_of(_trained(saved))["a"], "c": before["c"]}


def _trained(saved: pathlib.Path) -> dict[str, torch.Tensor]:
    return tensors_of(saved)


def test_many_names_are_counted(saved: pathlib.Path) -> None:
    model = _model(**{f"w{number:02}": (1,) for number in range(20)})
    _refused(
        tessera.InvalidArgumentError,
        "missing: w00, w01, w02, w03, w04 and 15 more",
        lambda: checkpoint.load(model, None, saved),
    )


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_and_types_are_told(saved: pathlib.Path, strict: bool) -> None:
    model = _model(b=(6,))
    model.a = nn.Parameter(model.a.detach().to(torch.bfloat16))
    before = bytes_of(model.state_dict())
    _refused(
        tessera.InvalidArgumentError,
        re.escape("a is f32 [3, 4], in the model bf16 [3, 4], b is f32 [5], in the model f32 [6]"),
        lambda: checkpoint.load(model, None, saved, strict=strict),
    )
    assert bytes_of(model.state_dict()) == before


# --- optimisers


def test_a_checkpoint_without_an_optimiser(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = _model()
    checkpoint.save(model, None, saved)
    assert not [name for name in os.listdir(saved) if "optimizer" in name]
    _refused(
        tessera.NotFoundError,
        r"it has no optimiser: load\(model, None, path\)",
        lambda: checkpoint.load(model, _adam(model), saved),
    )
    save_file(dict(model.state_dict()), tmp_path / "m.safetensors")
    _refused(
        tessera.NotFoundError,
        "it has no optimiser",
        lambda: checkpoint.load(model, _adam(model), tmp_path / "m.safetensors"),
    )


def test_other_groups_of_parameters(saved: pathlib.Path) -> None:
    model = _model()
    two = torch.optim.AdamW([{"params": [model.a]}, {"params": [model.b]}])
    _refused(
        tessera.InvalidArgumentError,
        "its optimiser has 1 param_groups, and this one 2",
        lambda: checkpoint.load(model, two, saved),
    )
    checkpoint.save(model, two, saved)
    other = torch.optim.AdamW([{"params": [model.b]}, {"params": [model.a]}])
    _refused(
        tessera.InvalidArgumentError,
        r"param_groups\[0\] has no b, which is in that of this optimiser",
        lambda: checkpoint.load(model, other, saved),
    )


def test_an_optimiser_of_another_model(tmp_path: pathlib.Path, saved: pathlib.Path) -> None:
    other = _adam(_model())
    for call in (
        lambda: checkpoint.save(_model(), other, tmp_path / "x"),
        lambda: checkpoint.load(_model(), other, saved),
    ):
        _refused(tessera.InvalidArgumentError, r"its parameter 0, of shape \(3, 4\), is none of the model's", call)
    _refused(
        tessera.InvalidArgumentError, "give a torch optimiser", lambda: checkpoint.save(_model(), {}, tmp_path / "x")
    )  # type: ignore[arg-type]


def test_states_that_are_no_tensors_and_no_plain_values(tmp_path: pathlib.Path) -> None:
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: model.a.square().sum().backward() or model.a.sum())
    _refused(
        tessera.InvalidArgumentError,
        "the state 'old_dirs' of a is a Tensor, which a checkpoint cannot hold",
        lambda: checkpoint.save(model, optimizer, tmp_path / "x"),
    )
    optimizer = _adam(model)
    optimizer.state[model.b]["odd"] = object()
    _refused(
        tessera.InvalidArgumentError,
        "the state 'odd' of b is a object, which a checkpoint cannot hold",
        lambda: checkpoint.save(model, optimizer, tmp_path / "x"),
    )
    assert not (tmp_path / "x").exists()


def test_plain_values_come_back_as_they_were(tmp_path: pathlib.Path) -> None:
    model = _model()
    options = {
        "lr": torch.tensor(0.1),
        "betas": (0.5, 0.25),
        "text": "é",
        "none": None,
        "yes": True,
        "many": [1, (2.5, float("inf")), {"deep": -(1 << 62)}],
        "nan": float("nan"),
    }
    optimizer = torch.optim.AdamW([{"params": [model.a], **options}, {"params": [model.b], "lr": 1e-300}])
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.state[model.a]["plain"] = (1, 2.5)
    checkpoint.save(model, optimizer, tmp_path / "x")
    again = torch.optim.AdamW([{"params": [model.a], "lr": 9.0}, {"params": [model.b]}])
    checkpoint.load(model, again, tmp_path / "x")
    found, expected = again.state_dict(), optimizer.state_dict()
    assert repr(found["param_groups"]) == repr(expected["param_groups"])
    assert found["param_groups"][0]["many"] == options["many"]
    assert repr(sorted(found["state"][0].items())) == repr(sorted(expected["state"][0].items()))
    assert found["state"][0]["plain"] == (1, 2.5)


# --- models


def test_models_that_have_more_than_tensors(tmp_path: pathlib.Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 1}

    _refused(
        tessera.InvalidArgumentError,
        r"module 0 has get_extra_state\(\)",
        lambda: checkpoint.save(nn.Sequential(Extra(2, 2)), None, tmp_path / "x"),
    )
    with torch.device("meta"):
        meta = _model()
    _refused(tessera.InvalidArgumentError, "meta device", lambda: checkpoint.save(meta, None, tmp_path / "x"))


# --- arguments


@pytest.mark.parametrize("metadata", [{"step": 1}, {1: "step"}, "step", [("a", "b")], {"a": "\ud800"}])
def test_metadata_is_text(tmp_path: pathlib.Path, metadata: Any) -> None:
    _refused(
        tessera.InvalidArgumentError,
        "metadata",
        lambda: checkpoint.save(_model(), None, tmp_path / "x", metadata=metadata),
    )
    assert not (tmp_path / "x").exists()


def test_groups_and_paths(tmp_path: pathlib.Path) -> None:
    _refused(
        tessera.InvalidArgumentError,
        "group='world': give a torch ProcessGroup",
        lambda: checkpoint.save(_model(), None, tmp_path / "x", group="world"),
    )
    (tmp_path / "file").write_text("")
    _refused(tessera.InvalidArgumentError, "file", lambda: checkpoint.save(_model(), None, tmp_path / "file"))
    _refused(tessera.NotFoundError, "absent", lambda: checkpoint.load(_model(), None, tmp_path / "absent"))
    for path in (7, None, b"bytes"):
        _refused(tessera.InvalidArgumentError, "path", lambda path=path: checkpoint.save(_model(), None, path))
        _refused(tessera.InvalidArgumentError, "path", lambda path=path: checkpoint.load(_model(), None, path))


def test_checkpoints_of_others_are_not_replaced(tmp_path: pathlib.Path) -> None:
    for name, content in [("model.safetensors", b""), ("model.safetensors.index.json", b'{"weight_map":{}}')]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(content)
        _refused(
            tessera.InvalidArgumentError,
            f"it holds {name}, which save\\(\\) has not written",
            lambda to=folder: checkpoint.save(_model(), None, to),
        )
        assert (folder / name).read_bytes() == content
        assert os.listdir(folder) == [name]


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"metadata": 7}'])
def test_an_index_that_is_none_is_not_replaced(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    _refused(tessera.InvalidArgumentError, "index", lambda: checkpoint.save(_model(), None, tmp_path))
    _refused(tessera.InvalidArgumentError, "index", lambda: checkpoint.load(_model(), None, tmp_path))
    assert (tmp_path / "model.safetensors.index.json").read_bytes() == content


def test_other_files_of_the_folder_stay(saved: pathlib.Path) -> None:
    names = {"config.json", "model-1.safetensors", "optimizer.pt", ".hidden.new", "model-1-00001-of-00001.bin"}
    for name in names:
        (saved / name).write_text("{}")
    checkpoint.save(_model(), None, saved)
    assert names <= set(os.listdir(saved))


# --- ranks that do not agree


def _of_rank(function: Callable[[int], Any]) -> list[str]:
    def call(rank: int) -> str:
        function(rank)
        return "done"

    return [str(each) for each in on_ranks(2, call)]


def test_ranks_that_differ(tmp_path: pathlib.Path, saved: pathlib.Path) -> None:
    save, load = checkpoint.save, checkpoint.load
    cases: dict[str, Callable[[int], Any]] = {
        "ranks give different paths or metadata": lambda rank: save(_model(), None, tmp_path / str(rank)),
        "save(): ranks give different": lambda rank: save(_model(), None, tmp_path / "x", metadata={"r": str(rank)}),
        "tensor b: it is f32 (6,) on rank 1 and f32 (5,)": lambda rank: save(
            _model(b=(5 + rank,)), None, tmp_path / "x"
        ),
        "load(): ranks give different arguments": lambda rank: load(_model(), None, saved, strict=rank == 0),
    }
    for message, call in cases.items():
        for said in _of_rank(call):
            assert said.startswith("MismatchError: "), said
            assert message in said
    said = _of_rank(lambda rank: save(model := _model(), _adam(model) if rank else None, tmp_path / "x"))
    assert all("some ranks give an optimizer and some do not" in each for each in said)
    assert list(tmp_path.rglob("*.new")) == []


def test_one_rank_that_cannot_fails_all(saved: pathlib.Path) -> None:
    said = _of_rank(lambda rank: checkpoint.load(_model(**({"c": (1,)} if rank else {})), None, saved))
    assert all("missing: c" in each for each in said), said
    said = _of_rank(lambda rank: checkpoint.load(_model(**({"a": (9,)} if rank else {})), None, saved))
    assert said[0].startswith("InvalidArgumentError: rank 1: "), said
    assert "a is f32 [3, 4], in the model f32 [9]" in said[1]


# --- files


def test_a_file_that_is_truncated(saved: pathlib.Path) -> None:
    for index in (index_of(saved), optimizer_index(saved)):
        (name,) = set(index["weight_map"].values())
        whole = (saved / name).read_bytes()
        for length in (0, 7, 8, 100, len(whole) - 1):
            (saved / name).write_bytes(whole[:length])
            model = _model()
            before = bytes_of(model.state_dict())
            _refused(
                tessera.InvalidArgumentError, name, lambda model=model: checkpoint.load(model, _adam(model, 0), saved)
            )
            assert bytes_of(model.state_dict()) == before
        (saved / name).unlink()
        _refused(tessera.NotFoundError, name, lambda: checkpoint.load(model := _model(), _adam(model, 0), saved))
        (saved / name).write_bytes(whole)
    checkpoint.load(model := _model(), _adam(model, 0), saved)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no index": lambda index: [],
    "metadata": lambda index: {**index, "metadata": 7},
    "state": lambda index: {**index, "metadata": {**index["metadata"], "state": 7}},
    "entry": lambda index: {**index, "metadata": {**index["metadata"], "state": {"a": {"tensors": 7, "values": {}}}}},
    "keys": lambda index: {**index, "metadata": {**index["metadata"], "state": {"a": {"tensors": [7], "values": {}}}}},
    "value": lambda index: {
        **index,
        "metadata": {
            **index["metadata"],
            "state": {"a": {"tensors": [], "values": {"k": {"scalar": 1, "dtype": "?"}}}},
        },
    },
    "unknown": lambda index: {
        **index,
        "metadata": {**index["metadata"], "state": {"a": {"tensors": [], "values": {"k": {"call": "os.system"}}}}},
    },
    "groups": lambda index: {**index, "metadata": {**index["metadata"], "param_groups": {}}},
    "group": lambda index: {**index, "metadata": {**index["metadata"], "param_groups": [{"params": ["a", "b"]}]}},
    "absent": lambda index: {
        **index,
        "metadata": {**index["metadata"], "state": {"a": {"tensors": ["exp_avg", "gone"], "values": {}}}},
    },
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_optimiser_index_that_is_hostile(saved: pathlib.Path, case: str) -> None:
    name = index_of(saved)["metadata"]["tessera"]["optimizer"]
    (saved / name).write_text(json.dumps(HOSTILE[case](optimizer_index(saved))))
    model = _model()
    optimizer = _adam(model, 0)
    before = bytes_of(model.state_dict())
    _refused(tessera.InvalidArgumentError, name, lambda: checkpoint.load(model, optimizer, saved))
    assert bytes_of(model.state_dict()) == before
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("name", ["../saved/optimizer-1.index.json", "/etc/passwd", "model.safetensors.index.json", 7])
def test_an_index_that_names_files_elsewhere(saved: pathlib.Path, name: Any) -> None:
    index = index_of(saved)
    index["metadata"]["tessera"]["optimizer"] = name
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused(
        tessera.NotFoundError, "it has no optimiser", lambda: checkpoint.load(model := _model(), _adam(model, 0), saved)
    )


def test_an_index_that_names_files_elsewhere_lets_none_be_removed(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "precious.safetensors").write_text("")
    (saved / "config.json").write_text("")
    index = index_of(saved)
    index["weight_map"] = {"a": "../precious.safetensors", "b": "config.json"}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint.save(_model(), None, saved)
    assert (tmp_path / "precious.safetensors").exists()
    assert (saved / "config.json").exists()


def test_ranks_that_make_other_calls(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    said = _of_rank(
        lambda rank: checkpoint.load(_model(), None, saved) if rank else checkpoint.save(_model(), None, tmp_path / "x")
    )
    assert said[0].startswith("MismatchError: save: begin: rank 1 is at 'load: open'"), said
    assert said[1].startswith("MismatchError: load: open: rank 0 is at 'save: begin'"), said


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xff",
        b"7",
        b"[" * 100_000,
        b'{"at": "save: begin"}',
        b'{"at": 7, "value": 1}',
        b'{"at": "save: begin", "error": 7}',
        b'{"at": "save: begin", "error": ["internal", 7]}',
        b'{"at": "save: begin", "value": 7}',
        b'{"at": "save: begin", "value": {"path": 1}}',
        b'{"at": "save: begin", "value": {"path": "PATH", "metadata": {}}}',
        b'{"at": "save: begin", "value": {"path": "PATH", "metadata": {}, "model": 7}}',
    ],
)
def test_a_rank_that_sends_anything(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, blob: bytes) -> None:
    path = tmp_path / "x"
    other = blob.replace(b"PATH", str(path).encode())
    ranks = Ranks(0, 2, lambda what, own: [own, other])
    monkeypatch.setattr(_save, "ranks_of", lambda *_: ranks)
    _refused(tessera.MismatchError, "rank", lambda: checkpoint.save(_model(), None, path))
    assert os.listdir(path) == []
