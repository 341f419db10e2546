"""The hooks that autograd calls for what it saves now. Recent torch tells them; of older torch (2.6) those that are
entered by saved_tensors_hooks() are followed, as torch's checkpoint and offloading do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _Entered(threading.local):
    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


_entered = _Entered()


def _told() -> Hooks | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _followed() -> Hooks | None:
    return _entered.hooks[-1] if _entered.hooks else None


def _follow() -> None:
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    def entered(self: Any) -> None:
        enter(self)
        _entered.hooks.append((self.pack_hook, self.unpack_hook))

    def left(self: Any, *error: object) -> None:
        leave(self, *error)
        if _entered.hooks:  # else it was entered before
            _entered.hooks.pop()

    saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
    saved_tensors_hooks.__exit__ = left  # type: ignore[method-assign]


if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
    innermost_hooks = _told
else:
    _follow()
    innermost_hooks = _followed
