"""Backwards that fail: the other ranks, which come to the same backward, are told of it at once.

torch gives no hook for that. Everything that starts a backward in Python (`Tensor.backward()`, `torch.autograd.grad()`,
checkpoints) calls one function, which is followed here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .grad_values import reduced_values
from .telling import Family

if TYPE_CHECKING:
    from .model import ShardedModel

current_task = torch._C._current_graph_task_id  # of the backward that runs in this thread
NO_TASK = -1

_INPUTS = 3  # the place among arguments behind the roots


@functools.cache
def watch_backwards(models: Callable[[], Iterable[ShardedModel]]) -> None:
    """Follow all backwards of the process. Once."""
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_and_reduce(roots: Any, *args: Any, **kwargs: Any) -> Any:
        values = run(roots, *args, **kwargs)
        return values if kwargs.get("accumulate_grad", True) else reduced_values(args[_INPUTS], values)

    def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        if current_task() != NO_TASK:  # within another one
            return run_and_reduce(roots, *args, **kwargs)
        before = [(model, model.member.family, model.member.family.count()) for model in models()]
        unused = [model for model, *_ in before if model.backwards == 0 and model.size > 1]
        for model, *_ in before:
            model.follow_whole()
        try:
            values = run_and_reduce(roots, *args, **kwargs)
            for model in unused:
                if model.backwards > 0:
                    _note_others(roots, model)
            return values
        except BaseException as error:
            told: set[Family] = set()
            reached = _leaves_of(roots)
            for model, family, count in before:
                if not model.trains():
                    model.leave_alone()
                elif family not in told and not (model.idle and reached.isdisjoint(map(id, model.leaves()))):
                    told.add(family)
                    family.tell("a backward", error, count)
            raise

    torch.autograd._engine_run_backward = run_backward  # type: ignore[assignment, attr-defined]


# Parameters that no sharded model has, and that get gradients through one: address and the model's name, by id.
_others: dict[int, tuple[int, str]] = {}


def _note_others(roots: Iterable[Any], model: ShardedModel) -> None:
    """Note what the first backward through a model trains beside it."""
    for leaf in _leaves_in(roots):
        if type(leaf) is torch.nn.Parameter and not hasattr(leaf, "etp_replicated"):
            _others[id(leaf)] = leaf.data_ptr(), model.name


def model_beside(parameter: torch.Tensor) -> str | None:
    """Return the name of the sharded model through which a parameter that is none of its own gets gradients."""
    address, name = _others.get(id(parameter), (0, ""))
    return name if name and parameter.data_ptr() == address else None


def _leaves_of(roots: Iterable[Any]) -> set[int]:
    """Return the ids of the leaves that the graph of some results leads to: the backward may have failed before it has
    come to any weight."""
    return {id(leaf) for leaf in _leaves_in(roots)}


def _leaves_in(roots: Iterable[Any]) -> list[torch.Tensor]:
    waiting = [getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots]
    seen: set[Any] = set()
    leaves = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
        waiting += [each for each, _ in node.next_functions]
    return leaves
