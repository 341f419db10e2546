"""The ranks that save and load together: what they tell each other, and that they fail together."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._errors import (
    Error,
    InvalidArgumentError,
    MismatchError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
    ResourceExhaustedError,
)
from ..etp.group import Group, exchange_over
from ..etp.views import models_of

_MOST_BYTES = 1 << 30  # that a rank tells the others at once
_KINDS = {kind.code: kind for kind in Error.__subclasses__()}

Exchange = Callable[[str, bytes], list[bytes]]


class Ranks:
    """All calls are collective."""

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        """exchange(what, bytes) gives all ranks' bytes, in rank order."""
        self.rank = rank
        self.size = size
        self._exchange = exchange

    def share(self, what: str, function: Callable[[], Any]) -> list[Any]:
        """What function() gives on each rank, as JSON. If it fails on one, it fails on all: with its own error there,
        and with one of the same kind that names the rank elsewhere."""
        own: BaseException | None = None
        try:
            told: dict[str, Any] = {"value": function(), "at": what}
        except BaseException as error:  # an interrupt, too: the others would wait
            own = _as_ours(error) if isinstance(error, OSError) else error
            code = "internal" if isinstance(own, Exception) else "cancelled"
            told = {"error": [getattr(own, "code", code), str(own) or type(own).__name__], "at": what}
        blobs = self._told(what, json.dumps(told).encode())
        if own is not None:
            raise own
        answers = [_answer(what, rank, blob) for rank, blob in enumerate(blobs)]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                code, message = answer["error"]
                raise _KINDS.get(code, Error)(f"rank {rank}: {message}")
        return [answer["value"] for answer in answers]

    def _told(self, what: str, blob: bytes) -> list[bytes]:
        try:
            return self._exchange(what, blob)
        except RuntimeError as error:
            raise PeerLostError(f"{what}: a rank does not answer any more: {error}") from error


def _as_ours(error: OSError) -> Error:
    if isinstance(error, Error):
        return error
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceExhaustedError(str(error))
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return PermissionDeniedError(str(error))
    return NotFoundError(str(error)) if isinstance(error, FileNotFoundError) else InvalidArgumentError(str(error))


def _answer(what: str, rank: int, blob: bytes) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(blob)
        at, error = answer.get("at"), answer.get("error", ["", ""])
        sound = (
            isinstance(at, str) and [type(each) for each in error] == [str, str] and ("value" in answer or any(error))
        )
    except (ValueError, RecursionError, AttributeError, TypeError):
        sound = False
    if not sound:
        raise _strange(what, rank)
    if at != what:
        raise MismatchError(f"{what}: rank {rank} is at {at!r}: all ranks make the same calls in one order")
    return answer


def _strange(what: str, rank: int | str) -> MismatchError:
    return MismatchError(f"{what}: rank {rank} sent what no rank sends here: run the same release on all ranks")


@contextlib.contextmanager
def as_told(what: str) -> Iterator[None]:
    """Around the use of what ranks have told, which may be anything."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, Error):
            raise
        raise _strange(what, "?") from error


def ranks_of(model: torch.nn.Module, group: Any) -> Ranks:
    """Those of `group`; by default torch's default group, else those of an ETP model, else only this process."""
    if isinstance(group, Group):
        return Ranks(group.rank, group.size, group.core.exchange)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if group is None and not distributed:
        models = models_of(model)
        if not models:
            return Ranks(0, 1, lambda what, blob: [blob])
        core = models[0].core
        return Ranks(core.rank, core.size, core.exchange)
    if not distributed or not (group is None or isinstance(group, torch.distributed.ProcessGroup)):
        raise InvalidArgumentError(
            f"group={group!r}: give a torch ProcessGroup, what etp.init_group() returns, or None"
        )
    process_group = torch.distributed.group.WORLD if group is None else group
    rank = torch.distributed.get_rank(process_group)
    if rank < 0:
        raise InvalidArgumentError("group: this process is none of its ranks")
    exchange = exchange_over(process_group, _MOST_BYTES)
    return Ranks(rank, torch.distributed.get_world_size(process_group), lambda what, blob: exchange(blob))
