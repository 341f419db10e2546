"""Streams of tensors, and verl's checkpoint engine over them: with verl where it is installed, and with its registry
and base class as they were recorded of 0.9.1."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import inspect
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tessera
import torch
from tessera.engines.verl import Stream, _stream

SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3, 5), torch.float32),
    ((), torch.bfloat16),
    ((0, 4), torch.float32),
    ((7,), torch.int64),
    ((40, 50), torch.float16),  # more than a small bucket
    ((2, 2), torch.bool),
    ((900,), torch.float32),
]


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for i, (shape, dtype) in enumerate(SHAPES):
        random = torch.Generator().manual_seed(100 * version + i)
        tensor = torch.randint(0, 2, shape, generator=random).to(dtype)
        yield f"w{i}", tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def are(found: list[tuple[str, torch.Tensor]], version: int) -> bool:
    return all(
        name == other and torch.equal(tensor, expected) and tensor.dtype == expected.dtype
        for (name, tensor), (other, expected) in zip(found, weights(version), strict=True)
    )


async def all_of(pairs: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) async for name, tensor in pairs]


def side_by_side(*work: Callable[[], Any]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
        return [each.result(120) for each in [pool.submit(each) for each in work]]


@pytest.mark.parametrize("bucket", [64, 1000, 1 << 16])
def test_tensors_of_any_size_arrive_at_every_receiver(bucket: int) -> None:
    name = f"stream{bucket}"
    ends = side_by_side(
        lambda: Stream(name, "sender", bucket_bytes=bucket, timeout=60),
        lambda: Stream(name, "receiver", rank=0, world=2, bucket_bytes=bucket, timeout=60),
        lambda: Stream(name, "receiver", rank=1, world=2, bucket_bytes=bucket, timeout=60),
    )
    for version in (1, 2, 3) if bucket > 64 else (1,):
        sent, *received = side_by_side(
            lambda version=version: asyncio.run(ends[0].send(weights(version))),
            lambda: asyncio.run(all_of(ends[1].receive())),
            lambda: asyncio.run(all_of(ends[2].receive())),
        )
        assert sent is None and all(are(found, version) for found in received)
    side_by_side(*(end.close for end in ends))


def test_floats_are_cast_if_asked_and_nothing_is_a_stream_too() -> None:
    sender, receiver = side_by_side(
        lambda: Stream("cast", "sender", timeout=60), lambda: Stream("cast", "receiver", timeout=60)
    )
    for pairs in ([("a", torch.ones(3)), ("b", torch.ones(2, dtype=torch.int32))], []):
        _, found = side_by_side(
            lambda pairs=pairs: asyncio.run(sender.send(pairs, torch.bfloat16)),
            lambda: asyncio.run(all_of(receiver.receive())),
        )
        assert [(name, tensor.dtype) for name, tensor in found] == (
            [("a", torch.bfloat16), ("b", torch.int32)] if pairs else []
        )
    side_by_side(sender.close, receiver.close)


def test_a_table_that_cannot_be_is_refused() -> None:
    stream = Stream.__new__(Stream)
    stream._room = 128
    for table, said in [
        (b"", "cannot be read"),
        (b'{"last": true}', "cannot be read"),
        (b'{"last": true, "tensors": [["a", "no", [1], 0, 4, 0]]}', "cannot be read"),
        (b'{"last": true, "tensors": [["a", "float32", [40], 0, 160, 0]]}', "a: 160 bytes at 0 of a bucket of 128"),
        (b'{"last": true, "tensors": [["a", "float32", [1], 0, 4, -4]]}', "a: 4 bytes at -4"),
        (b'{"last": true, "tensors": [["a", "float32", [1], 2, 4, 0]]}', "a: 4 bytes at 0"),
    ]:
        memory = torch.zeros(_stream._TABLE_BYTES, dtype=torch.uint8)
        if table:
            memory[: len(table)] = torch.frombuffer(bytearray(table), dtype=torch.uint8)
        stream._buckets = [{"table": memory, "bytes": torch.zeros(128, dtype=torch.uint8)}]
        with pytest.raises(tessera.MismatchError, match=said):
            stream._table(0)
    with pytest.raises(tessera.InvalidArgumentError, match="role='x'"):
        Stream("a", "x")
    with pytest.raises(tessera.InvalidArgumentError, match="give at least 64"):
        Stream("a", "sender", bucket_bytes=1)


class Recorded(ABC):
    """CheckpointEngine of verl 0.9.1."""

    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> Any: ...

    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Any) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> Any: ...

    @abstractmethod
    def finalize(self) -> Any: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class Registry:
    """CheckpointEngineRegistry of verl 0.9.1."""

    _registry: dict[str, Any] = {}  # noqa: RUF012

    def register(backend: str) -> Any:  # type: ignore[misc]
        def wrapper(cls: Any) -> Any:
            Registry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls._registry[backend](*args, **kwargs)


@pytest.fixture(params=["recorded", "installed"])
def registry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "recorded":
        package = types.ModuleType("verl.checkpoint_engine")
        package.CheckpointEngine, package.CheckpointEngineRegistry = Recorded, Registry  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
        monkeypatch.setitem(sys.modules, "verl.checkpoint_engine", package)
    else:
        package = pytest.importorskip("verl.checkpoint_engine", reason="verl is not installed")
    monkeypatch.delitem(sys.modules, "tessera.engines.verl.engine", raising=False)
    importlib.import_module("tessera.engines.verl.engine")
    monkeypatch.delitem(sys.modules, "tessera.engines.verl.engine")
    return package.CheckpointEngineRegistry


ACTORS = 2


class Manager:
    """What verl's CheckpointEngineManager does in an update, with engines in threads instead of Ray's actors."""

    def __init__(self, registry: Any, rollouts: int) -> None:
        self.registry = registry
        self.cls = registry._registry["tessera"]
        self.actors = [
            registry.new("tessera", is_master=rank == 0, bucket_size=1 << 12, timeout=60) for rank in range(ACTORS)
        ]
        self.rollouts: list[Any] = []
        self.grow(rollouts)

    def grow(self, rollouts: int) -> None:
        self.rollouts += [
            self.registry.new("tessera", bucket_size=1 << 12, timeout=60) for _ in range(rollouts - len(self.rollouts))
        ]

    def update(self, version: int, pairs: Any = weights) -> list[Any]:
        everyone = self.actors + self.rollouts
        metadata = side_by_side(*(each.prepare for each in everyone))
        both = self.cls.build_topology(ACTORS, len(self.rollouts), metadata)
        calls = []
        for engines, arguments in zip((self.actors, self.rollouts), both, strict=True):
            for rank, engine in enumerate(engines):
                own = {name: values[rank] for name, values in arguments.items()}
                calls.append(lambda engine=engine, own=own: engine.init_process_group(**own))
        side_by_side(*calls)
        found = side_by_side(
            *(
                lambda e=e: caught(lambda: asyncio.run(e.send_weights(pairs(version), global_steps=1)))
                for e in self.actors
            ),
            *(
                lambda e=e: caught(lambda: asyncio.run(all_of(e.receive_weights(global_steps=1))))
                for e in self.rollouts
            ),
        )
        side_by_side(*(each.finalize for each in everyone))
        return found

    def places(self) -> set[Any]:
        return {each.prepare()["place"] for each in self.rollouts}

    def close(self) -> None:
        side_by_side(*(each._leave for each in self.actors + self.rollouts))


def caught(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return error


def test_updates_a_rollout_that_grows_and_an_actor_that_fails(registry: Any) -> None:
    manager = Manager(registry, rollouts=2)
    for version in (1, 2):
        sent, other, *received = manager.update(version)
        assert sent is None and other is None and all(are(found, version) for found in received)
        if version == 1:
            first = manager.places()
    assert manager.places() == first and len(first) == 2  # the connection is kept
    manager.grow(3)
    _, _, *received = manager.update(3)
    assert len(received) == 3 and all(are(found, 3) for found in received)
    assert not manager.places() & first

    def breaks(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(version))[:5]
        raise MemoryError("no room")

    sent, other, *received = manager.update(4, breaks)
    assert isinstance(sent, MemoryError) and isinstance(other, MemoryError)
    assert all(isinstance(found, tessera.Error) for found in received)
    _, _, *received = manager.update(5)
    assert all(are(found, 5) for found in received)
    manager.close()


def test_the_first_actor_is_the_master(registry: Any) -> None:
    engine = registry.new("tessera", bucket_size=1)
    with pytest.raises(tessera.InvalidArgumentError, match="must be the checkpoint engine's master"):
        type(engine).build_topology(1, 1, [engine.prepare(), engine.prepare()])
    with pytest.raises(tessera.InvalidArgumentError, match="call init_process_group"):
        asyncio.run(engine.send_weights(iter([])))


def test_the_base_class_is_as_it_was_recorded() -> None:
    base = pytest.importorskip("verl.checkpoint_engine", reason="verl is not installed").CheckpointEngine
    assert base.__abstractmethods__ == Recorded.__abstractmethods__ and base.wire_format == Recorded.wire_format
    for name in base.__abstractmethods__:
        parameters = [list(inspect.signature(getattr(each, name)).parameters) for each in (base, Recorded)]
        assert parameters[0] == parameters[1], name
