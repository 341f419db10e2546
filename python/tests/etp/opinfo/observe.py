"""One call of an operation and what is seen of it; and what plain torch gives to each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from .adapters import Adapter, Box, Unsharded
from .cases import Case
from .compare import Mismatch, shapes_of, take_snapshot
from .modes import Effect, Mode
from .options import Options

T = TypeVar("T")


class Steps(Protocol):
    """How steps of a call are run: ranks do so together, the oracle alone."""

    def run(self, step: Callable[[], T]) -> T: ...


class Alone:
    def run(self, step: Callable[[], T]) -> T:
        return step()


class NothingToAskError(Exception):
    """The mode has no meaning for the case."""


@dataclass(frozen=True)
class Observation:
    """What one rank sees of a call."""

    parts: dict[str, list[Any]]  # snapshots, by what they are of
    identities: dict[int, int]  # of results that are an argument itself: its place
    output: Any
    arguments: list[Any]


def observe(
    adapter: Adapter,
    box: Box,
    case: Case,
    mode: Mode,
    options: Options,
    rank: int,
    steps: Steps,
    expected: Observation | None = None,
) -> Observation:
    """Call an operation with a rank's arguments.

    Shapes are compared with those of `expected`, if given, before values are seen: that is collective, and ranks that
    see different things would wait for each other.
    """
    parts: dict[str, list[Any]] = {}

    def use(parameters: dict[int, torch.Tensor]) -> tuple[Any, list[Any], dict[int, int]]:
        arguments = case.arguments(parameters, options, rank, mode.graph and options.grad)

        def call() -> tuple[Any, list[Any], dict[int, int]]:
            output = case.call(mode.call, arguments, options.seed_of(rank))
            leaves = tree_leaves(output)
            identities = _identities(leaves, arguments) if mode.effect is Effect.ARGUMENT else {}
            if expected is not None:
                if identities != expected.identities:
                    raise Mismatch("a result is not the argument that was written")
                leaves = [leaf for index, leaf in enumerate(leaves) if index not in identities]
                if (shapes := shapes_of(leaves)) != (wanted := shapes_of(expected.parts["output"])):
                    raise Mismatch(f"output: shapes {shapes} for {wanted}"[:200])
            else:
                leaves = [leaf for index, leaf in enumerate(leaves) if index not in identities]
            return output, leaves, identities

        output, leaves, identities = steps.run(call)
        parts["output"] = [take_snapshot(leaf, adapter.whole) for leaf in leaves]
        if mode.effect is Effect.RESULT:
            steps.run(lambda: _write_into(leaves))
        return output, arguments, identities

    with torch.set_grad_enabled(mode.graph), torch.inference_mode() if mode.inference else contextlib.nullcontext():
        output, arguments, identities = box(use) if mode.in_forward else use(box.by_place())
        if mode.writes:
            tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
            parts["argument afterwards"] = [take_snapshot(tensor, adapter.whole) for tensor in tensors]
            parts["next forward"] = box(
                lambda parameters: [take_snapshot(tensor.clone(), adapter.whole) for tensor in parameters.values()]
            )
    return Observation(parts, identities, output, arguments)


def _identities(leaves: Sequence[Any], arguments: Sequence[Any]) -> dict[int, int]:
    return {
        index: place
        for index, leaf in enumerate(leaves)
        for place, argument in enumerate(arguments)
        if leaf is argument and isinstance(leaf, torch.Tensor)
    }


def _write_into(results: Iterable[Any]) -> None:
    """Halve floats: the bits of that are exact, and a write of the same on every rank."""
    writable = [value for value in results if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if not writable:
        raise NothingToAskError
    for result in writable:
        result.mul_(0.5)


def differentiable(case: Case, output: Any) -> list[torch.Tensor]:
    """Return the outputs that have a graph."""
    leaves = tree_leaves(case.outputs_for_grad(output))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def other_leaves(case: Case, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Return the plain arguments that gradients are asked of."""
    plain = [value for place, value in enumerate(arguments) if place not in case.chosen]
    return [value for value in plain if isinstance(value, torch.Tensor) and value.requires_grad]


def cotangents(outputs: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Return a rank's own weights of its outputs: equal ones would not notice a rank that takes another's gradient."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [(torch.rand(output.shape, generator=generator) + 0.5).to(output.dtype) for output in outputs]


def dense(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        return torch.zeros(like.shape, dtype=like.dtype)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def expect(case: Case, mode: Mode, options: Options) -> list[Observation] | None:
    """Return what plain torch gives to each rank; None where it raises, and nothing is asked.

    The part "gradient" has those of the sharded arguments, summed over ranks, and then a rank's own of the others.
    """
    adapter = Unsharded(options)
    own = range(options.ranks if options.differ or options.numbers else 1)  # equal arguments give equal results
    try:
        calls = [observe(adapter, Box(case.sharded), case, mode, options, rank, Alone()) for rank in own]
    except Exception:
        return None
    calls = [calls[rank % len(calls)] for rank in range(options.ranks)]
    if mode.graph and options.grad:
        outputs = [differentiable(case, call.output) for call in calls]
        if any(outputs) and not all(outputs):
            return None
        if all(outputs):
            with contextlib.suppress(Exception):  # an operation without a gradient
                return _with_gradients(case, calls, outputs)
    return calls


def _with_gradients(
    case: Case, calls: Sequence[Observation], outputs: Sequence[Sequence[torch.Tensor]]
) -> list[Observation]:
    gradients = []
    for rank, (call, results) in enumerate(zip(calls, outputs, strict=True)):
        leaves = [call.arguments[place] for place in case.chosen] + other_leaves(case, call.arguments)
        of_leaves = torch.autograd.grad(
            results, leaves, cotangents(results, rank), retain_graph=True, allow_unused=True
        )
        gradients.append([dense(*pair) for pair in zip(of_leaves, leaves, strict=True)])
    count = len(case.chosen)
    sums = [sum(own[1:], own[0]) for own in zip(*(of_rank[:count] for of_rank in gradients), strict=True)]
    return [
        replace(
            call, parts={**call.parts, "gradient": [take_snapshot(tensor, _as_it_is) for tensor in sums + own[count:]]}
        )
        for call, own in zip(calls, gradients, strict=True)
    ]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
