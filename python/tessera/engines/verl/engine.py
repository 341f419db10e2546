"""The stream as a checkpoint engine of verl, which registers it when this module is imported."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ..._errors import InvalidArgumentError
from ._stream import RECEIVER, SENDER, Stream, _dtype


@CheckpointEngineRegistry.register("tessera")  # type: ignore[untyped-decorator, unused-ignore]
class TesseraCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Actor and rollout are processes of one host. The connection is kept from one update to the next, as long as the
    same processes take part and none has failed.

    It follows verl 0.9.1. Updates have run with verl's own base class and registry, in threads that stand for Ray's
    actors; verl's trainer, which needs GPUs, has not.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        rollout_dtype: str | torch.dtype | None = None,
        device: str | None = None,
        store: str | None = None,
        timeout: float = 300,
    ) -> None:
        """All but the first two come from verl's `engine_kwargs`.

        Args:
            bucket_size: In bytes; at most 64 MiB are used.
            is_master: The actor's first rank, which sends.
            rollout_dtype: What tensors of floats are sent as. None: as the actor has them.
            device: Where the rollout wants them. None: they stay in host memory.
            store: URL of the store. None: as everywhere.
            timeout: Seconds to wait for the other end, and for each bucket.
        """
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._dtype = _dtype(rollout_dtype) if isinstance(rollout_dtype, str) else rollout_dtype
        self._device = device
        self._store = store
        self._timeout = timeout
        self._stream: Stream | None = None
        self._place: tuple[str, int, int] | None = None  # stream, rank, world
        self._waits = False  # an actor's rank that does not send

    def prepare(self) -> dict[str, Any]:
        """Which stream this process has."""
        return {"master": self.is_master, "place": self._place}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """A new stream, unless all have the same one, of just these processes."""
        actors, receivers = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        if not actors or not actors[0]["master"]:
            raise InvalidArgumentError("the actor's first rank must be the checkpoint engine's master")
        kept = actors[0]["place"]
        name = kept[0] if kept is not None else ""
        wanted = [(name, rank, rollout_world_size) for rank in range(rollout_world_size)]
        if kept is None or [each["place"] for each in receivers] != wanted:
            name = f"verl-{uuid.uuid4().hex[:16]}"

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"stream": [name] * len(ranks), "rank": ranks, "world_size": [rollout_world_size] * len(ranks)}

        senders = arguments([0] + [-1] * (actor_wg_world_size - 1))
        return senders, arguments(list(range(rollout_world_size)))

    def init_process_group(self, stream: str, rank: int, world_size: int) -> None:
        """Joins the stream; an actor's rank with -1 does not take part."""
        self._waits = rank < 0
        place = (stream, rank, world_size)
        if self._waits or (self._place == place and self._stream is not None):
            return
        self._leave()
        role, ranks = (SENDER, 1) if self.is_master else (RECEIVER, world_size)
        self._stream = Stream(
            stream,
            role,
            rank=rank,
            world=ranks,
            bucket_bytes=self.bucket_size,
            store=self._store,
            timeout=self._timeout,
        )
        self._place = place

    def finalize(self) -> None:
        """Nothing: what is needed again stays."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Sends all of them from the actor's first rank; the others gather with it, and send nothing."""
        if self._waits:
            for _ in weights:
                pass
            return
        stream = self._require_stream()
        try:
            with torch.no_grad():
                await stream.send(weights, self._dtype)
        except BaseException:
            self._leave()
            raise

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The pairs as they arrive; see Stream.receive()."""
        stream = self._require_stream()
        whole = False
        try:
            async for name, tensor in stream.receive():
                yield name, tensor if self._device is None else tensor.to(self._device)
            whole = True
        finally:
            if not whole:  # the next update makes a new stream
                self._leave()

    def _require_stream(self) -> Stream:
        if self._stream is None:
            raise InvalidArgumentError("there is no stream: call init_process_group() first")
        return self._stream

    def _leave(self) -> None:
        stream, self._stream, self._place = self._stream, None, None
        if stream is not None:
            stream.close()
