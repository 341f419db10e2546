"""Parameters of a model that have the memory of another one, as `b.weight.data = a.weight.data` gives it.

In plain torch what is written into one is written into the other. Rows of two weights are two things: such parameters
stay whole on every rank.
"""

from __future__ import annotations

import warnings

import torch
from torch._C import DisableTorchFunctionSubclass

from .digests import is_plain_tensor
from .tensor import LogicalTensor


def sharing_memory(model: torch.nn.Module) -> set[int]:
    """Return the ids of parameters that share memory with another parameter, or with a buffer, and of which one is
    trained. Those are looked at whose elements fill their memory."""
    ranges = []
    with DisableTorchFunctionSubclass():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, LogicalTensor) or not is_plain_tensor(tensor) or tensor.is_meta or not tensor.numel():
                continue
            begin, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            reach = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
            if (reach + 1) * tensor.element_size() == size:
                ranges.append((begin, begin + size, name, tensor))
    shared: set[int] = set()
    ranges.sort(key=lambda each: each[:3])
    group: list[tuple[int, int, str, torch.Tensor]] = []
    end = 0
    for each in [*ranges, None]:
        if each is not None and each[0] < end:
            group.append(each)
            end = max(end, each[1])
            continue
        if len(group) > 1 and any(tensor.requires_grad for *_, tensor in group):
            names = " and ".join(name for *_, name, _ in group)
            warnings.warn(
                f"{names} share memory as several tensors: they stay whole on every rank; give modules one parameter "
                "to tie them, or each its own memory",
                stacklevel=4,
            )
            shared.update(id(tensor) for *_, tensor in group)
        if each is not None:
            group, end = [each], each[1]
    return shared
