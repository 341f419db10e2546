"""Copies between tensors of a process group's ranks."""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ... import _core
from ..._arguments import whole
from ..._closing import Closing, close_at_exit
from ..._errors import Error, InvalidArgumentError, MismatchError, UnavailableError
from ..._tensors.blocks import Block
from ...etp.group import init_group

_DIGEST_BYTES = 16
_ALIGNMENT = 64
_MOST_NAMED = 5
_READY, _FAILED = b"+", b"-"


class _Entry(NamedTuple):
    """One submitted copy, as the other ranks must know it."""

    peer: int
    task: int | None
    shape: tuple[int, ...]
    dtype: str


class _Key(NamedTuple):
    """What a send and its receive have in common."""

    sender: int
    receiver: int
    task: int | None
    turn: int  # among those of that task

    def __str__(self) -> str:
        which = f"number {self.turn}" if self.task is None else f"task {self.task}"
        return f"{which} from rank {self.sender} to rank {self.receiver}"


class _Read(NamedTuple):
    """Which send of which rank a receive takes."""

    receive: int
    rank: int
    send: int


@dataclass
class _Submitted:
    entries: list[_Entry]
    tensors: list[torch.Tensor]

    def add(self, tensor: torch.Tensor, peer: int, task: int | None) -> None:
        self.entries.append(_Entry(peer, task, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        self.tensors.append(tensor.detach())


class Copies(Closing):
    """Copies between tensors of a process group's ranks, which are processes of one host: each rank says what it sends
    and receives, and run() moves all of it. Not thread-safe.

    A receiver reads each piece out of the sender's memory, private or shared, into its own, once; nothing goes through
    the process group after the first exchange. Where the system forbids that (tessera doctor tells), senders first copy
    what they send into shared memory.

    The group fails as a whole: a rank that dies ends the run() of all others within about a second, with an error that
    names it, and this object is of no more use.
    """

    def __init__(self, process_group: Any = None, *, timeout: float = 300.0) -> None:
        """Collective over the ranks.

        Args:
            process_group: Of torch.distributed; None: the default one. Ranks are counted in it.
            timeout: Seconds that a rank waits for the others, in each run().

        Raises:
            UnimplementedError: The ranks are on several hosts.
        """
        self._closed = False
        self._group = init_group(process_group, name="copies", timeout=timeout)
        try:
            self._reader = _core.MemoryReader(self._group.core)
        except BaseException:
            self._group.close()
            raise
        self.rank = self._group.rank
        self.size = self._group.size
        self._sends, self._receives = _Submitted([], []), _Submitted([], [])
        self._last: tuple[list[_Entry], list[_Entry]] | None = None
        self._last_digest = b""
        self._digests: tuple[bytes, ...] = ()  # of all ranks, for which the reads are known
        self._reads: Sequence[_Read] = ()
        self._block: Block | None = None
        self._room = 0
        close_at_exit(self)

    def send(self, tensor: torch.Tensor, to: int, task: int | None = None) -> None:
        """Takes part in the next run(). Rank `to` receives a tensor of the same shape and dtype from this rank, with
        the same `task`; those with equal ones are matched in order. The tensor must not change until run() returns."""
        self._sends.add(tensor, self._other("to", to), task)

    def receive(self, tensor: torch.Tensor, source: int, task: int | None = None) -> None:
        """Takes part in the next run(), which writes `tensor`."""
        self._receives.add(tensor, self._other("source", source), task)

    def _other(self, what: str, rank: int) -> int:
        self._require_open()
        return whole(what, rank, 0, self.size - 1)

    def run(self) -> None:
        """Makes all copies that were submitted since the last run(). Collective, also for ranks without any. Returns
        once every rank has what it receives, or raises on every rank; what is received may be written in part then.

        Raises:
            MismatchError: Sends and receives do not fit each other; nothing was written, and all are forgotten.
            PeerLostError: A rank has died.
            DeadlineExceededError: A rank did not come.
        """
        self._require_open()
        sends, receives = self._sends, self._receives
        self._sends, self._receives = _Submitted([], []), _Submitted([], [])
        try:
            kept, places = self._placed(sends)
            told = _READY + self._digest(sends.entries, receives.entries) + places.tobytes()
        except Exception as error:
            kept, told = [], _failed(error)
            failure: Exception | None = error
        else:
            failure = None
        answers = self._all("copies", told, failure)
        digests = tuple(each[1 : 1 + _DIGEST_BYTES] for each in answers)
        if digests != self._digests:
            self._match(sends.entries, receives.entries)
            self._digests = digests
        try:
            self._copy(answers, sends, receives)
        except Exception as error:
            failure = error
        self._all("copied", _READY if failure is None else _failed(failure), failure)
        kept.clear()  # until here others have read it

    def _placed(self, sends: _Submitted) -> tuple[list[Any], array[int]]:
        """Where the sends lie, as (arena, offset), and what keeps them there."""
        places = array("Q")
        there = [
            tensor if peer == self.rank else _host(tensor)
            for tensor, (peer, *_) in zip(sends.tensors, sends.entries, strict=True)
        ]
        away = [i for i, (peer, *_) in enumerate(sends.entries) if peer != self.rank]
        if self._reader.refused:
            shared = self._shared([there[i] for i in away])
            for i, tensor in zip(away, shared, strict=True):
                there[i] = tensor
        for tensor, (peer, *_) in zip(there, sends.entries, strict=True):
            empty = tensor.numel() == 0 or peer == self.rank
            places.extend((0, 0) if empty else self._reader.refer(tensor.data_ptr(), tensor.nbytes))
        return there, places

    def _shared(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of them in shared memory, which is kept for the next run()."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if sum(sizes) > self._room:
            self._block = None
            self._block, self._room = Block(sum(sizes)), sum(sizes)
        copies = []
        for tensor, at in zip(tensors, itertools.accumulate(sizes, initial=0), strict=False):
            if self._block is None:  # all are empty
                copies.append(tensor)
                continue
            raw = self._block.array(at, (tensor.nbytes,), "u8")
            copies.append(raw.view(tensor.dtype).view(tensor.shape).copy_(tensor))
        return copies

    def _digest(self, sends: list[_Entry], receives: list[_Entry]) -> bytes:
        if self._last != (sends, receives):
            self._last = sends, receives
            self._last_digest = hashlib.blake2b(_table(sends, receives), digest_size=_DIGEST_BYTES).digest()
        return self._last_digest

    def _all(self, what: str, told: bytes, failure: Exception | None) -> list[bytes]:
        """What all ranks tell. Raises on all of them if one tells a failure: its own, if there is one."""
        try:
            answers = self._group.core.exchange(what, told)
        except Error as error:
            raise error from failure
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if not answer.startswith(_READY):
                said = answer.removeprefix(_FAILED).decode(errors="replace")
                raise UnavailableError(f"{what}: rank {rank} failed: {said}")
        return answers

    def _match(self, sends: list[_Entry], receives: list[_Entry]) -> None:
        """Learns which sends this rank's receives take. Raises on all ranks alike if some do not fit."""
        tables = [
            json.loads(each[1:]) for each in self._all("tables of copies", _READY + _table(sends, receives), None)
        ]
        offered: dict[_Key, tuple[int, Any]] = {}
        for rank, (sent, _) in enumerate(tables):
            offered |= {key: (i, form) for i, (key, form) in enumerate(_keyed(sent, rank, sends=True))}
        reads, wrong = [], []
        for rank, (_, received) in enumerate(tables):
            for i, (key, form) in enumerate(_keyed(received, rank, sends=False)):
                send, offer = offered.pop(key, (0, None))
                if offer is None:
                    wrong.append(f"{key} is not sent")
                elif offer != form:
                    wrong.append(f"{key} is sent as {_text(offer)} and received as {_text(form)}")
                elif rank == self.rank:
                    reads.append(_Read(i, key.sender, send))
        wrong += [f"{key} is not received" for key in offered]
        if wrong:
            more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
            raise MismatchError(f"copies between ranks do not fit: {'; '.join(wrong[:_MOST_NAMED])}{more}")
        self._reads = sorted(reads, key=lambda read: (read.rank, read.send))

    def _copy(self, answers: list[bytes], sends: _Submitted, receives: _Submitted) -> None:
        at = 1 + _DIGEST_BYTES
        places = [array("Q", answer[at:]) for answer in answers]
        reads: list[tuple[int, int, int, int, int]] = []
        aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        for receive, rank, send in self._reads:
            tensor = receives.tensors[receive]
            if rank == self.rank:
                tensor.copy_(sends.tensors[send])
                continue
            if tensor.numel() == 0:
                continue
            here = tensor
            if not (_in_host_memory(tensor) and tensor.is_contiguous()):
                here = torch.empty(tensor.shape, dtype=tensor.dtype)
                aside.append((tensor, here))
            arena, offset = places[rank][2 * send : 2 * send + 2]
            reads.append((rank, arena, offset, here.nbytes, here.data_ptr()))
            torch.autograd.graph.increment_version(tensor)
        self._reader.read(reads)
        for tensor, here in aside:
            tensor.copy_(here)

    @property
    def refused(self) -> str:
        """Why ranks cannot read each other's private memory, so that they copy into shared memory first; empty if they
        can."""
        return self._reader.refused

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("these copies between ranks are closed: make others, on every rank")

    def close(self) -> None:
        """Leaves the group: call it on every rank. Idempotent."""
        if not self._closed:
            self._closed = True
            self._block = None
            self._group.close()


def _in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous() if _in_host_memory(tensor) else tensor.to("cpu", copy=True).contiguous()


def _failed(error: Exception) -> bytes:
    return _FAILED + f"{type(error).__name__}: {error}".encode()


def _table(sends: list[_Entry], receives: list[_Entry]) -> bytes:
    return json.dumps([sends, receives]).encode()


def _keyed(table: Sequence[Any], rank: int, sends: bool) -> Iterator[tuple[_Key, Any]]:
    """With what identifies each entry of a table of `rank`: its shape and dtype."""
    turns: Counter[tuple[int, int | None]] = Counter()
    for peer, task, *form in table:
        turn, turns[peer, task] = turns[peer, task], turns[peer, task] + 1
        sender, receiver = (rank, peer) if sends else (peer, rank)
        yield _Key(sender, receiver, task, turn), form


def _text(form: Sequence[Any]) -> str:
    shape, dtype = form
    return f"{tuple(shape)} {dtype}"
