"""Gradients by Megatron's conventions: added to main_grad, and written by hand into room that is lent."""

from __future__ import annotations

import torch

from .. import _core
from .._errors import InvalidArgumentError


def main_grad_of(parameter: torch.Tensor, name: str, shape: torch.Size) -> torch.Tensor:
    """Where gradients of a weight with fuse_wgrad_accumulation=True are added."""
    found = getattr(parameter, "main_grad", None)
    if not isinstance(found, torch.Tensor):
        raise InvalidArgumentError(
            f"{name} has fuse_wgrad_accumulation=True and no main_grad: set it to zeros of {tuple(shape)} in float32 "
            "or bfloat16"
        )
    possible = found.dtype in (torch.float32, torch.bfloat16) and found.device.type == "cpu" and found.is_contiguous()
    if found.shape != shape or not possible:
        raise InvalidArgumentError(
            f"{name}: main_grad is {tuple(found.shape)} of {found.dtype} on {found.device}: it has to be contiguous "
            f"{tuple(shape)} of float32 or bfloat16 in host memory"
        )
    return found


class Lent:
    """Room for gradients of a weight, until reduce_wgrad() gets it."""

    def __init__(self) -> None:
        self._buffers: dict[int, _core.GradientBuffer | None] = {}  # by address

    def lend(self, buffer: _core.GradientBuffer | None, into: torch.Tensor) -> torch.Tensor:
        """`buffer`: whose memory it is; None: it is torch's, and will be copied."""
        self._buffers[into.data_ptr()] = buffer
        return into

    def take(self, into: torch.Tensor, name: str) -> _core.GradientBuffer | None:
        if into.data_ptr() not in self._buffers:
            raise InvalidArgumentError(
                f"{name}: reduce_wgrad() got a tensor that get_wgrad_tensor() has not given, or gave before: write "
                "into what it gives"
            )
        return self._buffers.pop(into.data_ptr())

    def clear(self) -> None:
        self._buffers.clear()
