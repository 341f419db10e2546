"""Norms of logical gradients: of all rows, whatever rank has them. The same value on all ranks, and for every N."""

from __future__ import annotations

import contextlib
import functools
import math
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._C import DisableTorchFunctionSubclass

from .. import _core
from .._arguments import elements, real
from .._errors import InvalidArgumentError
from .clipping import NAMES, is_clipping, is_gradient
from .compile import left_out, opaque
from .dispatch import SPECIAL
from .group import Group
from .loops import joined
from .store import Store, agree, refuse_difference, stamp_of
from .telling import collective, numbers_of
from .tensor import LogicalTensor, is_sharded

if TYPE_CHECKING:
    from .layers._tensor_parallel import TensorParallel


@opaque()
class PartGradient(torch.Tensor):
    """The .grad of a parameter that only tensor parallelism has cut: a plain tensor, but that GradScaler asks all ranks
    of the tp_group whether a value is not finite."""

    rows: torch.Tensor
    parallel: TensorParallel

    @classmethod
    @left_out
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunctionSubclass():
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                return unscale(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def of_part(rows: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """Return the same memory, as a gradient of what only tensor parallelism has cut."""
    gradient: PartGradient = torch.Tensor._make_subclass(PartGradient, rows)
    gradient.rows, gradient.parallel = rows, parallel
    return gradient


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows; a tensor that is not sharded is returned as it is."""
    if isinstance(tensor, LogicalTensor):
        rows = tensor.rows
        return tensor.whole() if rows is None else rows
    return tensor.rows if type(tensor) is PartGradient else tensor


@collective("clip_grad_norm_()")
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
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else elements("parameters", parameters, "tensors")
    for each in parameters:
        if not isinstance(each, torch.Tensor):
            raise InvalidArgumentError(
                f"clip_grad_norm_(): give parameters, such as model.parameters(), not {type(each).__name__}"
            )
    max_norm, norm_type = real("max_norm", max_norm), real("norm_type", norm_type)
    for each in joined:
        each.tell_clip(parameters, (max_norm, norm_type, bool(error_if_nonfinite)))
    with DisableTorchFunctionSubclass():  # a call for each parameter costs more than the rest
        found = [parameter.grad for parameter in parameters]
    pairs = [(p, each) for p, each in zip(parameters, found, strict=True) if each is not None]
    gradients = [gradient for _, gradient in pairs]
    total = torch.tensor(_norm_of_all(parameters, pairs, float(norm_type)), dtype=torch.float64)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise InvalidArgumentError(
            f"the norm of order {norm_type} of {len(gradients)} gradients is {float(total)}: they cannot be clipped"
        )
    factor = min(max_norm / (float(total) + 1e-6), 1.0)
    if not factor >= 1:  # NaN, too
        rows = [plain(gradient) for gradient in gradients]
        with _writing(gradients):
            for gradient in gradients:
                if isinstance(gradient, LogicalTensor):
                    gradient.store.written(stamp_of("clip", [factor], [gradient.store.stamp]))
            for kind in {(type(each), each.dtype) for each in rows}:
                torch._foreach_mul_([each for each in rows if (type(each), each.dtype) == kind], factor)
    return total


@contextlib.contextmanager
def _writing(gradients: list[torch.Tensor]) -> Iterator[None]:
    """Let rows of gradients be written: all ranks have come."""
    models = {id(each.store.model): each.store.model for each in gradients if is_sharded(each)}
    with contextlib.ExitStack() as sections:
        for model in sorted(models.values(), key=lambda model: model.number):
            sections.enter_context(model.writing_states())
        yield


def _norm_of_all(
    parameters: list[torch.Tensor], gradients: list[tuple[torch.Tensor, torch.Tensor]], order: float
) -> float:
    whole: list[torch.Tensor] = []
    cut: dict[int, tuple[TensorParallel, list[torch.Tensor]]] = {}  # by tp_group
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


def _parallel(parameter: torch.Tensor) -> TensorParallel | None:
    return getattr(parameter, "etp_parallel", None)


def _norms(gradients: list[torch.Tensor], order: float, together: bool) -> list[float]:
    group = model = None
    parts = []
    alive = []  # copies, while their addresses are used
    for gradient in gradients:
        weight = gradient.etp if is_sharded(gradient) else None
        rows = plain(gradient)
        if type(rows) is not torch.Tensor and hasattr(rows, "full_tensor"):  # a DTensor of fully_shard()
            rows = cast(Any, rows).detach().full_tensor()
            alive.append(rows)
        if rows.is_complex():  # a norm is that of absolute values
            rows = rows.detach().abs()
            alive.append(rows)
        dtype = NAMES.get(rows.dtype)
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
            group, model = weight.group, model or cast(Any, gradient).store.model
        slices, count = math.prod(weight.lead), weight.rows[1] - weight.rows[0]
        parts.append((rows.data_ptr(), slices, count, weight.matrix[1], dtype, weight.shard_rows, weight.matrix[0]))
    # The model's own calls, where these are of the same ranks: one that comes to another call is told of both.
    core = _core.ShardGroup.single("norm") if group is None else group.core
    if model is not None and model.replicas == 1:
        core = model.core
    if core.size > 1:
        _require_same(core, [gradient.store for gradient in gradients if is_sharded(gradient)])
    return _core.etp_norms(core, parts, order, together)


def _require_same(core: _core.ShardGroup, stores: list[Store]) -> None:
    """Throw, on all ranks, if they have not written the same into tensors whose rows are added up. Collective."""
    stamps = [store.stamp for store in stores]
    told = stamp_of("norms", [], stamps).to_bytes(8, "little", signed=True)
    if len(set(core.exchange("what a norm is of", told))) == 1:
        return
    form = f"<{len(stamps)}q"
    every = list(numbers_of(core.exchange("what differs", struct.pack(form, *stamps)), form, "what differs"))
    for store, *of_ranks in zip(stores, *every, strict=True):
        store.require_same(of_ranks)


# --- operations of the dispatcher on gradients, whose norms are collective and do not depend on the number of ranks


def _scalar(value: float, like: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype or like.dtype.to_real())


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    order = args[1] if len(args) > 1 else 2
    dim = args[2] if len(args) > 2 else None
    keepdim = args[3] if len(args) > 3 else False
    if not is_gradient(x) or dim is not None or keepdim or (x.store.asks_nobody() and not is_clipping()):
        return NotImplemented
    return _scalar(_norm_of(x, float(order)), x, kwargs.get("dtype"))


# By model and order: of stores whose norms have been taken, the versions that they are of, and those that nobody has
# asked for yet.
Known = weakref.WeakKeyDictionary[Store, tuple[tuple[int, int], float | None]]
_known: weakref.WeakKeyDictionary[Any, dict[float, Known]] = weakref.WeakKeyDictionary()


def _norm_of(x: LogicalTensor, order: float) -> float:
    """Return a tensor's norm. Programs that clip take those of all gradients, one after another: with the second one,
    the others' are taken in the same exchange."""
    known = _known.setdefault(x.store.model, {}).setdefault(order, weakref.WeakKeyDictionary())
    version, norm = known.get(x.store, (None, None))
    if norm is None or version != _version_of(x):
        asked = [x]
        gradients = _gradients_of(x.store.model)
        if any(x.store is each.store for each in gradients):
            current = {id(each.store) for each in gradients if known.get(each.store, (None,))[0] == _version_of(each)}
            if current - {id(x.store)}:
                asked += [each for each in gradients if each.store is not x.store and id(each.store) not in current]
        norms = _norms(list(asked), order, together=False)
        known.update((each.store, (_version_of(each), found)) for each, found in zip(asked, norms, strict=True))
        norm = norms[0]
    known[x.store] = _version_of(x), None  # once: rows may be written in ways that nobody counts
    return norm


def _version_of(tensor: LogicalTensor) -> tuple[int, int]:
    assert tensor.rows is not None
    return tensor.store.version, tensor.rows._version


def _gradients_of(model: Any) -> list[LogicalTensor]:
    with DisableTorchFunctionSubclass():
        return [each for each in (weight.parameter.grad for weight in model.weights) if is_gradient(each)]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = list(args[0])
    order = float(args[1]) if len(args) > 1 else 2.0
    if not all(is_gradient(each) or not isinstance(each, LogicalTensor) for each in tensors):
        return NotImplemented
    found = _norms(tensors, order, together=False)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return [_scalar(value, each, dtype) for value, each in zip(found, tensors, strict=True)]


def unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """GradScaler's: a value that is not finite is found on all ranks, of tp_groups, too, so that all of them skip the
    step. One factor is for all ranks."""
    models = {id(each.store.model): each.store for each in grads if is_sharded(each)}
    for store in models.values():
        if not agree(store, f"the unscaling of {store} and others", repr(inv_scale.item()).encode()):
            raise refuse_difference(f"the unscaling of {store} and others")
    with _writing(grads):
        torch._amp_foreach_non_finite_check_and_unscale_([plain(each) for each in grads], found_inf, inv_scale)
        for store in (each.store for each in grads if is_sharded(each)):
            store.written(stamp_of("unscale", [inv_scale.item()], [store.stamp]))
    agreements: dict[int, Callable[[float], float]] = {}  # by group, in the order of parameters
    for each in grads:
        parallel = each.parallel if type(each) is PartGradient else None
        if is_sharded(each):
            store = each.store
            agreements.setdefault(id(store.spec.group), functools.partial(_largest, store.spec.group))
            parallel = getattr(each.etp, "parallel", None)
        if parallel is not None:
            agreements.setdefault(id(parallel.group), functools.partial(_largest_of_parts, parallel))
    found = float(found_inf)
    for _ in agreements:  # what one group has found passes on to ranks of all others
        for exchange in agreements.values():
            found = exchange(found)
    found_inf.fill_(found)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not all(is_gradient(each) for each in args[0] if isinstance(each, LogicalTensor)):
        return NotImplemented
    return unscale(*args)


def _largest(group: Group, value: float) -> float:
    answers = group.core.exchange("found_inf", struct.pack("=f", value))
    return max(float(each) for (each,) in numbers_of(answers, "=f", "found_inf"))


def _largest_of_parts(parallel: TensorParallel, value: float) -> float:
    return max(parallel.of_all_ranks(value))


SPECIAL.update(
    {
        torch.ops.aten.linalg_vector_norm.default: _vector_norm,
        torch.ops.aten._foreach_norm.Scalar: _foreach_norm,
        torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    }
)
