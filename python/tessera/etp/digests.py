"""Digests of tensors of any kind, which ranks compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

_BYTES = 8


def comparable_digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's values, or of what a wrapper subclass is made of; empty where neither can be
    read."""
    total = hashlib.blake2b(digest_size=_BYTES)
    try:
        for part in _parts(tensor.detach()):
            total.update(f"{tuple(part.shape)} {part.dtype}".encode())
            flat = part.resolve_conj().resolve_neg().contiguous().reshape(-1)
            total.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    except Exception:  # whatever a subclass throws for what it does not know
        return ""
    return total.hexdigest()


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory has its values: it is of no wrapper subclass."""
    kind: Any = type(tensor)
    return (
        kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that one consists of."""
    if tensor.is_meta:
        return
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not hasattr(tensor, "__tensor_flatten__"):
        if tensor.is_quantized:
            yield tensor.int_repr()
        elif tensor.layout is torch.strided:
            yield tensor
        else:
            yield tensor.to_dense()
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _parts(getattr(tensor, name))


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two plain tensors have the same shape, dtype and bytes."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return tensor.numel() == 0 or torch.equal(bytes_of(tensor), bytes_of(other))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor's elements as bytes."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
