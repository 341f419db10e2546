"""Data parallelism: each replica of a server is a job of its own on the bus, whose ranks vote among themselves. The
server asks all of them, and installs a version if all have received it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from ..._errors import InvalidArgumentError
from .._updates import Ranks, RankStatus


def job_of(engine: str, replica: int) -> str:
    """The name of a replica's job."""
    return engine if replica == 0 else f"{engine}-dp{replica}"


def jobs_of(engine: str, replicas: int) -> list[str]:
    return [job_of(engine, each) for each in range(replicas)]


def rank_of(group: Any, parallel: Any) -> tuple[int, int]:
    """Rank and world size within the replica of a worker, whose world group is that of all replicas if the model has
    experts, as they are shared, and that of its own replica otherwise, where vLLM sets data_parallel_size to 1."""
    world = group.world_size // parallel.data_parallel_size
    return group.rank_in_group % world, world


class Replicas:
    """Of the client of a server's engines."""

    def __init__(self, client: Any) -> None:
        parallel = getattr(client.vllm_config, "parallel_config", None)
        self._client = client
        self._is_balanced_outside = any(
            getattr(parallel, each, False) for each in ("data_parallel_external_lb", "data_parallel_hybrid_lb")
        )
        self.count: int = getattr(parallel, "data_parallel_size", 1)

    def require(self, wanted: int) -> None:
        """Raises InvalidArgumentError unless that is their number, and they can be asked."""
        if self.count != wanted:
            raise InvalidArgumentError(
                f"this server has --data-parallel-size {self.count}, and the trainer counts on {wanted}: give its "
                f"Trainer data_parallel={self.count}"
            )
        self.require_all()

    def require_all(self) -> None:
        """Raises InvalidArgumentError unless all of them can be asked."""
        if self.count > 1 and (self._is_balanced_outside or len(self._engines()) != self.count):
            raise InvalidArgumentError(
                f"this server reaches {len(self._engines())} of its {self.count} replicas: with data parallelism one "
                "server must have all of them, without --data-parallel-external-lb and --data-parallel-hybrid-lb"
            )

    async def call(self, method: str, args: Sequence[Any], only: Sequence[int] | None = None) -> list[Any]:
        """What each worker answers, in the order of replicas and ranks. `only`: these replicas."""
        if self.count == 1:
            answers: list[Any] = await self._client.collective_rpc(method, args=args)
            return answers
        # collective_rpc() of the client asks all of them, too, and gives what the first one answers.
        core, engines = self._client.engine_core, self._engines()
        asked = engines if only is None else [engines[each] for each in only]
        calls = [
            core._call_utility_async("collective_rpc", method, None, tuple(args), None, engine=each) for each in asked
        ]
        ranks: list[Any] = []
        for found in await asyncio.gather(*calls, return_exceptions=True):  # none is left under way
            if isinstance(found, BaseException):
                raise found
            ranks += found
        return ranks

    def unready(self, ranks: Ranks) -> list[int]:
        """Replicas of which a rank has no version to install."""
        return sorted({self._of(rank, ranks) for rank, each in enumerate(ranks) if not each.ready})

    def judged(self, ranks: Ranks, replicas: Sequence[int]) -> list[RankStatus]:
        """The same, with verdicts of these replicas only: those of others are of an earlier update."""
        return [
            each if self._of(rank, ranks) in replicas else dataclasses.replace(each, verdict=None)
            for rank, each in enumerate(ranks)
        ]

    def _of(self, rank: int, ranks: Ranks) -> int:
        return rank * self.count // len(ranks)

    def _engines(self) -> Sequence[Any]:
        core = getattr(self._client, "engine_core", None)
        return getattr(core, "core_engines", ()) if hasattr(core, "_call_utility_async") else ()
