"""What is in a checkpoint's folder, as others read it."""

from __future__ import annotations

import json
import math
import pathlib
import struct
from typing import Any

import torch
from etp_models import as_bytes
from safetensors.torch import load_file

_BITS = {"F32": 32, "BF16": 16, "F16": 16, "I64": 64, "U8": 8, "BOOL": 8}


def index_of(folder: pathlib.Path, name: str = "model.safetensors.index.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def optimizer_index(folder: pathlib.Path) -> dict[str, Any]:
    return index_of(folder, index_of(folder)["metadata"]["tessera"]["optimizer"])


def tensors_of(folder: pathlib.Path, index: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """By safetensors' own reader."""
    weights = (index or index_of(folder))["weight_map"]
    files = {file: load_file(folder / file) for file in set(weights.values())}
    assert {name: set(tensors) for name, tensors in files.items()} == {
        file: {name for name, its in weights.items() if its == file} for file in files
    }
    return {name: files[file][name] for name, file in weights.items()}


def bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: as_bytes(tensor) for name, tensor in sorted(tensors.items())}


def require_nothing_but_elements(folder: pathlib.Path) -> int:
    """Every data file is its header and the logical elements, to the byte. Returns their bytes."""
    total = 0
    for path in folder.glob("*.safetensors"):
        text = path.read_bytes()
        (length,) = struct.unpack_from("<Q", text)
        header = json.loads(text[8 : 8 + length])
        assert length - len(text[8 : 8 + length].rstrip(b" ")) < 8
        header.pop("__metadata__", None)
        elements = sum(math.prod(each["shape"]) * _BITS[each["dtype"]] // 8 for each in header.values())
        assert path.stat().st_size == 8 + length + elements, path
        total += elements
    return total
