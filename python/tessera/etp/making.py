"""Runtimes and weights of models: what shard_module_() and constructed layers have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import _core
from .._errors import InvalidArgumentError, MismatchError
from .config import config, graphs
from .digests import comparable_digest, is_plain_tensor
from .group import Group
from .model import ShardedModel
from .refusals import REDUCED
from .stack import Stack
from .telling import json_of, known
from .weight import Weight, dtype_name

_PLAIN = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def is_plain(format: str) -> bool:
    """Whether what travels in a format is not quantised."""
    return not format or format.lower() in _PLAIN


def make_runtime(
    core: _core.ShardGroup, reduction: str, publish: str, nonfinite: str = "error", replicas: int = 1
) -> _core.EtpRuntime:
    """With the options of this process. `replicas`: of every shard, by groups of data parallelism."""
    return _core.EtpRuntime(
        core,
        reduction=reduction,
        prefetch=config.prefetch if config.weight_prefetch else "off",
        distance=config.distance,
        expert_distance=config.expert_distance,
        cap_bytes=config.cap_bytes,
        publish=publish,
        nonfinite=nonfinite,
        replicas=replicas,
        check=config.check,
        coalesce_amax=config.coalesce_amax_allreduce,
        schedule_log=config.schedule_log,
        stream_bytes_per_second=config.stream_bytes_per_second,
        graph_scope=set(graphs.names),
        moe_shared_expert_overlap=graphs.moe_shared_expert_overlap,
        map_weights=config.map_weights,
    )


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Have an error name the weight: that of a format knows shapes only."""
    try:
        yield
    except InvalidArgumentError as error:
        raise error if str(error).startswith(f"{name}: ") else InvalidArgumentError(f"{name}: {error}") from None


def add_weight(
    model: ShardedModel,
    name: str,
    full: torch.nn.Parameter,
    matrix: torch.Size,
    format: str,
    compute_dtype: torch.dtype | None = None,
    native: bool = False,
    planes_only: bool = False,
    copied: bool = True,
) -> Weight:
    """Keeps this rank's rows of `full`. Peers know of it once the runtime has been started, again if it was.

    Args:
        native: The shard is what travels, and the parameter's rows are memory of this rank's own.
        planes_only: That memory is not kept: drop_rows() once the runtime has been started.
        copied: Uses get tensors that may be written. False: those of modules that only read what they gather.
    """
    computed = _computed(full, format, compute_dtype)
    spec = _spec(full, format, computed)
    with _naming(name):
        number = model.runtime.add(name, matrix[0], matrix[1], *spec, native, planes_only, copied)
    weight = Weight(model, [number], name, full, matrix, format, computed, native, planes_only)
    weight.copied = copied
    model.weights.append(weight)
    return weight


def add_stack(
    model: ShardedModel,
    name: str,
    full: torch.nn.Parameter,
    format: str,
    compute_dtype: torch.dtype | None,
    publish: str,
    native: bool = False,
    planes_only: bool = False,
) -> Stack:
    """The same of experts [E, F, K], which are E weights."""
    computed = _computed(full, format, compute_dtype)
    count, rows, columns = full.shape
    spec = _spec(full, format, computed)
    with _naming(name):
        numbers = model.runtime.add_stack(name, count, rows, columns, *spec, native, planes_only)
    late = publish == "first_use" and bool(format)
    stack = Stack(model, numbers, name, full, format, computed, late, native, planes_only)
    model.weights.append(stack)
    return stack


def add_to_forecast(
    model: _core.EtpModel,
    name: str,
    full: torch.nn.Parameter,
    matrix: torch.Size | None,
    format: str,
    compute_dtype: torch.dtype | None,
    native: bool,
    planes_only: bool,
    copied: bool,
) -> int:
    """What add_weight(), or without a matrix add_stack(), would tell a runtime."""
    spec = _spec(full, format, _computed(full, format, compute_dtype))
    if matrix is None:
        count, rows, columns = full.shape
        return model.add_stack(name, count, rows, columns, *spec, native, planes_only)
    return model.add(name, matrix[0], matrix[1], *spec, native, planes_only, copied)


def forecast_with_options(model: _core.EtpModel, rank: int, ranks: int, replicas: int) -> _core.Forecast:
    """With the options of this process."""
    return model.forecast(
        rank,
        ranks,
        replicas,
        config.prefetch if config.weight_prefetch else "off",
        config.distance,
        config.expert_distance,
        config.cap_bytes,
        set(graphs.names),
        graphs.moe_shared_expert_overlap,
        config.map_weights,
        config.check,
        config.stream_bytes_per_second is not None,
    )


def _computed(full: torch.nn.Parameter, format: str, compute_dtype: torch.dtype | None) -> torch.dtype:
    """Of the gathered weight."""
    return (compute_dtype if format else None) or _PLAIN.get(format, full.dtype)


def _spec(full: torch.nn.Parameter, format: str, computed: torch.dtype) -> tuple[str, str, str, str, int, bool]:
    """What a runtime is told of a weight besides its name and shape."""
    accumulated = "bf16" if full.dtype == torch.bfloat16 else "f32"
    padding = config.pad_for_alignment
    return dtype_name(full.dtype), format, dtype_name(computed), accumulated, padding, not full.requires_grad


def require_same(group: Group, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Throws if ranks have different parameters: each keeps rows of its own copy. Collective."""
    named = list(parameters)
    require_same_digests(group, [name for name, _ in named], [digest_of(name, each) for name, each in named])


def require_same_options(core: _core.ShardGroup, call: str, options: Mapping[str, str]) -> None:
    """Throw, on all ranks, unless these have given a call the same options. Collective."""
    told = json.dumps(options).encode()
    answers = json_of(core.exchange(f"the options of {call}", told), f"the options of {call}", _may_be_options)
    for rank, others in enumerate(answers):
        for name, first in answers[0].items():
            if others.get(name) != first:
                raise known(
                    MismatchError(
                        f"{call}: {name}= is {first} on rank 0 and {others.get(name)} on rank {rank}: give all ranks "
                        "the same"
                    )
                )


def _may_be_options(told: Any) -> bool:
    return isinstance(told, dict) and all(isinstance(value, str) for value in told.values())


def require_same_digests(group: Group, names: Sequence[str], digests: Sequence[bytes]) -> None:
    """Likewise, of parameters that need not be there any longer."""
    whole = b"".join(digests)
    for rank, other in enumerate(group.core.exchange("the model's digests", whole)):
        if len(other) != len(whole):
            raise MismatchError(f"ranks {group.rank} and {rank} have different numbers of parameters")
        for i, name in enumerate(names):
            if other[i * _DIGEST : (i + 1) * _DIGEST] != digests[i]:
                raise MismatchError(
                    f"{name} differs between ranks {group.rank} and {rank}: build the model from the same "
                    "seed or checkpoint on all ranks"
                )


_DIGEST = 8  # bytes


def digest_of(name: str, parameter: torch.Tensor) -> bytes:
    """Return a digest of name, shape, dtype and values; of a subclass that does not give its values, of the facts."""
    total = hashlib.blake2b(f"{name} {parameter.shape} {parameter.dtype}".encode(), digest_size=_DIGEST)
    total.update(comparable_digest(parameter).encode())
    return total.digest()


def can_reduce(parameter: torch.Tensor) -> bool:
    """Tell whether gradients of a parameter that is whole on every rank can be added."""
    return is_plain_tensor(parameter) and parameter.dtype in REDUCED
