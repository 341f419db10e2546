"""Hooks of gradients that are not registered by a method of the parameter: `torch.Tensor.register_hook(p, hook)`, and
torch.autograd.graph.register_multi_grad_hook()."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable, graph
from torch.utils.hooks import RemovableHandle

from .backwards import current_task
from .parameter import LogicalParameter
from .replicated import replicated_of


@functools.cache
def watch_gradient_hooks() -> None:
    """Have hooks of parameters get what all ranks have added up, however they are registered. Once a process."""
    _follow_method("register_hook", lambda whole: whole.register_tensor_hook)
    _follow_method("register_post_accumulate_grad_hook", lambda whole: whole.hooks.register)
    _follow_several()


def _follow_method(name: str, of_whole: Callable[[Any], Callable[..., RemovableHandle]]) -> None:
    register = getattr(torch.Tensor, name)

    @functools.wraps(register)
    def follow(tensor: torch.Tensor, hook: Callable[..., Any]) -> RemovableHandle:
        whole = replicated_of(tensor)
        if whole is not None:
            return of_whole(whole)(hook)
        own: Callable[..., Any] | None = getattr(type(tensor), name) if isinstance(tensor, LogicalParameter) else None
        if own is not None and own is not follow:
            return own(tensor, hook)  # type: ignore[no-any-return]
        return register(tensor, hook)  # type: ignore[no-any-return]

    setattr(torch.Tensor, name, follow)


def _follow_several() -> None:
    register = graph.register_multi_grad_hook

    @functools.wraps(register)
    def follow(tensors: Sequence[Any], fn: Callable[..., None], *, mode: Any = "all") -> RemovableHandle:
        own = any(isinstance(tensor, LogicalParameter) or replicated_of(tensor) is not None for tensor in tensors)
        if mode != "all" or not own:
            return register(tensors, fn, mode=mode)
        return _HookOfAll(tensors, fn).handle

    graph.register_multi_grad_hook = follow


class _HookOfAll:
    """A function that is called once a backward with the gradients of several tensors, None for what it has not
    reached. torch counts the nodes that are to run, and no node is that of a sharded weight: it is called at the end of
    the backward, behind the reduction. Thread-safe."""

    def __init__(self, tensors: Sequence[Any], fn: Callable[[Sequence[torch.Tensor | None]], None]) -> None:
        self._fn = fn
        self._count = len(tensors)
        self._lock = threading.Lock()
        self._gradients: dict[int, list[torch.Tensor | None]] = {}  # of backwards that run
        self.handle = graph._MultiHandle(
            tuple(tensor.register_hook(functools.partial(self._take, place)) for place, tensor in enumerate(tensors))
        )

    def _take(self, place: int, gradient: torch.Tensor) -> None:
        task = current_task()
        with self._lock:
            begins = task not in self._gradients
            self._gradients.setdefault(task, [None] * self._count)[place] = gradient
        if begins:  # behind what is called at the end of the backward, which may have been registered later
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(lambda: self._call(task)))

    def _call(self, task: int) -> None:
        self._fn(self._gradients.pop(task))
