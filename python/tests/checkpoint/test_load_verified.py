"""Checksums: a bit of any file that has changed is named at loading, however the tensors were cut and are cut now."""

from __future__ import annotations

import functools
import json
import pathlib
import struct
from typing import Any

import pytest
import tessera
import torch
from etp_models import Run, Tied, adamw, built
from saved_files import index_of, optimizer_index, tensors_of
from tessera import _core, checkpoint, etp
from torch.distributed.fsdp import fully_shard
from torch_ranks import launch

WAYS = ("etp", "FSDP2", "plain")


def _made(way: str, rank: int, size: int, group: Any, seed: int) -> Any:
    model = built(Tied, seed)
    if way == "etp":
        etp.shard_module_(model, group)
    elif way == "FSDP2":
        fully_shard(model)
    optimizer = adamw(model.parameters())
    Run(size, rank, group).train(model, optimizer, steps=1)
    return model, optimizer


def _saves(rank: int, size: int, folder: pathlib.Path) -> None:
    for way in WAYS:
        with etp.init_group(timeout=60) as group:
            torch.manual_seed(0)
            model, optimizer = _made(way, rank, size, group, seed=7)
            checkpoint.save(model, optimizer, folder / way)


def _place_of(path: pathlib.Path, name: str) -> int:
    """Where the last byte of a tensor is."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return 8 + length + int(json.loads(content[8 : 8 + length])[name]["data_offsets"][1]) - 1


def _flip(path: pathlib.Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << 6
    path.write_bytes(content)


def _loads(rank: int, size: int, folder: pathlib.Path) -> dict[str, str]:
    """What each way of loading says of one flipped bit in a tensor of the model, and of the optimiser."""
    found = {}
    for way in WAYS:
        with etp.init_group(timeout=60) as group:
            model, optimizer = _made(way, rank, size, group, seed=8)
            for saved in WAYS:
                at = folder / saved
                checkpoint.load(model, optimizer, at)
                for kind, index, name in (
                    ("model", index_of(at), "up.weight"),
                    ("bias", index_of(at), "norm.bias"),
                    ("optimizer", optimizer_index(at), "emb.weight.exp_avg_sq"),
                ):
                    path = at / index["weight_map"][name]
                    torch.distributed.barrier()
                    if rank == 0:
                        _flip(path, _place_of(path, name))
                    torch.distributed.barrier()
                    try:
                        checkpoint.load(model, optimizer, at)
                        said = "it was loaded"
                    except tessera.DataLossError as error:
                        said = str(error)
                    right = said.startswith(f"{path}: tensor '{name}' is damaged") and "verify=False" in said
                    checkpoint.load(model, optimizer, at, verify=False)
                    torch.distributed.barrier()
                    if rank == 0:
                        _flip(path, _place_of(path, name))
                    torch.distributed.barrier()
                    found[f"{kind} of {saved} by {way}"] = "" if right else said
                checkpoint.load(model, optimizer, at)
    return found


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2)])
def test_a_flipped_bit_is_named(folder: pathlib.Path, saving: int, loading: int) -> None:
    launch(functools.partial(_saves, size=saving, folder=folder), saving)
    for found in launch(functools.partial(_loads, size=loading, folder=folder), loading):
        assert found == dict.fromkeys(found, "")


def test_checksums_are_those_of_whole_tensors(folder: pathlib.Path) -> None:
    launch(functools.partial(_saves, size=2, folder=folder), 2)
    for way in WAYS:
        for index, sums in (
            (index_of(folder / way), index_of(folder / way)["metadata"]["tessera"]["checksums"]),
            (optimizer_index(folder / way), optimizer_index(folder / way)["metadata"]["checksums"]),
        ):
            tensors = tensors_of(folder / way, index)
            assert sums == {
                name: _core.local_digest(each.data_ptr(), "f32", tuple(each.shape), each.stride())
                for name, each in tensors.items()
            }


def test_another_programs_checkpoint_has_none(folder: pathlib.Path) -> None:
    model = built(Tied)
    checkpoint.save(model, None, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["metadata"]["tessera"]["checksums"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint.load(built(Tied, seed=8), None, folder)


@pytest.mark.parametrize("value", [3, {"up.weight": "no digits"}, {"up.weight": 5}, ["up.weight"]])
def test_notes_that_save_does_not_write_are_refused(folder: pathlib.Path, value: Any) -> None:
    checkpoint.save(built(Tied), None, folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["tessera"]["checksums"] = value
    path.write_text(json.dumps(index))
    with pytest.raises(tessera.InvalidArgumentError, match="none that save"):
        checkpoint.load(built(Tied), None, folder)
