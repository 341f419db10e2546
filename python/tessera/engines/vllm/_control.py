"""How clients of vLLM's own trainer interface, which have no method for it, ask workers what came of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..._errors import InvalidArgumentError
from .._http import call
from .._updates import RankStatus
from ._client import statuses

Call = Callable[[str, list[Any]], list[RankStatus]]
"""Calls a method of worker.Extension on all ranks of an engine: their statuses. Raises UnavailableError."""


@dataclass(frozen=True)
class Reached:
    """How a client reaches the engine beyond the four calls of VLLMWeightSyncClient."""

    call: Call
    set_version: Callable[[str], Any]


def reached_by(client: Any, timeout: float) -> Reached:
    """By a client that has collective_rpc(method, args=), as vLLM's LLM has it, or by vLLM's own clients. Raises
    InvalidArgumentError for another one."""
    if hasattr(client, "collective_rpc"):
        return Reached(
            lambda method, args: statuses("the client", method, client.collective_rpc(method, args=tuple(args))),
            getattr(client, "update_weight_version", lambda version: None),
        )
    if hasattr(client, "base_url"):
        return _by_http(str(client.base_url), timeout)
    if hasattr(client, "handles"):
        return _by_ray(client.handles)
    raise InvalidArgumentError(
        f"client {type(client).__name__} cannot ask workers what came of an update: give it a method "
        "collective_rpc(method, args=), as vLLM's LLM has"
    )


def _by_http(url: str, timeout: float) -> Reached:
    def asked(method: str, args: list[Any]) -> list[RankStatus]:
        answer = call(url, "collective_rpc", {"method": method, "args": args}, timeout=timeout)
        return statuses(url, method, answer.get("results"))

    def show(version: str) -> Any:
        return call(url, "update_weight_version", {"new_version": version}, timeout=timeout)

    return Reached(asked, show)


def _by_ray(handles: Sequence[Any]) -> Reached:
    import ray

    def of_all(method: str, args: list[Any]) -> list[RankStatus]:
        answers = ray.get([each.collective_rpc.remote(method, args=tuple(args)) for each in handles])
        return statuses("Ray's actors", method, [status for answer in answers for status in answer])

    return Reached(of_all, lambda version: ray.get([each.update_weight_version.remote(version) for each in handles]))
