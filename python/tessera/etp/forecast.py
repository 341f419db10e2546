"""How much memory a model will take, also of one that is not sharded yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from .. import _core
from .._arguments import whole
from .._core import Forecast
from .._errors import AlreadyExistsError, InvalidArgumentError
from .choice import Choice, Chosen, Filter, Named, Pattern, Shapes, matrix_of
from .compile import uncompiled
from .config import is_inline
from .experts import expert_lists
from .making import add_to_forecast, can_reduce, forecast_with_options
from .modules import Constructed, has_group, only_reads
from .parameter import LogicalParameter
from .refusals import require_shardable
from .report import sharded_model
from .weight import can_shard, dtype_name


def forecast(
    model: torch.nn.Module | None = None,
    ranks: int | None = None,
    *,
    rank: int = 0,
    replicas: int = 1,
    formats: Mapping[Pattern, str] | None = None,
    filter: Filter | None = None,
    min_elements: int = 2048,
    compute_dtype: torch.dtype | None = None,
    native: Iterable[Pattern] = (),
    masters: str = "all",
    experts: Iterable[Sequence[str]] = (),
    stacks: Filter | None = None,
) -> Forecast:
    """Bytes that a rank will hold at its peak, told before the first step.

    Of a model that is sharded: those of this rank. With `ranks`, of one that is not, as shard_module_() would cut it
    over so many; the group need not exist, and the model may be on the meta device, as shapes and dtypes are all that
    counts. Options of update_config() count in both cases. docs/guide/etp-memory.md says what each term is, and what a
    process holds besides. Not collective.

    Args:
        model: None: the one that was sharded last.
        ranks: Of the group that would be given to shard_module_(): the shards of a weight.
        rank: Which of them; the last ones may have fewer rows.
        replicas: Of the group that would be given as dp=.
        formats, filter, min_elements, compute_dtype, native, masters, experts, stacks: Those of shard_module_().
    """
    if ranks is None:
        return sharded_model(model).runtime.forecast()
    if model is None:
        raise InvalidArgumentError(f"forecast: ranks={ranks} of no model: give one that is not sharded yet")
    ranks, replicas = whole("ranks", ranks, 1), whole("replicas", replicas, 1)
    model = uncompiled(model)
    named = list(model.named_parameters())
    _require_whole(model, named)
    require_shardable(model, named)
    if ranks * replicas == 1:
        replicas = 1
    min_elements = whole("min_elements", min_elements, 0)
    chosen = Choice.of(ranks * replicas, filter, min_elements, formats or {}, native, masters).of_model(named)
    lists = expert_lists(experts, {name: each.shape for name, each in named}, chosen)
    shapes = Shapes.of(model, stacks)
    shapes.require_matrices(named, lists)
    told = _told(named, chosen, shapes, compute_dtype, lists + _lists_of_layers(model, named, chosen))
    if ranks * replicas > 1:
        for name, parameter in named:
            if name not in chosen and can_reduce(parameter) and can_shard(parameter.dtype):
                told.add_replicated(parameter.numel(), dtype_name(parameter.dtype))
    return forecast_with_options(told, whole("rank", rank, 0, ranks - 1), ranks * replicas, replicas)


def _require_whole(model: torch.nn.Module, named: Named) -> None:
    if any(isinstance(each, LogicalParameter) for _, each in named) or any(map(has_group, model.modules())):
        raise AlreadyExistsError(
            f"forecast: {type(model).__name__} is sharded already, or has layers that were constructed with a group: "
            "leave ranks= out to ask of this rank"
        )


def _told(
    named: Named,
    chosen: Mapping[str, Chosen],
    shapes: Shapes,
    compute_dtype: torch.dtype | None,
    lists: Iterable[Sequence[str]],
) -> _core.EtpModel:
    told = _core.EtpModel()
    places = {}
    for name, parameter in named:
        how = chosen.get(name)
        if how is None:
            continue
        of = shapes.places[id(parameter)]
        matrix = None if shapes.is_stack(name, parameter, of) else matrix_of(parameter.shape, of)
        copied = is_inline(None) or not all(only_reads(module, place) for module, place in of)
        spec = (how.format, compute_dtype, how.native, how.planes_only, copied)
        places[name] = add_to_forecast(told, name, parameter, matrix, *spec)
    for names in lists:
        told.add_experts([places[name] for name in names])
    return told


def _lists_of_layers(model: torch.nn.Module, named: Named, chosen: Mapping[str, Chosen]) -> list[list[str]]:
    """Those that layers of this package use as one."""
    names = {id(each): name for name, each in named}
    found = []
    for module in model.modules():
        if isinstance(module, Constructed):
            listed = [names[id(module._parameters[each])] for each in module.listed]
            if len(listed) > 1 and all(name in chosen for name in listed):
                found.append(listed)
    return found
