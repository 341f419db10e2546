"""Files of ranks' local tensors, as `tessera recv --out` writes them, loaded into models that are cut in other ways."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import as_bytes
from safetensors.torch import save_file
from saved_files import bytes_of
from tessera import checkpoint, etp
from torch_ranks import launch

LAYOUTS = {
    "rows": "4:S0",
    "columns": "4:S1",
    "grid": "a=2,b=2:S0,S1",
    "strided": "a=2,b=2:S0*2,S0",
    "ragged": "4:G0[0;1;1;9;17]",
    "some": "2@1-2:S0",
    "replicas": "a=2,b=2:R,S0",
    "whole": "4:R",
}
SHAPE, WORLD = (17, 11), 4


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Module()
    for number, name in enumerate(LAYOUTS):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        model.register_parameter(name, torch.nn.Parameter(torch.randn(SHAPE).to(dtype)))
    model.register_buffer("scalar", torch.randn(()))
    return model


def _write(folder: pathlib.Path, version: int = 3, changes: Callable[[Any], None] = lambda described: None) -> None:
    folder.mkdir(exist_ok=True)
    state = _model(1).state_dict()
    for rank in range(WORLD):
        tensors, described = {}, {}
        for name, whole in state.items():
            layout = tessera.Layout(LAYOUTS.get(name, "4:R"))
            owned = layout.owned(tuple(whole.shape), rank)
            if owned is None:
                continue
            local = whole
            for dim, intervals in enumerate(owned):
                local = local.index_select(dim, torch.cat([torch.arange(*each) for each in intervals]))
            tensors[name] = local.contiguous()
            described[name] = {"shape": list(whole.shape), "dtype": "?", "layout": str(layout)}
        changes(described)
        metadata = {"version": str(version), "tensors": json.dumps(described)}
        save_file(tensors, folder / f"rank-{rank:05}.safetensors", metadata)


def _on_two(rank: int, folder: pathlib.Path) -> dict[str, bytes]:
    with etp.init_group(timeout=60) as group:
        model = etp.shard_module_(_model(2), group, min_elements=2)
        checkpoint.load(model, None, folder)
        return {name: as_bytes(etp.whole(tensor)) for name, tensor in model.named_parameters()}


def test_they_are_loaded_whole(tmp_path: pathlib.Path) -> None:
    _write(tmp_path / "out")
    model = _model(2)
    assert checkpoint.load(model, None, tmp_path / "out").metadata == {"version": "3"}
    assert bytes_of(model.state_dict()) == bytes_of(_model(1).state_dict())


def test_ranks_load_their_rows(tmp_path: pathlib.Path) -> None:
    _write(tmp_path / "out")
    expected = {name: as_bytes(tensor) for name, tensor in _model(1).named_parameters()}
    assert launch(functools.partial(_on_two, folder=tmp_path / "out"), 2) == [expected] * 2


def _refused(pattern: str, folder: pathlib.Path) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=pattern):
        checkpoint.load(_model(2), None, folder)


def test_a_rank_that_is_missing(tmp_path: pathlib.Path) -> None:
    _write(tmp_path / "out")
    (tmp_path / "out" / "rank-00003.safetensors").unlink()
    _refused("elements of tensor rows that are wanted here", tmp_path / "out")


def test_two_versions(tmp_path: pathlib.Path) -> None:
    _write(tmp_path / "out")
    _write(tmp_path / "later", version=4)
    (tmp_path / "later" / "rank-00002.safetensors").rename(tmp_path / "out" / "rank-00002.safetensors")
    _refused("of versions 3 and 4", tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        lambda described: described.pop("scalar"),
        lambda described: described["whole"].update(layout="4:S0"),
        lambda described: described["whole"].update(layout="nonsense"),
        lambda described: described["whole"].update(layout=7),
        lambda described: described["whole"].update(shape=[17]),
        lambda described: described["whole"].update(shape="x"),
        lambda described: described.update(whole=[]),
    ],
)
def test_hostile_descriptions(tmp_path: pathlib.Path, changes: Callable[[Any], None]) -> None:
    _write(tmp_path / "out", changes=changes)
    _refused("it is not what tessera recv --out writes", tmp_path / "out")
