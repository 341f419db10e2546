"""The ranks that share weights, and how they find each other."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed

# Its functions have the default process group as default arguments: imported later (torch.compile does so), it would
# keep that group, and the threads of Gloo, beyond destroy_process_group().
import torch.distributed.nn.functional

from .. import _core
from .._arguments import optional_text, seconds, text, whole
from .._closing import Closing, close_at_exit
from .._errors import Error, InvalidArgumentError, MismatchError
from .telling import Family, Member, numbers_of

_MAX_RANKS = 1 << 16
_MOST_BYTES = 1 << 20  # of a rank's part of a bootstrap
_WAIT = 60.0  # seconds that a rank waits for the others, by default
_READERS = 1800.0  # likewise, that a write waits for ranks that read: one may be writing all to a disk
_REFUSED = b"\1"  # in front of what a rank tells in place of its part of a bootstrap


class Group(Closing):
    """The ranks of one host that share weights; made by init_group(). As a context manager it closes itself,
    after an error without waiting for the other ranks.

    Attributes:
        name: In messages.
        rank: This process, from 0.
        size: How many share each weight.
        timeout: Seconds that a rank waits for the others.
        timeout_of_readers: Seconds that a write waits for ranks that read the weights.
        job_rank: This process in its job, as torch or the launcher numbers it; None: nobody does.
    """

    def __init__(self, core: _core.ShardGroup, name: str, timeout: float, job_rank: int | None = None) -> None:
        self.name = name
        self.timeout = timeout
        self.timeout_of_readers = max(timeout, _READERS) if timeout == _WAIT else timeout
        self.job_rank = job_rank
        self._core = core
        self.member = Member(core, Family())
        self.rank = core.rank
        self.size = core.size
        self.layers: dict[Any, Any] = {}  # runtimes that take further constructed layers
        self.layers_made = 0
        self._models = 0
        # Groups of models that are being made, or were not finished, and what their family had counted at first.
        self._making: dict[Member, int] = {}
        self._closed = False
        # A model's that has been made last: kept until all ranks have made it, which the next call of all ranks tells,
        # as a rank may let its model go at once.
        self._last: _core.ShardGroup | None = None
        close_at_exit(self)

    @property
    def core(self) -> _core.ShardGroup:
        """The ranks, for a call of all of them."""
        self.member.family.settle()
        return self._core

    def of_model(self) -> Member:
        """A group for one model, with the same ranks, to be given to finish(). Collective."""
        name = self._next_name()
        self._end_unfinished()
        return self._begin(self.core.derive(name))

    def _begin(self, core: _core.ShardGroup) -> Member:
        self._last = core
        made = Member(core, self.member.family)
        self._making[made] = self.member.family.count()
        return made

    def finish(self, made: Member) -> None:
        """The model of a group has been made. Until then its group ends with the next one of this group, or with this
        one: other ranks may still look at what this rank has refused. Idempotent."""
        self._making.pop(made, None)

    def _end_unfinished(self, all_of_them: bool = False) -> None:
        """End groups of models whose making has been refused. Others are being made around the next one: layers of a
        model may be constructed while it is sharded."""
        count = self.member.family.count()
        for member in [each for each, before in self._making.items() if all_of_them or before != count]:
            del self._making[member]
            with contextlib.suppress(Error):
                member.core.leave()

    def with_replicas(self, dp: Group) -> Member:
        """A group for one model: the ranks of all replicas, one replica after the other. Collective over both."""
        name = self._next_name()
        self._end_unfinished()
        what = f"the replicas of {name}"

        def exchange(blob: bytes) -> list[bytes]:
            replicas = dp.core.exchange(what, _packed(self.core.exchange(what, blob)))
            return [each for replica in replicas for each in _unpacked(replica)]

        _require_orthogonal(self, dp, exchange)
        rank, size = dp.rank * self.size + self.rank, dp.size * self.size
        return self._begin(_core.ShardGroup.over(exchange, rank, size, name, min(self.timeout, dp.timeout)))

    def require_open(self) -> None:
        """Throw if this rank has closed it."""
        if self._closed:
            raise InvalidArgumentError(f"ETP group {self.name} is closed: init_group() again")

    def _next_name(self) -> str:
        self.require_open()
        # Ranks that were refused while they made one have come to different counts.
        told = self.core.exchange("the number of a model", struct.pack("<Q", self._models))
        self._models = max(int(number) for (number,) in numbers_of(told, "<Q", "the number of a model")) + 1
        return f"{self.name}/{self._models - 1}"

    def close(self) -> None:
        """Leaves it: call it on every rank. Waits until all have, at most for the timeout. Models that are sharded over
        it keep groups of their own. Idempotent."""
        self._end(self._core.close)

    def abandon(self) -> None:
        """Leaves it without waiting for the other ranks, because of an error. Idempotent."""
        self._end(self._core.leave)

    def _end(self, leave: Callable[[], None]) -> None:
        if not self._closed:
            self._closed = True
            self.layers.clear()
            self._end_unfinished(all_of_them=True)
            leave()
            self._last = None

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"ETP group {self.name} cannot be pickled, nor can layers that were constructed with it: save their "
            "state_dict()"
        )

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank={self.rank}, size={self.size})"


def _packed(blobs: list[bytes]) -> bytes:
    return struct.pack(f"<{len(blobs) + 1}Q", len(blobs), *map(len, blobs)) + b"".join(blobs)


def _unpacked(packed: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<Q", packed)
    blobs, at = [], 8 * (count + 1)
    for size in struct.unpack_from(f"<{count}Q", packed, 8):
        blobs.append(packed[at : at + size])
        at += size
    return blobs


def _require_orthogonal(group: Group, dp: Group, exchange: Callable[[bytes], list[bytes]]) -> None:
    """Throws, on all ranks, unless each rank is where its ranks in both groups say, and each is there once."""
    own = secrets.token_bytes(16)
    grid = exchange(own)
    at = dp.rank * group.size + group.rank
    fits = len(grid) == dp.size * group.size == len(set(grid)) and grid[at] == own
    seen = hashlib.blake2b(b"".join(grid), digest_size=16).digest() if fits else b"none"
    if set(exchange(seen)) != {seen} or not fits:
        raise MismatchError(
            f"dp={dp!r} is not orthogonal to {group!r}: rank r of every ETP group must be in one dp group, as the axes "
            "of a DeviceMesh are"
        )


def init_group(
    process_group: Any = None,
    mesh: Any = None,
    store: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    name: str = "etp",
    timeout: float | None = None,
) -> Group:
    """Makes a group of ranks that share weights. Collective over them; they are processes of one host.

    The process group carries one exchange of bytes here, and is not used afterwards. Without any of the first three
    arguments it is torch's default group, if that is initialised; else the group has one rank.

    Args:
        process_group: A torch.distributed ProcessGroup. A DeviceMesh is taken as `mesh`.
        mesh: A DeviceMesh of one dim: an axis of a larger one is mesh["etp"].
        store: URL of a Tessera store, such as "auto"; no torch.distributed is needed then.
        rank, size: With a store. None: RANK and WORLD_SIZE.
        name: The group's, in messages; with a store the ranks find each other by it.
        timeout: Seconds that a rank waits for the others, here and later. None: 60, and 1800 where a write waits for
            ranks that read the weights. A death is told within a second.
    """
    if mesh is None and type(process_group).__name__ == "DeviceMesh":
        process_group, mesh = None, process_group
    try:
        name, timeout = text("name", name), _WAIT if timeout is None else seconds("timeout", timeout)
        if sum(each is not None for each in (process_group, mesh, store)) > 1:
            raise InvalidArgumentError("init_group: give a process_group, a mesh or a store, not several of them")
        if store is None:
            process_group = _process_group_of(process_group, mesh, rank, size)
    except Exception as error:
        if store is None:
            _refuse_bootstrap(process_group, mesh, error)
        raise
    if store is not None:
        return _over_store(optional_text("store", store), rank, size, name, timeout)
    if process_group is None:
        return Group(_core.ShardGroup.single(name), name, timeout)
    return _over_process_group(process_group, name, timeout)


def _process_group_of(process_group: Any, mesh: Any, rank: Any, size: Any) -> Any:
    """Return the process group that init_group() is over; None: there is one rank."""
    if rank is not None or size is not None:
        raise InvalidArgumentError("init_group: rank and size go with a store; a process group has its own")
    if mesh is not None:
        if not hasattr(mesh, "get_group"):
            raise InvalidArgumentError(f"init_group: mesh {mesh!r}: give a DeviceMesh")
        if mesh.ndim != 1:
            raise InvalidArgumentError(
                f"mesh {mesh}: ETP shards over one dim, and it has {mesh.ndim}: give one axis, such as mesh['etp']"
            )
        return mesh.get_group()
    if process_group is not None and not isinstance(process_group, torch.distributed.ProcessGroup):
        raise InvalidArgumentError(
            f"init_group: process_group {process_group!r}: give what torch.distributed.new_group() returns on "
            "ranks that are in it"
        )
    if process_group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.group.WORLD
    return process_group


def _refuse_bootstrap(process_group: Any, mesh: Any, error: Exception) -> None:
    """Take part in the bootstrap of the other ranks with an error, where it is known who they are."""
    with contextlib.suppress(Exception):
        if mesh is not None:
            process_group = mesh.get_group() if mesh.ndim == 1 else None
        if process_group is None and torch.distributed.is_initialized():
            process_group = torch.distributed.group.WORLD
        if process_group is not None and torch.distributed.get_rank(process_group) >= 0:
            exchange_over(process_group, _MOST_BYTES)(_REFUSED + str(error).encode(errors="replace")[:2048])


def _over_store(url: str, rank: int | None, size: int | None, name: str, timeout: float) -> Group:
    rank = _placed("rank", rank, "RANK", 0)
    size = _placed("size", size, "WORLD_SIZE", 1)
    if rank >= size:
        raise InvalidArgumentError(f"rank {rank} of {size}: ranks go from 0 to size - 1")
    # A launcher that restarts ranks gives them another life, which must not meet the keys of the last one.
    life = "-".join(os.environ.get(each, "") for each in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    namespace = os.environ.get("TESSERA_NAMESPACE") or "default"
    _core.check_name("TESSERA_NAMESPACE", namespace)
    key = f"{namespace}/etp/{name}/{life}"
    return Group(_core.ShardGroup.over_store(url, key, rank, size, name, timeout), name, timeout, rank)


def _placed(what: str, value: int | None, variable: str, lowest: int) -> int:
    if value is None:
        given = os.environ.get(variable, "")
        if not (given.isascii() and given.isdigit() and len(given) < 20):
            raise InvalidArgumentError(f"{what} is not given, and {variable} is {given!r}: give {what}=")
        return whole(f"{what}, from {variable},", int(given), lowest, _MAX_RANKS)
    return whole(what, value, lowest, _MAX_RANKS)


def _over_process_group(process_group: Any, name: str, timeout: float) -> Group:
    rank = torch.distributed.get_rank(process_group)
    size = torch.distributed.get_world_size(process_group)
    if rank < 0:
        raise InvalidArgumentError("process_group: this process is none of its ranks")
    whole_exchange = exchange_over(process_group, _MOST_BYTES)

    def exchange(blob: bytes) -> list[bytes]:
        answers = whole_exchange(b"\0" + blob)
        for other, answer in enumerate(answers):
            if answer[:1] == _REFUSED:
                raise InvalidArgumentError(f"rank {other}: {answer[1:].decode(errors='replace')}")
        return [answer[1:] for answer in answers]

    job_rank = torch.distributed.get_rank()
    return Group(_core.ShardGroup.over(exchange, rank, size, name, timeout), name, timeout, job_rank)


def exchange_over(process_group: Any, most_bytes: int) -> Callable[[bytes], list[bytes]]:
    """A collective that gives every rank's bytes, in rank order, as all_gather_object does of objects: nothing is
    unpickled. Each rank gives from 1 to most_bytes."""
    size = torch.distributed.get_world_size(process_group)
    nccl = torch.distributed.get_backend(process_group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def exchange(blob: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
        own = torch.tensor([len(blob)], dtype=torch.int64, device=device)
        torch.distributed.all_gather(lengths, own, group=process_group)
        sizes = [int(length) for length in lengths]
        if min(sizes) < 1 or max(sizes) > most_bytes:
            raise MismatchError(f"exchange: ranks sent {sizes} bytes: run the same release on all ranks")
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        found = [torch.zeros(max(sizes), dtype=torch.uint8, device=device) for _ in range(size)]
        torch.distributed.all_gather(found, padded.to(device), group=process_group)
        return [each[:length].cpu().numpy().tobytes() for each, length in zip(found, sizes, strict=True)]

    return exchange
