"""Options of this process for models that are sharded from now on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .. import _core
from .._arguments import choice, elements, flag, positive, text, whole
from .._errors import InvalidArgumentError

_MAX_BYTES = 1 << 62


@dataclasses.dataclass
class Config:
    """See update_config()."""

    pad_for_alignment: int = 16
    weight_prefetch: bool = True
    prefetch: str = "auto"
    distance: int = 1
    expert_distance: int = 2
    cap_bytes: int | None = None
    map_weights: bool = True
    coalesce_amax_allreduce: bool = True
    check_param_states: bool = True
    async_reduction: bool = True
    check: bool | None = None
    schedule_log: str | None = None
    stream_bytes_per_second: float | None = None


@dataclasses.dataclass
class GraphScope:
    """See set_cuda_graph_scope()."""

    names: frozenset[str] = frozenset()
    moe_shared_expert_overlap: bool = False


config = Config()
graphs = GraphScope()


def update_config(**options: Any) -> None:
    """Sets options of models that are sharded from now on. The same on all ranks. One that is refused changes nothing.

    Args:
        pad_for_alignment: Rows of a shard are a multiple of it, or of a quantised format's if larger; 0: no padding.
        weight_prefetch: False: every weight is gathered when it is used.
        prefetch: "auto" leaves prefetching out where this rank has fewer than two CPUs; "on" and "off".
        distance: How many uses ahead.
        expert_distance: The same for lists of experts.
        cap_bytes: Of gathered weights; what does not fit is gathered when it is used. None: no limit.
        map_weights: Weights of nn.Linear, nn.Embedding, Conv1D and layers of this package that travel as they are, and
            whose shards are whole pages, are not copied: their modules read the owners' memory. Not with check= and
            stream_bytes_per_second=. False: all are copied.
        coalesce_amax_allreduce: The largest values of all weights that are quantised together are exchanged at once;
            False: one after the other. The same bits.
        check_param_states: Every transition of a weight's state is checked; this cannot be turned off.
        async_reduction: False: without mode=, shard_module_() and constructed layers take mode="inline".
        check: Writes to weights outside of updates are found, and memory that is released is filled with NaN. None:
            as TESSERA_ETP_CHECK says.
        schedule_log: The file that the schedule of each model is recorded in, for `tessera etp check`, until the model
            is unsharded or the process ends. "{rank}" and "{group}" in it become the rank and the model's own name.
            "": none. None: as TESSERA_ETP_LOG says.
        stream_bytes_per_second: A gather or a fold takes at least as long as at this rate, which stands in for a slower
            link: to measure overlap. None: as fast as it goes.
    """
    known = {field.name for field in dataclasses.fields(Config)}
    checked = {}
    for name, value in options.items():
        if name not in known:
            raise InvalidArgumentError(f"Unknown ETP config option: {name}")
        checked[name] = _checked(name, value)
    for name, value in checked.items():
        setattr(config, name, value)


def _checked(name: str, value: Any) -> Any:
    if name == "prefetch":
        return choice(name, value, ("auto", "on", "off"))
    if name in ("weight_prefetch", "map_weights", "coalesce_amax_allreduce", "async_reduction"):
        return flag(name, value)
    if name == "check_param_states":
        if not flag(name, value):
            raise InvalidArgumentError(
                "check_param_states=False: transitions of a weight's state are always checked, which costs next to "
                "nothing: leave it out"
            )
        return True
    if name == "check":
        return None if value is None else flag(name, value)
    if name == "schedule_log":
        return None if value is None else text(name, value)
    if name == "stream_bytes_per_second":
        return None if value is None else positive(name, value)
    if name == "cap_bytes":
        return None if value is None else whole(name, value, 0, _MAX_BYTES)
    return whole(name, value, 0, 1 << 20)


def set_cuda_graph_scope(scope: Iterable[str] = (), *, moe_shared_expert_overlap: bool = False) -> None:
    """Says what CUDA graphs capture of models that are sharded or classified from now on: their weights of these parts
    are a chain of their own (docs/design/etp.md has the rules). The same on all ranks.

    Args:
        scope: "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", as Megatron calls them. Empty: nothing.
        moe_shared_expert_overlap: Shared experts are computed beside the others, and not captured.
    """
    names = frozenset(text("scope", each) for each in elements("scope", scope, "a set of names, such as {'attn'}"))
    _core.check_graph_scope(set(names))
    overlap = flag("moe_shared_expert_overlap", moe_shared_expert_overlap)
    graphs.names, graphs.moe_shared_expert_overlap = names, overlap


def is_inline(mode: str | None) -> bool:
    """Of a mode= argument; None: as update_config() says."""
    default = "deferred" if config.async_reduction else "inline"
    return choice("mode", default if mode is None else mode, ("deferred", "inline")) == "inline"
