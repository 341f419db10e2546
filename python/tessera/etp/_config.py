"""Options of this process for models that are sharded from now on."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._arguments import choice, flag, whole
from .._errors import InvalidArgumentError

_MAX_BYTES = 1 << 62


@dataclasses.dataclass
class Config:
    """See update_config()."""

    pad_for_alignment: int = 16
    weight_prefetch: bool = True
    prefetch: str = "auto"
    distance: int = 1
    expert_distance: int = 2
    cap_bytes: int | None = None
    check_param_states: bool = True


config = Config()


def update_config(**options: Any) -> None:
    """Sets options of models that are sharded from now on. The same on all ranks.

    Args:
        pad_for_alignment: Rows of a shard are a multiple of it, or of its format's if that is larger; 0: no padding.
        weight_prefetch: False: every weight is gathered when it is used.
        prefetch: "auto" leaves prefetching out where this rank has fewer than two CPUs; "on" and "off".
        distance: How many uses ahead.
        expert_distance: The same for lists of experts.
        cap_bytes: Of gathered weights; what does not fit is gathered when it is used. None: no limit.
        check_param_states: Every transition of a weight's state is checked; this cannot be turned off.
    """
    known = {field.name for field in dataclasses.fields(Config)}
    for name, value in options.items():
        if name not in known:
            raise InvalidArgumentError(f"Unknown ETP config option: {name}")
        setattr(config, name, _checked(name, value))


def _checked(name: str, value: Any) -> Any:
    if name == "prefetch":
        return choice(name, value, ("auto", "on", "off"))
    if name in ("weight_prefetch", "check_param_states"):
        return flag(name, value)
    if name == "cap_bytes":
        return None if value is None else whole(name, value, 0, _MAX_BYTES)
    return whole(name, value, 0, 1 << 20)
