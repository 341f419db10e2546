"""Digests of the weights of both jobs: of what the bus has moved, and of what a model holds. run.py compares them."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tessera
import torch
import torch.distributed as dist
from model import MATRICES
from torch.distributed.tensor import DTensor

Digests = dict[str, str]  # by name of a tensor


def of_ranks(batch: tessera.Batch, everywhere: Iterable[str] = ()) -> Digests:
    """Of the last version. Those of the ranks' parts add up to the whole tensor's (docs/formats/digest.md); of the
    tensors `everywhere`, each rank has all. Collective over the job."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, batch.digests())
    whole = set(everywhere)
    found = {}
    for name in batch.names:
        parts = [digests[name] for digests in ranks if name in digests]
        found[name] = parts[0] if name in whole else _sum(parts)
    return found


def _sum(parts: list[str]) -> str:
    """Two sums modulo 2^64, each of 16 digits."""
    sums = (sum(int(part[at : at + 16], 16) for part in parts) for at in (0, 16))
    return "".join(f"{each % 2**64:016x}" for each in sums)


def of_model(state: Mapping[str, torch.Tensor], wire: str | None = None) -> Digests:
    """SHA-256 of whole tensors, gathered for this: it knows nothing of the bus. Of a sender's state, as it arrives
    where matrices travel quantised to `wire`. Collective over the job."""
    found = {}
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if wire and re.fullmatch(MATRICES, name) and whole.dim() > 1:
            whole = tessera.quantize(whole, wire, planes="row").dequantize(dtype=whole.dtype)
        found[name] = hashlib.sha256(whole.contiguous().view(torch.uint8).numpy()).hexdigest()
    return found
