"""What a program may do with parameters, in functions f(w, v, x) of a stack w, a matrix v and a scalar x."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tessera import etp
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
Use = Callable[[Tensor, Tensor, Tensor], Tensor]


def _rows_one_by_one(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    for row in v:
        x = x + row.sum()
    return x


def _room_of_that_shape(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    made = torch.zeros(v.shape)
    made.copy_(v.detach())
    return made


def _a_note(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    v.note = 1  # type: ignore[attr-defined]
    return x + v.note  # type: ignore[attr-defined]


USES: dict[str, Use] = {
    "shape": lambda w, v, x: x + w.shape[0] + 10 * len(w.shape) + getattr(v, "shape")[0],  # noqa: B009
    "ndim and nbytes": lambda w, v, x: x + w.ndim + v.nbytes,
    "size()": lambda w, v, x: x + w.size(0) + v.size()[0] + w.stride(0) + v.dim(),
    "numel() and len()": lambda w, v, x: x + v.numel() + w.nelement() + len(w) + len(v) + torch.numel(v),
    "facts": lambda w, v, x: x + (v.dtype == torch.float32) + v.requires_grad + v.is_leaf + (v.grad is None),
    "its type": lambda w, v, x: (
        x + isinstance(v, torch.nn.Parameter) + 2 * isinstance(v, Tensor) + len(type(v).__name__)
    ),
    "the same": lambda w, v, x: x + (v is v) + 2 * (v is w) + hasattr(v, "nothing") + getattr(v, "nothing", False),
    "T": lambda w, v, x: x + v.T.sum() + v.T.shape[1] + w.mT.sum() + v.real.sum(),
    "views of views": lambda w, v, x: x + v.t().T.sum() + v.t().T.shape[0] + v.t().data.sum(),
    "data": lambda w, v, x: x + v.data.sum() + v.data.shape[0] + v.detach().sum(),
    "products": lambda w, v, x: x + (v @ v.t()).sum() + F.linear(x.expand(2, 32), v).sum(),
    "embedding()": lambda w, v, x: x + F.embedding(torch.tensor([1, 2]), v).sum(),
    "arithmetic": lambda w, v, x: x + (v * 2).sum() + (2 * v).sum() + (1 - v).sum() + (-v).sum() + (v**2).sum(),
    "functions": lambda w, v, x: x + torch.sum(v) + v.norm() + v.max() + torch.add(input=x, other=v).sum(),
    "indices": lambda w, v, x: x + v[0].sum() + v[1:5].sum() + w[1].sum() + v[:, 3].sum(),
    "lists": lambda w, v, x: x + torch.stack([v, v]).sum() + torch.cat((v, v), 0).sum() + {"a": v}["a"].sum(),
    "shapes of others": lambda w, v, x: x + torch.zeros_like(v) + v.new_ones(3).sum() + torch.empty_like(w).shape[0],
    "other shapes": lambda w, v, x: x + w.reshape(-1).sum() + torch.flatten(w).sum() + v.permute(1, 0).shape[0],
    "expanded to its shape": lambda w, v, x: x + v.expand(2, *v.shape).sum(),
    "parts": lambda w, v, x: x + v.split(16, -1)[1].sum() + torch.chunk(v, 2, -1)[0].sum() + v.unbind(-1)[1].sum(),
    "comparisons": lambda w, v, x: x + (v == v).sum() + (v > 0).sum() + torch.equal(v, v) + bool((v == v).all()),
    "where()": lambda w, v, x: torch.where(v > 0, v, x).sum() + F.dropout(v, 0.0).sum(),
    "other dtypes": lambda w, v, x: x + v.to(torch.bfloat16).float().sum() + v.bfloat16().float().sum(),
    "written copies": lambda w, v, x: x + (v + 0).add_(v).sum(),
    "what ETP knows": lambda w, v, x: x + len(w.etp.name) + w.etp.shape[0] + w.etp.rows[0] + etp.local(v).sum(),  # type: ignore[attr-defined]
    "recomputed": lambda w, v, x: checkpoint(lambda y: y + v.sum(), x, use_reentrant=False),  # type: ignore[no-any-return]
    "text": lambda w, v, x: x + len(f"{tuple(v.shape)}"),
    "rows one by one": _rows_one_by_one,
    "room of that shape": _room_of_that_shape,
    "a note": _a_note,
}
