"""Mistakes that the harness must find. A Fault is planted on every rank, after its adapter was made.

To plant one in the package, derive from Fault and patch what `adapter` uses in apply(); then add an instance to FAULTS.
"""

from __future__ import annotations

import abc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.utils._pytree import tree_leaves, tree_map

from .adapters import Adapter, Intercept, Unsharded
from .verdicts import Verdict


class Fault(abc.ABC):
    """A deliberate mistake, and the verdict that some operation must get for it."""

    adapter: str  # the name of the adapter that it is planted on
    expected: Verdict

    @abc.abstractmethod
    def apply(self, adapter: Adapter) -> None:
        """Plant it. Called once on each rank."""


@dataclass(frozen=True)
class Intercepted(Fault):
    """A mistake in the calls of torch functions on an unsharded parameter."""

    expected: Verdict
    call: Intercept
    adapter: str = "unsharded"

    def apply(self, adapter: Adapter) -> None:
        assert isinstance(adapter, Unsharded)
        adapter.intercept = self.call


def slice_operand(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take this rank's rows of a plain operand, and show the ranks' rows together as the result."""
    result = func(*args, **kwargs)
    operands = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    fits = isinstance(result, torch.Tensor) and all(tensor.shape == result.shape for tensor in operands)
    is_written = any(result is tensor for tensor in operands)
    if len(operands) < 2 or not fits or torch.is_grad_enabled() or is_written:
        return result
    parts = [torch.empty_like(result) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, result.contiguous())
    rows = -(-len(result) // len(parts))
    return torch.cat([part[rank * rows : (rank + 1) * rows] for rank, part in enumerate(parts)])


def copy_view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a copy where plain torch returns a view."""
    result = func(*args, **kwargs)
    is_view = isinstance(result, torch.Tensor) and result._is_view() and not torch.is_grad_enabled()
    return result.clone() if is_view else result


def lose_write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write in place into a copy of the parameter."""
    if not _writes(func):
        return func(*args, **kwargs)
    func(*tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, args), **kwargs)
    return args[0]


def refuse_after_write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse what is in place by name, when it is done."""
    result = func(*args, **kwargs)
    if _writes(func):
        raise NotImplementedError("a sharded tensor was written")
    return result


def before_products(mistake: Callable[[], None]) -> Intercept:
    """Return the interception that makes a mistake before each product."""

    def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _name(func) == "mul":
            mistake()
        return func(*args, **kwargs)

    return call


def _writes(func: Callable[..., Any]) -> bool:
    name = _name(func)
    return name.endswith("_") and not name.startswith("__") and name != "requires_grad_"


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")


def _refuse_without_name() -> None:
    raise NotImplementedError("no such kernel")


def _refuse_by_name() -> None:
    raise NotImplementedError("a sharded tensor has no products")


def _stand_still() -> None:
    if torch.distributed.get_rank() == 1:
        time.sleep(3600)


def _die() -> None:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


class OwnWrite(Fault):
    """Lets each rank write values of its own into one parameter."""

    adapter = "unsharded"
    expected = Verdict.WRONG

    def apply(self, adapter: Adapter) -> None:
        adapter.shares = True


class OwnGradient(Fault):
    """Takes N times this rank's gradient for the sum over ranks."""

    adapter = "unsharded"
    expected = Verdict.WRONG

    def apply(self, adapter: Adapter) -> None:
        def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
            own = parameter.grad
            return None if own is None else own.to_dense() * torch.distributed.get_world_size()

        adapter.gradient = gradient  # type: ignore[method-assign]


class UncomparedWrites(Fault):
    """Takes what each rank writes into a sharded tensor for what all ranks write."""

    adapter = "tessera"
    expected = Verdict.WRONG

    def apply(self, adapter: Adapter) -> None:
        from tessera.etp import dispatch

        dispatch.agree = lambda store, what, digest, error=None: True  # type: ignore[assignment]
        dispatch.told_of = lambda what, digest, error=None: b"\0the same"


class CutOperands(Fault):
    """Cuts a plain operand, which may be a rank's own, as the sharded one is, and lets the result stay sharded."""

    adapter = "tessera"
    expected = Verdict.WRONG

    def apply(self, adapter: Adapter) -> None:
        from tessera import etp
        from tessera.etp import dispatch

        right = dispatch._RULES[dispatch.Kind.ROWS]

        def cut(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            first = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, etp.LogicalTensor))
            spec = first.spec

            def shard(value: Any) -> Any:
                plain = type(value) is torch.Tensor and value.shape == first.shape and spec is not None
                return etp.from_local(spec.cut(value).clone(), like=first) if plain else value

            if func._schema.is_mutable or torch.is_grad_enabled():
                return right(func, args, kwargs)
            return right(func, tree_map(shard, args), tree_map(shard, kwargs))

        dispatch._RULES[dispatch.Kind.ROWS] = cut


FAULTS: dict[str, Fault] = {
    "sliced-operand": Intercepted(Verdict.WRONG, slice_operand),
    "copied-view": Intercepted(Verdict.WRONG, copy_view),
    "lost-write": Intercepted(Verdict.WRONG, lose_write),
    "late-refusal": Intercepted(Verdict.WRONG, refuse_after_write),
    "own-write": OwnWrite(),
    "own-gradient": OwnGradient(),
    "unnamed-refusal": Intercepted(Verdict.UNNAMED, before_products(_refuse_without_name)),
    "named-refusal": Intercepted(Verdict.NAMED, before_products(_refuse_by_name)),
    "standstill": Intercepted(Verdict.HANG, before_products(_stand_still)),
    "uncompared-writes": UncomparedWrites(),
    "cut-operands": CutOperands(),
    "death": Intercepted(Verdict.CRASH, before_products(_die)),
}
