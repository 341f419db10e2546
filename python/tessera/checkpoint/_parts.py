"""What this rank holds of a model's logical tensors: where it lies, and which boxes of the whole it is."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch

from .._core import Layout, Partial, StridedShard
from .._errors import InvalidArgumentError
from .._tensors.location import Location, element_type, refusal
from .._tensors.modules import walk_module
from .._tensors.torch import local_tensor, torch_location
from ..etp.chunks import Cut, boxes_of
from ..etp.layers._base import Layer
from ..etp.parameter import LogicalParameter
from ..etp.weight import Weight

Intervals: TypeAlias = tuple[tuple[int, int], ...]
Region: TypeAlias = tuple[Intervals, ...]
"""Of a logical tensor: ascending (begin, end) of each dim."""


class Part(NamedTuple):
    """Of one logical tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    regions: list[Region]  # what this rank holds, one after the other in the order of its memory
    memory: torch.Tensor  # this rank's elements, of any strides
    others: list[Region] | None = None  # instead of `regions`, if another rank says that the tensor is cut as it says
    says: bool = False  # how a _StridedShard cuts the tensor
    weight: Weight | None = None  # whose elements are not in memory: a native one without a master

    def elements(self) -> torch.Tensor:
        """This rank's, one behind the other."""
        return (self.memory if self.weight is None else self.weight.values()).contiguous()

    def as_said(self, names: Collection[str]) -> Part:
        """names: Of tensors of which a rank says how they are cut."""
        if self.others is None or self.name not in names:
            return self
        return self._replace(regions=self.others, others=None)


class Model(NamedTuple):
    parts: dict[str, Part]  # by name; of tied ones, the first
    names: dict[str, str]  # every name, and the one in `parts`
    parameters: dict[int, str]  # name by id()
    tensors: dict[str, torch.Tensor]  # by name: the parameter or buffer itself


def size_of(region: Region) -> int:
    return math.prod(sum(end - begin for begin, end in dim) for dim in region)


def parts_of(model: torch.nn.Module) -> Model:
    """Of all parameters and persistent buffers, under the names of state_dict()."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    _refuse_extra_state(model)
    cuts = dict(_tensor_parallel_cuts(model))
    found = Model({}, {}, {}, {})
    first: dict[Any, str] = {}
    for name, source, tensor in walk_module(model, lambda name: True):
        if isinstance(tensor, LogicalParameter):
            key: Any = id(tensor.etp)
        else:
            at = source.locate()
            key = (at.address, at.shape, at.strides, at.dtype) if at.address else id(tensor)
        primary = first.setdefault(key, name)
        found.names[name] = primary
        found.parameters[id(tensor)] = primary
        if primary != name:
            continue
        found.tensors[name] = tensor
        part = _sharded(name, tensor) if isinstance(tensor, LogicalParameter) else _located(name, tensor, at)
        found.parts[name] = _cut(part, cuts[id(tensor)]) if id(tensor) in cuts else part
    return found


def part_of(name: str, tensor: torch.Tensor) -> Part:
    """Of a tensor that is not sharded by ETP: a DTensor, or one that every rank has whole."""
    return _located(name, tensor, torch_location(name, tensor))


def _refuse_extra_state(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            raise InvalidArgumentError(
                f"module {name or '(the model)'} has get_extra_state(), whose values are no tensors and would be lost: "
                "save the model without it, or keep them in a buffer"
            )


def _sharded(name: str, parameter: LogicalParameter) -> Part:
    weight = parameter.etp
    regions: list[Region] = [
        tuple(((offset, offset + size),) for offset, size in zip(box.offsets, box.sizes, strict=True))
        for box in boxes_of(weight)
    ]
    regions = [each for each in regions if size_of(each)]
    part = Part(name, element_type(name, weight.dtype), tuple(weight.shape), regions, weight.local)
    return part if weight.has_rows else part._replace(weight=weight)


def _located(name: str, tensor: torch.Tensor, at: Location) -> Part:
    memory = local_tensor(name, tensor).detach()
    if at.layout is None:
        whole: Region = tuple(((0, size),) for size in at.shape)
        return Part(name, at.dtype, at.shape, [whole] if size_of(whole) else [], memory)
    if any(isinstance(each, Partial) for each in at.layout.placements):
        raise refusal(name, f"{at.layout} has terms of sums, not values: redistribute() it first")
    regions = _owned(at, at.layout)
    assert regions is not None
    assert at.global_shape is not None
    says = any(isinstance(each, StridedShard) for each in at.layout.placements)
    return Part(name, at.dtype, at.global_shape, regions, memory, _owned(at, at.other_layout), says)


def _owned(at: Location, layout: Layout | None) -> list[Region] | None:
    if layout is None:
        return None
    assert at.global_shape is not None
    assert at.rank is not None
    owned = layout.owned(at.global_shape, at.rank)
    return [] if owned is None else [tuple(owned)]


# --- tensor parallelism of etp's layers


def _tensor_parallel_cuts(model: torch.nn.Module) -> Iterator[tuple[int, Cut]]:
    """id() of parameters that a tp_group cuts."""
    for module in model.modules():
        if not isinstance(module, Layer):
            continue
        for name, declared in module._declared.items():
            parameter = module._parameters[name]
            cut = module._tp.cut_of(declared.shape, declared.cut, declared.halves)
            if parameter is not None and cut is not None:
                yield id(parameter), cut


def _cut(part: Part, cut: Cut) -> Part:
    """The same rank's part of the whole tensor."""

    def whole(intervals: Iterable[tuple[int, int]]) -> Intervals:
        return tuple((offset, offset + size) for begin, end in intervals for _, offset, size in cut.places(begin, end))

    dim = cut.dim
    regions = [(*region[:dim], whole(region[dim]), *region[dim + 1 :]) for region in part.regions]
    return part._replace(shape=tuple(cut.whole(part.shape)), regions=regions)
