"""The check that run.py makes; not part of the exchange.

Each version is gathered into a file, only for this. The server's ranks compare it with what they hold, bit for bit;
the driver compares the server's answers with those of a single process with the same weights.
"""

import pathlib
import re
import time

import tessera
import torch
import torch.distributed as dist
from model import MATRICES, embed, tokenize, untrained
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

PATIENCE = 600  # seconds until somebody has checked a version


def path_of(folder: pathlib.Path, version: int) -> pathlib.Path:
    """The trainer writes this file; run.py removes it after the check. The file of version 0 is empty."""
    return folder / f"version-{version}.safetensors"


# --- the trainer's part; without a folder it does nothing


def write(folder: pathlib.Path | None, model: torch.nn.Module, version: int, wire: str | None) -> None:
    """Gathers the whole model, and rank 0 writes it, with the format that it is quantised to. Collective."""
    if folder is None:
        return
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        save_file(state, path_of(folder, version), {"wire": wire} if wire else None)


def await_verdict(folder: pathlib.Path | None, version: int) -> None:
    """Rank 0 waits until the version's file is gone; the others wait for it in the next step."""
    if folder is None or dist.get_rank() != 0:
        return
    deadline = time.monotonic() + PATIENCE
    while path_of(folder, version).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path_of(folder, version)}: nobody has checked this version for {PATIENCE} s")
        time.sleep(0.05)


# --- how a tensor arrives


def as_received(name: str, tensor: torch.Tensor, dtype: torch.dtype, wire: str | None) -> torch.Tensor:
    """In the receiver's dtype: quantised as a whole and decoded, if it travels quantised."""
    if wire is None or tensor.dim() < 2 or not re.fullmatch(MATRICES, name):
        return tensor.to(dtype)
    return tessera.quantize(tensor, wire, planes="row").dequantize(dtype=dtype)


# --- the server's part


def compare(folder: pathlib.Path, model: torch.nn.Module, version: int) -> dict[str, int]:
    """Compares what this rank holds with its part of the file, as it arrives in the model's dtype; returns the numbers
    of tensors, of elements, and of elements with a wrong bit."""
    found = {"tensors": 0, "elements": 0, "differing": 0}
    with safe_open(path_of(folder, version), "pt") as file:
        wire = (file.metadata() or {}).get("wire")
        for name, held in model.state_dict().items():
            wanted = as_received(name, file.get_tensor(name), held.dtype, wire)
            if isinstance(held, DTensor):
                wanted = distribute_tensor(wanted, held.device_mesh, held.placements, src_data_rank=None).to_local()
                held = held.to_local()
            bits = [tensor.contiguous().view(torch.uint8).view(-1, held.element_size()) for tensor in (held, wanted)]
            found["tensors"] += 1
            found["elements"] += held.numel()
            found["differing"] += int((bits[0] != bits[1]).any(1).sum())
    return found


# --- the driver's part


def similarities(vectors: torch.Tensor) -> list[float]:
    """Of consecutive pairs."""
    return (vectors[0::2].double() * vectors[1::2].double()).sum(1).tolist()


def expected(
    folder: pathlib.Path, version: int, dtype: torch.dtype, sentences: list[str], wire: str | None = None
) -> list[float]:
    """The similarities that a single process computes with the weights of `version`, quantised to `wire` and
    decoded."""
    model = untrained(dtype)
    if version:
        weights = load_file(path_of(folder, version))
        state = {name: as_received(name, tensor, dtype, wire) for name, tensor in weights.items()}
        model.load_state_dict(state)
    with torch.inference_mode():
        return similarities(embed(model, tokenize(sentences)))
