"""Routes of a vLLM server, as its plugin for endpoints: an update is one request, which the server carries through, so
that a trainer that dies amid one leaves no server paused.

| | |
|---|---|
| `POST /v1/tessera/join` | meets a trainer: {"init": fields of InitInfo} |
| `POST /v1/tessera/update` | takes a version: {"min_version": 3, "timeout": 60, "pause": "keep", "clear_cache": true} |
| `GET /v1/tessera/status` | what each worker serves |

All answer with the fields of an EngineUpdate. They begin with /v1, so that vLLM's --api-key
guards them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..._errors import InvalidArgumentError
from .._updates import EngineUpdate, RankStatus, failed, served, shown
from ._client import NOT_MET, serves_already, statuses, unchanged
from ._replicas import Replicas
from ._settings import BACKEND
from ._versions import WeightVersions, marked

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ._requests import Asked

_POLL_SECONDS = (0.002, 0.05)  # the first, and the longest
_LEAST_PAUSE_SECONDS = 1.0  # for a server that stood still, and has the version by now
_ATTEMPTS = 3  # at a version that all replicas have
_DROPPED = "the server was busy until the caller had no more time, and did not begin"

HasLeft = Callable[[], Awaitable[bool]]


async def _never() -> bool:
    return False


class Endpoints:
    """vLLM makes one in the process of its HTTP server, if VLLM_PLUGINS names it."""

    name = "tessera"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._client: Any = None
        self._replicas: Replicas | None = None
        self._has_siblings = False  # other processes with these routes, by --api-server-count
        self._busy = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.metrics: Any = None
        self.version = "default"  # as vLLM calls what it has loaded itself

    def attach_router(self, app: FastAPI) -> None:
        from ._routes import add_routes

        add_routes(app, self)
        app.add_middleware(WeightVersions, version=self.shown_version)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if engine_client is None or not _is_ours(engine_client):
            return
        self._client = engine_client
        self._replicas = Replicas(engine_client)
        parallel = getattr(engine_client.vllm_config, "parallel_config", None)
        processes = getattr(parallel, "_api_process_count", 1)
        self._has_siblings = processes > 1 and hasattr(engine_client, "get_weight_version")
        self.metrics = new_metrics()
        engine_client.generate = marked(engine_client.generate)
        await self._show(await self._rpc("tessera_status"))  # what --load-format tessera has loaded

    async def shown_version(self) -> str:
        """The version in new headers."""
        if self._has_siblings:
            with contextlib.suppress(RuntimeError):  # replicas may be told of it one after another
                self.version = str(await self._client.get_weight_version())
        return self.version

    async def status(self) -> EngineUpdate:
        return EngineUpdate.of(await self._rpc("tessera_status"))

    async def join(self, init: dict[str, Any], replicas: int = 1, has_left: HasLeft = _never) -> EngineUpdate:
        """Meets the trainer, which counts on so many replicas; requests are served meanwhile. `has_left`: see
        update()."""
        self._everywhere().require(replicas)
        return await self._whole(lambda: self._join(init), has_left)

    async def update(self, asked: Asked, has_left: HasLeft = _never) -> EngineUpdate:
        """Takes a version. Goes on to its end if the caller leaves; one that has left, or has no time left, before its
        turn comes is dropped. `has_left`: Whether the caller has."""
        end = asyncio.get_running_loop().time() + asked.timeout

        async def has_no_time() -> bool:
            return asyncio.get_running_loop().time() > end or await has_left()

        return await self._whole(lambda: self._update(asked), has_no_time)

    async def _whole(self, work: Callable[[], Awaitable[EngineUpdate]], has_left: HasLeft) -> EngineUpdate:
        async def one_at_a_time() -> EngineUpdate:
            async with self._busy:
                if await has_left():
                    return EngineUpdate.of(await self._rpc("tessera_status"), _DROPPED)
                return await work()

        task = asyncio.create_task(one_at_a_time())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _join(self, init: dict[str, Any]) -> EngineUpdate:
        await self._rpc("tessera_leave")  # all ranks, before one of them comes back
        ranks = await self._settled(await self._rpc("tessera_meet", init))
        if not failed(ranks):
            ranks = await self._settled(await self._rpc("tessera_learn"))
        if failed(ranks):
            await self._rpc("tessera_leave")
        return EngineUpdate.of(ranks, failed(ranks))

    async def _update(self, asked: Asked) -> EngineUpdate:
        self._everywhere().require_all()
        end = asyncio.get_running_loop().time() + asked.timeout
        ranks = await self._rpc("tessera_status")
        if asked.run is not None and any(each.trainer != asked.run for each in ranks):
            return EngineUpdate.of(ranks, NOT_MET)
        if serves_already(ranks, asked.min_version, asked.offset):
            return unchanged(ranks)
        ranks = await self._received(asked)
        if failed(ranks):
            return self._counted(EngineUpdate.of(ranks))
        if unready := self._everywhere().unready(ranks):
            await self._rpc("tessera_commit", only=unready)  # installs nothing, and says why
            return self._counted(EngineUpdate.of(self._everywhere().judged(await self._rpc("tessera_status"), unready)))
        if error := self._apart(ranks):
            return self._counted(EngineUpdate.of(ranks, error))
        began = time.monotonic()
        is_one_version = True
        try:
            if not await self._is_paused(asked, end - asyncio.get_running_loop().time()):
                error = f"requests did not end in {asked.timeout:g} s, and nothing is installed"
                return self._counted(EngineUpdate.of(ranks, error))
            is_one_version = False  # as long as nobody knows what a commit has done
            try:
                ranks = await self._rpc("tessera_commit")
            except Exception:
                is_one_version = served(await self._rpc("tessera_status")) is not None
                raise
            is_one_version = served(ranks) is not None
            await self._show(ranks)
        finally:
            if is_one_version:
                await self._client.resume_generation()
        return self._counted(EngineUpdate.of(ranks, pause=time.monotonic() - began))

    async def _received(self, asked: Asked) -> list[RankStatus]:
        """Once no worker receives any more. Replicas of which one has found a newer version than others do it again."""
        more = [asked.offset] if asked.offset else []
        ranks = await self._settled(await self._rpc("tessera_receive", asked.min_version, asked.timeout, *more))
        for _ in range(_ATTEMPTS):
            if failed(ranks) or self._everywhere().unready(ranks) or not self._apart(ranks):
                break
            newest = max(each.received or 0 for each in ranks)
            ranks = await self._settled(await self._rpc("tessera_receive", newest, asked.timeout, *more))
        return ranks

    def _apart(self, ranks: list[RankStatus]) -> str:
        """Which versions replicas have received, if these differ; ranks of one replica vote about theirs."""
        versions = {each.received for each in ranks} if self._everywhere().count > 1 else set()
        return f"replicas have received versions {sorted(each or 0 for each in versions)}" if len(versions) > 1 else ""

    async def _is_paused(self, asked: Asked, seconds: float) -> bool:
        """Pauses; returns whether that was done in `seconds`. With "wait", requests may take longer to end than anybody
        waits."""
        pause = self._client.pause_generation(mode=asked.pause, clear_cache=asked.clear_cache)
        try:
            await asyncio.wait_for(pause, max(seconds, min(asked.timeout, _LEAST_PAUSE_SECONDS)))
        except TimeoutError:
            return False
        return True

    def _counted(self, answer: EngineUpdate) -> EngineUpdate:
        self.metrics.count(answer.ok, answer.pause)
        return answer

    async def _settled(self, ranks: list[RankStatus]) -> list[RankStatus]:
        """Once no worker is busy, which has a deadline of its own there."""
        wait, longest = _POLL_SECONDS
        while any(each.busy for each in ranks):
            await asyncio.sleep(wait)
            wait = min(longest, wait * 2)
            ranks = await self._rpc("tessera_status")
        return ranks

    async def _show(self, ranks: list[RankStatus]) -> None:
        """Their version in /weight_info, and as what vLLM marks tokens with."""
        version = shown(ranks)
        if version is not None:
            await self._client.update_weight_version(str(version))
            self.version = str(version)
            self.metrics.show(version)

    async def _rpc(self, method: str, *args: Any, only: Sequence[int] | None = None) -> list[RankStatus]:
        return statuses("the engine", method, await self._everywhere().call(method, args, only))

    def _everywhere(self) -> Replicas:
        if self._replicas is None:
            raise InvalidArgumentError(f'start the server with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'')
        return self._replicas


def new_metrics() -> Any:
    from ._metrics import Metrics

    return Metrics()


def _is_ours(client: Any) -> bool:
    config = getattr(client.vllm_config, "weight_transfer_config", None)
    return config is not None and config.backend == BACKEND
