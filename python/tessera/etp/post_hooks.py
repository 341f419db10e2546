"""Hooks that are called once a gradient has been added: those of register_post_accumulate_grad_hook()."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from torch.utils.hooks import RemovableHandle

PostHook = Callable[[torch.Tensor], None]


class PostHooks:
    """What is called once a gradient has been added."""

    def __init__(self, hooks: dict[int, PostHook] | None = None) -> None:
        self.entries: dict[int, PostHook] = OrderedDict() if hooks is None else hooks

    def register(self, hook: PostHook) -> RemovableHandle:
        handle = RemovableHandle(self.entries)
        self.entries[handle.id] = hook
        return handle

    def call(self, parameter: torch.Tensor) -> None:
        for hook in self:
            hook(parameter)

    def __iter__(self) -> Iterator[PostHook]:
        return iter(list(self.entries.values()))

    def __bool__(self) -> bool:
        return bool(self.entries)
