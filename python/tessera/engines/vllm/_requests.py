"""What requests to a server's routes may say."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..._errors import InvalidArgumentError
from ._client import PAUSES

_DEFAULT_TIMEOUT = 60.0
_LONGEST_TIMEOUT = 3600.0


def init_of(body: Any) -> dict[str, Any]:
    """The `init` of a request to join."""
    init = body.get("init") if isinstance(body, dict) else None
    if not isinstance(init, dict):
        raise InvalidArgumentError('give {"init": {"pair": ..., "trainer": ..., "engine": ...}}')
    _timeout(init)
    return init


def replicas_of(body: Any) -> int:
    """How many replicas the trainer counts on, in a request to join."""
    replicas = body.get("replicas", 1)
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise InvalidArgumentError(f"replicas={replicas!r}: give the server's --data-parallel-size")
    return replicas


class Asked(NamedTuple):
    """A request to update. `offset`: How much larger numbers on the bus, such as min_version, are than a trainer's."""

    min_version: int | None
    timeout: float
    pause: str
    clear_cache: bool
    run: str | None
    offset: int = 0


def update_of(body: Any) -> Asked:
    if not isinstance(body, dict):
        raise InvalidArgumentError('give {"min_version": N or null, "timeout": seconds, "pause": "keep"}')
    version, pause = body.get("min_version"), body.get("pause", PAUSES[0])
    if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 1):
        raise InvalidArgumentError(f"min_version={version!r}: give a version from 1, or null")
    if pause not in PAUSES:
        raise InvalidArgumentError(f"pause={pause!r}: give one of {', '.join(PAUSES)}")
    clear_cache = body.get("clear_cache", True)
    if not isinstance(clear_cache, bool):
        raise InvalidArgumentError(f"clear_cache={clear_cache!r}: give true or false")
    run = body.get("run")
    if run is not None and not isinstance(run, str):
        raise InvalidArgumentError(f"run={run!r}: give the trainer's, as text, or null")
    offset = body.get("offset", 0)
    if isinstance(offset, bool) or offset not in (0, 1):
        raise InvalidArgumentError(f"offset={offset!r}: give 0, or 1 in a run whose first version is 0")
    return Asked(version, _timeout(body), pause, clear_cache, run, offset)


def _timeout(body: dict[str, Any]) -> float:
    given = body.get("timeout", _DEFAULT_TIMEOUT)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= _LONGEST_TIMEOUT:
        raise InvalidArgumentError(f"timeout={given!r}: give seconds, up to {_LONGEST_TIMEOUT:g}")
    return float(given)
