"""How the ranks of an engine decide together, within a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch

from .._errors import UnavailableError

_YES, _NO = "yes", "no"
_SLACK_SECONDS = 2.0  # for the store's answers, after the deadline of the votes
_MOST_SECONDS = 1e6


class StoreVote:
    """Votes of an engine's ranks over a store of torch.distributed that all of them reach. All ranks make the same
    sequence of calls; the n-th calls of all of them are one vote.

    A vote is decided once, by the first that writes its decision into the store; whoever comes later, however late,
    finds it there and obeys. A rank decides "yes" only if it has read the same proposal of every rank; it decides "no"
    if it proposes nothing itself, if proposals differ, or once the deadline has passed. So no two ranks ever learn
    different decisions. What remains is a rank that cannot reach the store: it does not know, is told so by
    UnavailableError, and must take neither for granted. A rank that proposed nothing waits for nobody.

    Not thread-safe.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: float = 60) -> None:
        """
        Args:
            store: A torch.distributed.Store for these votes only (PrefixStore), best with a connection of its own.
            rank: Of this process among the voters.
            world: Number of voters.
            timeout: Seconds that a vote waits for the other ranks.
        """
        self._store = store
        self._rank = rank
        self._world = world
        self._timeout = timeout
        self._number = 0
        self._cast: list[int] = []  # votes whose keys may still be in the store

    def __call__(self, proposal: str | None) -> bool:
        """Whether all ranks propose the same; None is a "no". Blocks until all have voted, at most until the deadline.

        Raises:
            UnavailableError: The store cannot be reached: the decision is not known.
        """
        number, self._number = self._number, self._number + 1
        vote = _Bounded(lambda given_up: self._decide(number, proposal, given_up))
        return bool(vote.result(self._timeout))

    def _decide(self, number: int, proposal: str | None, given_up: Callable[[], bool]) -> bool:
        self._cast.append(number)
        decision = _YES if proposal is not None and self._all_propose(number, proposal) else _NO
        if given_up():
            raise UnavailableError("nobody waits for this vote any more")
        decided = bool(self._store.compare_set(f"{number}/decision", "", decision).decode() == _YES)
        if proposal is None:
            self._store.set(f"{number}/{self._rank}", "")  # the others need not wait for it
        if decided:
            self._forget(number)
        return decided

    def _all_propose(self, number: int, proposal: str) -> bool:
        keys = [f"{number}/{rank}" for rank in range(self._world)]
        self._store.set(keys[self._rank], proposal)
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout))
        except RuntimeError as error:  # DistStoreError, if the deadline has passed
            if "timeout" not in str(error).lower():
                raise
            return False
        return all(each.decode() == proposal for each in self._store.multi_get(keys))

    def _forget(self, number: int) -> None:
        """Everybody has voted in `number`, so nobody reads earlier votes any more."""
        for each in [each for each in self._cast if each < number]:
            self._store.delete_key(f"{each}/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(f"{each}/decision")
            self._cast.remove(each)


def group_store(name: str) -> Any:
    """A store under `name`, with a connection of its own, of the processes of torch's default group."""
    shared = cast(Any, torch.distributed.distributed_c10d)._get_default_store()
    return cast(Any, torch.distributed).PrefixStore(name, shared.clone())


class _Bounded:
    """Work in a thread of its own: a store whose process has stopped answers no call, whatever its time-out."""

    def __init__(self, work: Callable[[Callable[[], bool]], Any]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._given_up = False
        self._value: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="tessera-vote", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._work(lambda: self._given_up)
        except BaseException as caught:
            self._error = caught
        self._ended.set()

    def result(self, seconds: float) -> Any:
        try:
            # Twice: if this process has stood still meanwhile, its thread has had no time.
            if not self._ended.wait(min(seconds, _MOST_SECONDS)) and not self._ended.wait(_SLACK_SECONDS):
                raise UnavailableError(
                    f"the store of the engine's ranks has not answered in {seconds:g} s: this rank does not know what "
                    "the others decided"
                )
        finally:
            self._given_up = True
        if self._error is not None:
            raise UnavailableError(f"the store of the engine's ranks: {self._error}") from self._error
        return self._value
