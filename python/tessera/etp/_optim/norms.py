"""Norms of logical gradients: of all rows, whatever rank has them. The same value on all ranks, and for every N."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch._C import DisableTorchFunctionSubclass

from ... import _core
from ..._errors import InvalidArgumentError
from .._compile import left_out, opaque
from .._group import Group

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}


class Rows(Protocol):
    """What a norm needs of a weight: who has which rows."""

    group: Group
    matrix: torch.Size
    shard_rows: int

    @property
    def lead(self) -> torch.Size: ...
    @property
    def parallel(self) -> Parallel | None: ...


class Parallel(Protocol):
    """What norms, GradScaler and states need of a parameter that tensor parallelism has cut: `p.etp_parallel`."""

    group: Any

    def of_all_ranks(self, value: float) -> list[float]: ...
    def gather_parts(self, part: torch.Tensor, dim: int, halves: int, total: int) -> torch.Tensor: ...


@opaque()
class ShardedGradient(torch.Tensor):
    """The .grad of a sharded parameter. Functions that compute a norm give that of the logical gradient, and are
    collective; all others see this rank's rows, and return plain tensors. torch.nn.utils.clip_grad_norm_() is right so.

    Also of one that is whole but for tensor parallelism, which no norm counts: for GradScaler, which asks all ranks.
    """

    etp: Rows | None  # None: all rows are here
    rows: torch.Tensor
    parallel: Parallel | None  # that has cut the parameter

    @classmethod
    @left_out
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        norm = _functions.get(func)
        if norm is not None:
            found = norm(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def typed(rows: torch.Tensor, weight: Rows) -> torch.Tensor:
    """The same memory, as a gradient of that weight."""
    if weight.group.size == 1:
        return rows if weight.parallel is None else of_part(rows, weight.parallel)
    return _as_sharded(rows, weight, weight.parallel)


def of_part(rows: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """The same memory, as a gradient of what only tensor parallelism has cut."""
    return _as_sharded(rows, None, parallel)


def _as_sharded(rows: torch.Tensor, weight: Rows | None, parallel: Parallel | None) -> torch.Tensor:
    gradient: ShardedGradient = torch.Tensor._make_subclass(ShardedGradient, rows)
    gradient.etp, gradient.rows, gradient.parallel = weight, rows, parallel
    return gradient


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows; a tensor that is not of this type is returned as it is."""
    return tensor.rows if type(tensor) is ShardedGradient else tensor


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales gradients so that their norm, taken together, is at most max_norm; returns the norm, an f64 scalar.

    As torch.nn.utils.clip_grad_norm_(), with one exchange between ranks for all parameters, sharded and others. Sums
    are in f64 and in the order of rows: the norm is the same on all ranks, and for every number of ranks, 1 included;
    of a stack of experts, which plain torch has as one tensor, 1 may differ in the last bits. Parameters of layers with
    a parallel_mode count with all parts, those that the tp_group has whole once. Collective, over such a tp_group, too.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = list(parameters)
    with DisableTorchFunctionSubclass():  # a call for each parameter costs more than the rest
        found = [parameter.grad for parameter in parameters]
    pairs = [
        (p, each if type(each) is ShardedGradient else _typed(p, each))
        for p, each in zip(parameters, found, strict=True)
        if each is not None
    ]
    gradients = [gradient for _, gradient in pairs]
    total = torch.tensor(_norm_of_all(parameters, pairs, float(norm_type)), dtype=torch.float64)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise InvalidArgumentError(
            f"the norm of order {norm_type} of {len(gradients)} gradients is {float(total)}: they cannot be clipped"
        )
    factor = min(max_norm / (float(total) + 1e-6), 1.0)
    if not factor >= 1:  # NaN, too
        rows = [plain(gradient) for gradient in gradients]
        for kind in {(type(each), each.dtype) for each in rows}:
            torch._foreach_mul_([each for each in rows if (type(each), each.dtype) == kind], factor)
    return total


