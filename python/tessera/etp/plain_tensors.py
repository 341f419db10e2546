"""Functions of torch that take a sharded tensor's memory, of which there is none, without asking that tensor. They are
replaced by ones that take a copy of all its values."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .tensor import LogicalTensor


@functools.cache
def watch_plain_tensors() -> None:
    """Follow `plain.data = sharded` and to_dlpack(sharded). Once a process."""
    data: Any = torch._C.TensorBase.data
    to_dlpack: Any = torch._C._to_dlpack

    def put(tensor: torch.Tensor, new: Any) -> None:
        if isinstance(new, LogicalTensor):  # all of its values, in memory of its own
            with torch.no_grad():
                new = new.whole().detach().clone()
        data.__set__(tensor, new)

    def capsule(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, LogicalTensor):
            return tensor.__dlpack__()
        return to_dlpack(tensor, *args, **kwargs)

    torch.Tensor.data = property(data.__get__, put, doc=data.__doc__)  # type: ignore[assignment]
    for place in (torch._C, torch, torch.utils.dlpack):
        for name in ("_to_dlpack", "to_dlpack"):
            if getattr(place, name, None) is to_dlpack:
                setattr(place, name, capsule)
