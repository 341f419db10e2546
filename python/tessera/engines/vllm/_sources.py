"""What a rank of a trainer sends of a WeightSource of vLLM."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from ... import _core
from ..._errors import InvalidArgumentError
from ._generation import Yielded, module_of, yielded


class Held:
    """The tensors of a source, as this rank registers them.

    vLLM's own source of a module stands for the module: its tensors are sent from where they are, DTensors in any
    layout, and nothing is gathered. Any other source is iterated at each send: pieces are sent in the layout that its
    metadata declares; of tensors that it yields whole, on all ranks, each rank sends its share, and only that is kept.
    """

    def __init__(self, base: Any, source: Any, rank: int, world: int) -> None:
        """Collective where the source's iteration is. Raises InvalidArgumentError."""
        if source is None:
            raise InvalidArgumentError("source=None: give a WeightSource, such as ModuleSource(model)")
        self._base = base
        self._source = source
        self._rank = rank
        self._world = world
        self._module = module_of(base, source)
        self._tensors: dict[str, Any] = {}
        self.refill()

    @property
    def tensors(self) -> Any:
        """For register()."""
        return self._tensors if self._module is None else self._module

    def refill(self) -> None:
        """What the source yields now. Collective likewise."""
        if self._module is not None:
            return
        for number, each in enumerate(yielded(self._base, self._source, self._rank)):
            if self._keeps(number, each):
                self._tensors[each.name] = _registered(each)

    def _keeps(self, number: int, each: Yielded) -> bool:
        if each.tensor is None:
            return False
        if each.is_local or isinstance(each.tensor, DTensor):
            return True
        keepers = range(self._world) if each.keepers is None else each.keepers
        return keepers[number % len(keepers)] == self._rank


def _registered(each: Yielded) -> Any:
    """The tensor, with its layout if it is a piece."""
    assert each.tensor is not None
    tensor = each.tensor.detach()
    if not each.is_local or each.meta.placements is None or isinstance(tensor, DTensor):
        return tensor
    placements = [_core.Shard(at.dim) if hasattr(at, "dim") else _core.Replicate() for at in each.meta.placements]
    mesh = _core.Mesh(list(each.meta.mesh_shape), ranks=list(each.meta.owners))
    return tensor, _core.Layout(mesh, placements), each.meta.shape
