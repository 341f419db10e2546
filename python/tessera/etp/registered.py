"""Sharded weights on the tensor bus: this rank's rows, where they lie, and the layout that says which rows they are."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from .. import _core
from .._errors import InvalidArgumentError
from .._tensors.location import Location, refusal
from .._tensors.torch import torch_location
from .tensor import LogicalTensor
from .weight import Weight


class Tensor(Protocol):
    """One that stands for a sharded weight."""

    @property
    def etp(self) -> Weight: ...


T = TypeVar("T", bound=Tensor)


class RowsSource(Generic[T]):
    """One of them in a batch. It is not kept alive."""

    current = None  # its memory never moves: nothing needs to be watched

    def __init__(self, name: str, tensor: T, rows_of: Callable[[T], torch.Tensor]) -> None:
        """rows_of: Gives this rank's rows of it, [*lead, rows, K], as a plain tensor."""
        self._name = name
        self._tensor = weakref.ref(tensor)
        self._rows_of = rows_of

    def locate(self) -> Location:
        tensor = self._find()
        weight, rows = tensor.etp, self._rows_of(tensor)
        if weight.tp_cut is not None:
            raise refusal(
                self._name,
                f"tensor parallelism cuts it along dim {weight.tp_cut.dim}, and the ETP group's layout does not tell "
                "of that: register (etp.local(p), layout, global shape)",
            )
        dim, sizes, bounds = _cut(self._name, weight)
        at = torch_location(self._name, rows.detach().view(sizes))._replace(copy=self._published(weight, rows))
        if weight.model.job_ranks is None:  # one rank, which has all of it
            return at
        layout = weight.layout_of(dim, bounds)
        return at._replace(layout=layout, global_shape=tuple(weight.shape), rank=weight.group.job_rank)

    @staticmethod
    def _published(weight: Weight, rows: torch.Tensor) -> _core.QuantizedCopy | None:
        """What others read of these rows, if they are the weight's, and its matrices those of the bus."""
        if rows.data_ptr() != weight.address or tuple(weight.shape[len(weight.lead) :]) != tuple(weight.matrix):
            return None
        return weight.published

    def require_writeable(self) -> None:
        pass

    def begin_write(self) -> None:
        tensor = self._find()
        if self._rows_of(tensor).data_ptr() == tensor.etp.address and not tensor.etp.model.updating:
            raise refusal(
                self._name, "it is sharded, and other ranks may read its rows now: receive within etp.update(model)"
            )

    def written(self) -> None:
        pass  # the end of the update publishes it

    def _find(self) -> T:
        found = self._tensor()
        if found is None:
            raise InvalidArgumentError(
                f"tensor {self._name}: its memory was freed; keep the tensor, or register it with hold='strong'"
            )
        return found


def _source_of(tensor: LogicalTensor, name: str) -> RowsSource[LogicalTensor]:
    return RowsSource(name, tensor, LogicalTensor._rows_in_memory)


def _cut(name: str, weight: Weight) -> tuple[int, tuple[int, ...], list[int]]:
    """The dim of the logical tensor that is cut, this rank's sizes, and the bounds of all ranks."""
    rows, bounds = weight.matrix[0], weight.bounds
    lead = len(weight.lead)
    cut = next(i for i in range(lead + 1, len(weight.shape) + 1) if math.prod(weight.shape[lead:i]) == rows)
    dim = next((i for i in range(lead, cut) if weight.shape[i] != 1), cut - 1)
    inner = math.prod(weight.shape[dim + 1 : cut])  # rows of a slice of that dim
    if any(bound % inner for bound in bounds):
        raise refusal(
            name,
            f"ranks have rows {bounds} of {tuple(weight.shape)}, which begin within a slice of dim {dim}, and no "
            "layout says that: register (etp.local(p), p.etp.layout, p.etp.matrix), for receivers of that shape",
        )
    bounds = [bound // inner for bound in bounds]
    begin, end = itertools.islice(bounds, weight.group.rank, weight.group.rank + 2)
    return dim, (*weight.shape[:dim], end - begin, *weight.shape[dim + 1 :]), bounds


LogicalTensor.__tessera_source__ = _source_of
