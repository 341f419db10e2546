"""A stream of named tensors from one process to several of the same host."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch

from ..._bus.bus import connect
from ..._closing import Closing
from ..._errors import InvalidArgumentError, MismatchError
from ..._tensors.memory import zeros

SENDER, RECEIVER = "sender", "receiver"
_TABLE_BYTES = 1 << 18
_MOST_BYTES = 64 << 20  # of a bucket: within a host larger ones gain nothing
_ALIGNMENT = 64
_BUCKETS = 2  # one is filled, or used, while the other one travels


class Stream(Closing):
    """One end of a stream: tensors travel in buckets, of which one is filled, or used, while the other one travels. So
    each end needs two buckets of memory, whatever the model. Tensors are those of the host: others are copied there."""

    def __init__(
        self,
        name: str,
        role: str,
        *,
        rank: int = 0,
        world: int = 1,
        bucket_bytes: int = _MOST_BYTES,
        store: str | None = None,
        timeout: float = 300,
    ) -> None:
        """Blocks until both ends are there.

        Args:
            name: Of the stream, the same on both ends; unique on this host.
            role: "sender", which is one process, or "receiver", one of `world`.
            bucket_bytes: The same on both ends; at most 64 MiB are used.
            store: URL of the store. None: as everywhere.
            timeout: Seconds to wait for the other end, here and for each bucket.
        """
        if role not in (SENDER, RECEIVER):
            raise InvalidArgumentError(f"role={role!r}: a stream has a {SENDER} and {RECEIVER}s")
        if bucket_bytes < _ALIGNMENT:
            raise InvalidArgumentError(f"bucket_bytes={bucket_bytes}: give at least {_ALIGNMENT}")
        sends = role == SENDER
        self._role = role
        self._timeout = timeout
        self._room = min(bucket_bytes, _MOST_BYTES) // _ALIGNMENT * _ALIGNMENT
        self._turn = 0  # buckets so far
        own, other = (f"{name}.{SENDER}", f"{name}.{RECEIVER}") if sends else (f"{name}.{RECEIVER}", f"{name}.{SENDER}")
        self._bus = connect(name, role=own, peer=other, store=store, rank=rank, world=world, timeout=timeout)
        try:
            self._buckets = [
                {"table": zeros(_TABLE_BYTES, torch.uint8), "bytes": zeros(self._room, torch.uint8)}
                for _ in range(_BUCKETS)
            ]
            self._batches = [
                self._bus.register(bucket, f"bucket{i}", direction="send" if sends else "recv", timeout=timeout)
                for i, bucket in enumerate(self._buckets)
            ]
        except BaseException:
            self._bus.close()
            raise

    async def send(self, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> None:
        """Sends all pairs; tensors of floats as `dtype`, if it is given. Returns once every receiver has them."""
        filling = _Filling(self._room)
        under_way: list[Any] = [None] * _BUCKETS
        for name, tensor in weights:
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            begin = 0
            while True:
                taken = filling.take(name, tensor, begin, raw.numel())
                if taken is None:
                    await self._flush(filling, under_way, last=False)
                    continue
                at, size = taken
                await self._free(under_way)
                self._buckets[self._turn % _BUCKETS]["bytes"][at : at + size].copy_(raw[begin : begin + size])
                begin += size
                if begin == raw.numel():
                    break
        await self._flush(filling, under_way, last=True)
        for handle in under_way:
            if handle is not None:
                await handle

    async def _free(self, under_way: list[Any]) -> None:
        """Waits until the bucket that is to be filled has been taken."""
        handle, under_way[self._turn % _BUCKETS] = under_way[self._turn % _BUCKETS], None
        if handle is not None:
            await handle

    async def _flush(self, filling: _Filling, under_way: list[Any], last: bool) -> None:
        await self._free(under_way)
        which = self._turn % _BUCKETS
        table = json.dumps({"last": last, "tensors": filling.entries}).encode()
        self._buckets[which]["table"].zero_()
        self._buckets[which]["table"][: len(table)] = torch.frombuffer(bytearray(table), dtype=torch.uint8)
        self._turn += 1
        under_way[which] = self._batches[which].send(_version(self._turn), blocking=False, timeout=self._timeout)
        filling.clear()

    async def receive(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The pairs, in order. A tensor is good until the next one is asked for: clone() what is kept."""
        whole: torch.Tensor | None = None
        which, handle = self._ask()
        last = False
        while not last:
            await handle
            last, entries = self._table(which)
            used, (which, handle) = which, (which, handle) if last else self._ask()
            for name, dtype, shape, begin, size, at in entries:
                raw = self._buckets[used]["bytes"][at : at + size]
                total = _bytes_of(dtype, shape)
                if size < total:  # it came in parts
                    if begin == 0:
                        whole = torch.empty(total, dtype=torch.uint8)
                    if whole is None or whole.numel() != total or begin + size > total:
                        raise MismatchError(f"{name}: bytes from {begin} on came without those before")
                    whole[begin : begin + size].copy_(raw)
                    if begin + size < total:
                        continue
                    raw, whole = whole, None
                yield name, raw.view(dtype).view(shape)

    def _ask(self) -> tuple[int, Any]:
        """For the next bucket, which arrives while the one before is used."""
        which = self._turn % _BUCKETS
        self._turn += 1
        return which, self._batches[which].recv(_version(self._turn), blocking=False, timeout=self._timeout)

    def _table(self, which: int) -> tuple[bool, list[tuple[str, torch.dtype, tuple[int, ...], int, int, int]]]:
        text = self._buckets[which]["table"].numpy().tobytes().rstrip(b"\0")
        try:
            table = json.loads(text)
            entries = [
                (str(name), _dtype(dtype), tuple(map(int, shape)), int(begin), int(size), int(at))
                for name, dtype, shape, begin, size, at in table["tensors"]
            ]
            last = bool(table["last"])
        except (ValueError, TypeError, KeyError) as error:
            raise MismatchError(f"the sender's table cannot be read ({error}): run one release on both ends") from None
        for name, dtype, shape, begin, size, at in entries:
            if min(begin, size, at, *shape, 0) < 0 or at + size > self._room or begin + size > _bytes_of(dtype, shape):
                raise MismatchError(f"{name}: {size} bytes at {at} of a bucket of {self._room} cannot be")
        return last, entries

    def close(self) -> None:
        """Leaves the bus. A bucket that nobody has taken is dropped: send() returns once they have. Idempotent."""
        self._bus.close(linger=0)


class _Filling:
    """What lies in the bucket that is filled."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.clear()

    def clear(self) -> None:
        self.entries: list[tuple[str, str, tuple[int, ...], int, int, int]] = []
        self._at = 0
        self._table = 64

    def take(self, name: str, tensor: torch.Tensor, begin: int, total: int) -> tuple[int, int] | None:
        """Where the next bytes of a tensor go, and how many; None: the bucket is full."""
        size = min(total - begin, self._room - self._at)
        entry = name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), begin, size, self._at
        text = len(json.dumps(entry)) + 2
        if text > _TABLE_BYTES // 2:
            raise InvalidArgumentError(f"a tensor's name has {len(name)} characters")
        if (size == 0 and total > 0) or self._table + text > _TABLE_BYTES:
            return None
        self.entries.append(entry)
        at, self._at = self._at, -(-(self._at + size) // _ALIGNMENT) * _ALIGNMENT
        self._table += text
        return at, size


def _version(turn: int) -> int:
    """Of a bucket's batch, whose versions grow by one."""
    return (turn + 1) // _BUCKETS


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r}")
    return found


def _bytes_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