def _typed(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Of a sharded parameter as such, also one that the caller has set, such as its main_grad. One rank has a stack's
    gradient as a plain tensor, and adds it up by experts, too."""
    weight = getattr(parameter, "etp", None)
    if weight is None:
        return gradient
    return _as_sharded(gradient, weight, None) if weight.lead else typed(gradient, weight)


def _norm_of_all(
    parameters: list[torch.Tensor], gradients: list[tuple[torch.Tensor, torch.Tensor]], order: float
) -> float:
    whole: list[torch.Tensor] = []
    cut: dict[int, tuple[Parallel, list[torch.Tensor]]] = {}  # by tp_group
    for parameter in parameters:  # of which a rank may have no gradient of its part
        parallel = _parallel(parameter)
        if parallel is not None:
            cut.setdefault(id(parallel.group), (parallel, []))
    for parameter, gradient in gradients:
        parallel = _parallel(parameter) if cut else None
        (whole if parallel is None else cut[id(parallel.group)][1]).append(gradient)
    nothing = math.inf if order == -math.inf else 0.0
    norms = [_norms(whole, order, together=True)[0]] if whole else []
    for parallel, some in cut.values():
        norms += parallel.of_all_ranks(_norms(some, order, together=True)[0] if some else nothing)
    if len(norms) < 2 or math.isinf(order):
        return (min if order < 0 else max)(norms, default=0.0)
    return math.fsum(norms) if order == 0 else math.fsum(each**order for each in norms) ** (1 / order)


def _parallel(parameter: torch.Tensor) -> Parallel | None:
    return getattr(parameter, "etp_parallel", None)


def _norms(gradients: list[torch.Tensor], order: float, together: bool) -> list[float]:
    group = None
    parts = []
    alive = []  # copies, while their addresses are used
    for gradient in gradients:
        if type(gradient) is ShardedGradient:
            rows, weight = gradient.rows, gradient.etp
        else:
            rows, weight = gradient, None
        if type(rows) is not torch.Tensor and hasattr(rows, "full_tensor"):  # a DTensor of fully_shard()
            rows = cast(Any, rows).detach().full_tensor()
            alive.append(rows)
        dtype = _NAMES.get(rows.dtype)
        if dtype is None or not rows.is_cpu:
            raise InvalidArgumentError(f"a norm of {rows.dtype} on {rows.device}: floats in host memory are possible")
        if not rows.is_contiguous():
            rows = rows.detach().contiguous()
            alive.append(rows)
        if weight is None:
            first = rows.shape[0] if rows.dim() > 0 else 1
            parts.append((rows.data_ptr(), 1, first, rows.numel() // max(first, 1), dtype, 0, first))
            continue
        if group is not weight.group:
            if group is not None and group.core is not weight.group.core:
                raise InvalidArgumentError(
                    f"a norm of gradients of two ETP groups, {group} and {weight.group}: take two"
                )
            group = weight.group
        *lead, count, columns = rows.shape
        slices = math.prod(lead) if lead else 1
        parts.append((rows.data_ptr(), slices, count, columns, dtype, weight.shard_rows, weight.matrix[0]))
    core = _core.ShardGroup.single("norm") if group is None else group.core
    return _core.etp_norms(core, parts, order, together)


# --- torch's functions


def _scalar(value: float, like: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype or like.dtype)


def _vector_norm(
    x: torch.Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None
) -> Any:
    if type(x) is not ShardedGradient or x.etp is None or dim is not None or keepdim or out is not None:
        return NotImplemented
    return _scalar(_norms([x], float(ord), together=True)[0], x.rows, dtype)


def _norm(
    input: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    return _vector_norm(input, 2.0 if p in ("fro", None) else float(p), dim, keepdim, dtype=dtype, out=out)


def _linalg_norm(
    A: torch.Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, out: Any = None, dtype: Any = None
) -> Any:
    return NotImplemented if ord is not None else _vector_norm(A, 2.0, dim, keepdim, dtype=dtype, out=out)


def _foreach_norm(tensors: list[torch.Tensor], ord: float = 2, dtype: Any = None) -> Any:
    if all(each.etp is None for each in tensors if type(each) is ShardedGradient):
        return NotImplemented
    found = _norms(list(tensors), float(ord), together=False)
    return tuple(_scalar(value, plain(each), dtype) for value, each in zip(found, tensors, strict=True))


def _unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """GradScaler's: a value that is not finite is found on all ranks, of tp_groups, too, so that all of them skip the
    step."""
    torch._amp_foreach_non_finite_check_and_unscale_([plain(each) for each in grads], found_inf, inv_scale)
    agreements: dict[int, Callable[[float], float]] = {}  # by group, in the order of parameters
    for each in grads:
        if type(each) is ShardedGradient:
            if each.etp is not None:
                agreements.setdefault(id(each.etp.group), functools.partial(_largest, each.etp.group))
            if each.parallel is not None:
                agreements.setdefault(id(each.parallel.group), functools.partial(_largest_of_parts, each.parallel))
    found = float(found_inf)
    for _ in agreements:  # what one group has found passes on to ranks of all others
        for agree in agreements.values():
            found = agree(found)
    found_inf.fill_(found)


def _largest(group: Group, value: float) -> float:
    own = struct.pack("=f", value)
    return max(float(struct.unpack("=f", each)[0]) for each in group.core.exchange("found_inf", own))


def _largest_of_parts(parallel: Parallel, value: float) -> float:
    return max(parallel.of_all_ranks(value))


_functions: dict[Any, Callable[..., Any]] = {
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    torch._foreach_norm: _foreach_norm,
}
