"""Files of ranks' local tensors, as `tessera recv --out` writes them, loaded into models that are cut in other ways."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import as_bytes
from safetensors.torch import save_file
from saved_files import bytes_of
from tessera import _core, checkpoint, etp
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


def _checksum(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.").replace("float", "f")
    region = [[(0, size)] for size in tensor.shape]
    return "{:016x}{:016x}".format(*_core.region_digest(dtype, tuple(tensor.shape), region, tensor.data_ptr()))


def _write(
    folder: pathlib.Path,
    version: int = 3,
    changes: Callable[[Any], None] = lambda described: None,
    checksums: bool = True,
) -> None:
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
        if checksums:
            sums = {name: _checksum(local) for name, local in tensors.items() if local.numel()}
            metadata["tessera.checksums"] = json.dumps(sums)
        save_file(tensors, folder / f"rank-{rank:05}.safetensors", metadata)


def _flip(path: pathlib.Path, name: str) -> None:
    """Change a bit of the last byte of a tensor."""
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", content)
    content[7 + length + json.loads(content[8 : 8 + length])[name]["data_offsets"][1]] ^= 4
    path.write_bytes(content)


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


# --- checksums


def test_files_without_checksums_are_loaded_as_they_are(tmp_path: pathlib.Path) -> None:
    _write(tmp_path / "out", checksums=False)
    model = _model(2)
    assert checkpoint.load(model, None, tmp_path / "out").metadata == {"version": "3"}
    assert bytes_of(model.state_dict()) == bytes_of(_model(1).state_dict())


@pytest.mark.parametrize("name", [*LAYOUTS, "scalar"])
def test_a_flipped_bit_is_named_with_its_file(tmp_path: pathlib.Path, name: str) -> None:
    _write(tmp_path / "out")
    path = tmp_path / "out" / f"rank-{2 if name in ('rows', 'columns', 'some') else 0:05}.safetensors"
    if name == "ragged":
        path = tmp_path / "out" / "rank-00003.safetensors"
    _flip(path, name)
    with pytest.raises(tessera.DataLossError, match=f"{path}: tensor '{name}' is damaged.*verify=False"):
        checkpoint.load(_model(2), None, tmp_path / "out")
    checkpoint.load(_model(2), None, tmp_path / "out", verify=False)


def _refusals(rank: int, folder: pathlib.Path) -> dict[str, str]:
    """Load the files, each with another tensor damaged, on ranks that read parts of them."""
    said = {}
    with etp.init_group(timeout=60) as group:
        for name in LAYOUTS:
            model = etp.shard_module_(_model(2), group, min_elements=2)
            try:
                checkpoint.load(model, None, folder / name)
                said[name] = "it was loaded"
            except tessera.DataLossError as error:
                said[name] = str(error)
    return said


def test_ranks_that_read_parts_find_a_flipped_bit(tmp_path: pathlib.Path) -> None:
    paths = {}
    for name in LAYOUTS:
        _write(tmp_path / name)
        paths[name] = tmp_path / name / f"rank-{3 if name == 'ragged' else 1 if name == 'some' else 0:05}.safetensors"
        _flip(paths[name], name)
    for said in launch(functools.partial(_refusals, folder=tmp_path), 2):
        named = {name for name, text in said.items() if text.startswith(f"{paths[name]}: tensor '{name}' is damaged")}
        assert named == set(LAYOUTS), said


def test_a_file_of_one_rank_is_checked_alone(tmp_path: pathlib.Path) -> None:
    _write(tmp_path / "out")
    path = tmp_path / "out" / "rank-00001.safetensors"
    model = torch.nn.Module()
    model.register_buffer("rows", torch.zeros(5, 11))
    assert "tessera.checksums" not in checkpoint.load(model, None, path, strict=False).metadata
    _flip(path, "rows")
    with pytest.raises(tessera.DataLossError, match=f"{path}: tensor 'rows' is damaged"):
        checkpoint.load(model, None, path, strict=False)


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3}', '{"rows": "no digits"}', "{"])
def test_checksums_that_nobody_writes_are_refused(tmp_path: pathlib.Path, text: str) -> None:
    save_file({"rows": torch.zeros(3)}, tmp_path / "m.safetensors", {"tessera.checksums": text})
    with pytest.raises(tessera.InvalidArgumentError, match=r"m\.safetensors"):
        checkpoint.load(torch.nn.Module(), None, tmp_path / "m.safetensors", strict=False)


def test_metadata_of_a_caller_leaves_the_key_of_checksums_alone(tmp_path: pathlib.Path) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=r"metadata: the key 'tessera\.checksums'"):
        checkpoint.save(_model(1), None, tmp_path / "out", metadata={"tessera.checksums": "{}"})


@pytest.mark.parametrize("name", [b"\xff.safetensors", b"\xed\xa0\x80.safetensors", b"\x1b[2J.safetensors"])
def test_a_file_name_that_is_not_utf8_is_shown(tmp_path: pathlib.Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    pathlib.Path(os.fsdecode(path)).write_bytes(b"no header")
    with pytest.raises(tessera.InvalidArgumentError, match=r"safetensors: a header of"):
        checkpoint.load(_model(1), None, tmp_path)
