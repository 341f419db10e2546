"""What uses of a sharded weight in any operation have in common: what they expect of a backward, and what they
refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._errors import UnimplementedError
from .phase import Phase
from .saved_tensors import innermost_hooks

if TYPE_CHECKING:
    from .matrix import Matrix

_recomputation = "_recomputation_hook"


def expects_backward(phase: Phase) -> bool:
    """Whether a use whose graph is recorded now will be followed by its backward. A forward that torch's checkpoint
    repeats only for its saved tensors will not: the first one's backward comes."""
    if phase is not Phase.RECOMPUTE:
        return True
    hooks = innermost_hooks()
    return hooks is None or _recomputation not in getattr(hooks[0], "__qualname__", "")


def refuse_twice(weight: Matrix) -> None:
    if torch.is_grad_enabled():
        raise UnimplementedError(
            f"{weight.name}: a backward with create_graph=True goes through a sharded weight, whose gradient cannot be "
            "differentiated again: shard with mode='inline', or leave this weight out with filter="
        )
