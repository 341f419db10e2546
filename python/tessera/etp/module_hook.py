"""Hooks that sharded models put on their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from .._errors import InvalidArgumentError
from .compile import left_out


class Hook:
    """A hook of a module of a sharded model, which goes when the model is unsharded or summoned."""

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        self._name = name
        self._function = left_out(function)

    @left_out
    def __call__(self, *args: Any) -> None:
        self._function(*args)

    @property
    def __name__(self) -> str:  # which torch.jit.script() asks for
        raise AttributeError(
            f"{self._name} is sharded, and torch.jit.script() cannot compile it: script it within etp.summon(model)"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise InvalidArgumentError(f"{self._name} is sharded and cannot be copied: copy it within etp.summon(model)")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"{self._name} is sharded and cannot be pickled as a module: save its state_dict(), which any rank can, or "
            "the model within etp.summon(model)"
        )
