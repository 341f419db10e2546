"""`to()`, `half()`, `cuda()` and their like of a module that has sharded parameters: looked at before torch changes the
first one, as it would leave a model that is converted in part."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from .parameter import LogicalParameter

_within = threading.local()
_watched: list[Any] = []  # torch's own


def watch_moves() -> None:
    """Look at what modules of any kind are moved to. Once a process."""
    apply: Any = torch.nn.Module._apply
    if _watched:
        return
    _watched.append(apply)

    @functools.wraps(apply)
    def _apply(module: torch.nn.Module, function: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(_within, "outer", False):  # of a part of a module that has been looked at
            return apply(module, function, *args, **kwargs)
        _within.outer = True
        try:
            require_in_place(module, function)
            return apply(module, function, *args, **kwargs)
        finally:
            _within.outer = False

    torch.nn.Module._apply = _apply  # type: ignore[assignment, method-assign]


def require_in_place(module: torch.nn.Module, function: Callable[[Any], Any]) -> None:
    """Throw if a function gives a sharded parameter another dtype, device or shape. One of each dtype is tried."""
    kinds: dict[torch.dtype, LogicalParameter] = {}
    for each in module.parameters():
        if isinstance(each, LogicalParameter):
            kinds.setdefault(each.dtype, each)
    with torch.no_grad():
        for parameter in kinds.values():
            parameter.require_like(function(parameter))
