"""The weights of an engine that serves: a version is staged beside them, then installed on all ranks or on none."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from .._errors import InvalidArgumentError, MismatchError, UnavailableError
from ._learn import Form, LearnedMap, Piece
from ._updates import ANOTHER_FAILED, Verdict

Agree = Callable[[str | None], bool]
"""Collective over the ranks of an engine: whether all of them propose the same; None is a "no". It must end by a
deadline, and raise if the decision is not known. One rank: `one_rank`."""


def one_rank(proposal: str | None) -> bool:
    """The Agree of an engine of one rank."""
    return proposal is not None


_SCRATCH_BYTES = 1 << 20  # stays in a core's cache
_ATTEMPTS = 3


@dataclass
class Serving:
    """What an engine's weights are, on one rank. It outlives a LiveWeights: pass it on to the next one.

    Attributes:
        version: That serves, as its trainer counts; 0 before the first update, without a run.
        run: Of the trainer that sent it. One that was started again counts its versions from 1 again.
        torn: Whether the weights may be of two versions, on this rank or beside other ranks: do not serve them. The
            next update that succeeds ends it.
    """

    version: int = 0
    run: str = ""
    torn: bool = False


class Receiver(Protocol):
    """What LiveWeights needs of a tessera.Batch."""

    def recv(self, min_version: int | None = None, *, timeout: float | None = None) -> Any: ...


class Change(Protocol):
    """Something that is installed besides pieces: layers that are built beside those that serve."""

    def build(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Everything that may fail; nothing that serves is touched."""

    def swap(self) -> None:
        """Puts in what was built, and keeps what it replaces."""

    def undo(self) -> None:
        """Puts back what swap() replaced, also if that was interrupted. Called again if it raises."""

    def drop(self) -> None:
        """Lets go of what was built, or was replaced."""


class Plan(NamedTuple):
    """How each part of a version is installed."""

    pieces: Sequence[Piece]  # copied into place
    changes: Sequence[Change] = ()  # what installs the others
    refresh: Sequence[Callable[[], None]] = ()  # derives from weights in place what depends on them; also after an undo


class LiveWeights:
    """One rank's part of an engine's weights. Every rank of the engine calls settle() and commit() in the same order,
    also when one of them has failed; neither of them raises in only one rank: what fails is told by the Verdict, on all
    ranks. Not thread-safe, but receive() may run in another thread; settle() says no while it does.

    receive() does all that can fail, beside the weights that serve, so that requests go on. settle() asks whether all
    ranks have received the same version. commit() swaps and copies within memory, and votes three times: before
    anything changes, once everything that was built beside is swapped in, and at the end. A rank that fails, or misses
    a vote, is a "no", and whatever was changed is put back on all ranks.

    What cannot be put back is told: `torn`. That is copies into place without `undo`, if another rank has failed after
    the second vote; and a rank that proposed a "yes" to the last vote and does not learn the decision.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        learned: LearnedMap,
        batch: Receiver,
        staged: Mapping[str, torch.Tensor],
        *,
        agree: Agree = one_rank,
        rank: int = 0,
        prepare: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
        plan: Callable[[Mapping[str, torch.Tensor]], Plan] | None = None,
        undo: bool = False,
        serving: Serving | None = None,
        run: str = "",
    ) -> None:
        """
        Args:
            parameters: The live ones, by the names of `learned`; asked at every commit.
            learned: Of this rank.
            batch: Receives `staged`, by the map of `learned`.
            staged: What learned.staging() gave, and memory for learned.results.
            agree: Of the engine's ranks, such as StoreVote.
            rank: Of this one, for messages.
            prepare: Called with what was received, such as to compute learned.results from it.
            plan: Called once, with the first version, when it is staged. None: all pieces are copied into place.
            undo: Whether the copies into place can be undone, which takes about twice their time: each piece is
                exchanged with what it replaces, so that no more memory is needed. If not, they begin only once every
                rank has everything and has swapped in what was built beside, all of which is undone if any rank fails;
                then nothing but copies within memory is left, and one that is interrupted begins again.
            serving: What the weights are so far. None: those that the engine began with.
            run: Of the trainer that sends; see Serving.

        Raises:
            InvalidArgumentError: Without a plan: a parameter does not lie as the loader left it.
        """
        self._parameters = parameters
        self._learned = learned
        self._batch = batch
        self._memory = staged
        self._agree = agree
        self._rank = rank
        self._prepare = prepare or (lambda memory: None)
        self._make_plan = plan
        self._plan: Plan | None = None
        self._serving = serving if serving is not None else Serving()
        self._run = run
        self._receiving = threading.Lock()
        self._staged: int | None = None
        self._received: int | None = None
        self._error: BaseException | None = None
        self._interrupt: BaseException | None = None
        self._unknown: Exception | None = None
        self._began = 0.0
        self._offset = 0
        self._undo = undo
        if plan is None:
            self._take(Plan(learned.pieces))

    def _take(self, plan: Plan) -> None:
        require_loaded_form(self._parameters(), self._learned, plan.pieces)
        self._plan = plan
        self._uses = Counter(piece.source for piece in plan.pieces)

    @property
    def plan(self) -> Plan | None:
        """How versions are installed; None before the first is staged."""
        return self._plan

    @property
    def _changes(self) -> Sequence[Change]:
        return () if self._plan is None else self._plan.changes

    @property
    def serving(self) -> Serving:
        """What the weights are."""
        return self._serving

    @property
    def version(self) -> int:
        """That serves; 0 before the first update."""
        return self._serving.version

    @property
    def staged(self) -> int | None:
        """The version that waits for commit(), if any."""
        return self._staged

    @property
    def received(self) -> int | None:
        """The version that receive() has got, which settle() is due for."""
        return self._received

    @property
    def run(self) -> str:
        """Of the trainer that sends; empty: not known."""
        return self._run

    @property
    def ready(self) -> bool:
        """Whether receive() has got a version, and settle() is due."""
        return self._received is not None

    @property
    def torn(self) -> bool:
        """See Serving."""
        return self._serving.torn

    def load(self, timeout: float | None = None) -> int:
        """Receives the newest version and puts it where the loader would, while the engine is starting and serves
        nothing yet. Returns the version. Raises what fails, on the rank where it does."""
        received = int(self._batch.recv(None, timeout=timeout))
        with torch.no_grad():
            self._prepare(self._memory)
            parameters = self._parameters()
            for name in {piece.parameter for piece in self._learned.pieces} & self._learned.untouched.keys():
                parameters[name].zero_()  # padding, which a loader fills with zeros
            self._learned.install(parameters, self._memory)
        self._serving.version, self._serving.run, self._serving.torn = received, self._run, False
        return received

    def stage(self, min_version: int | None = None, timeout: float | None = None) -> Verdict:
        """Receives the newest version, at least `min_version`, and builds what it needs: receive() and settle(). A
        version that was staged and not committed is replaced."""
        self.receive(min_version, timeout)
        return self.settle()

    def receive(self, min_version: int | None = None, timeout: float | None = None, offset: int = 0) -> None:
        """The first part of stage(), which may run in a thread of its own while requests are served: nothing in it
        needs other ranks to call it, too. Never raises. Does nothing if it is running already, or if a version that
        suffices has been received and waits for settle(): it would not come again.

        Args:
            offset: How much larger a version's number on the bus, such as `min_version`, is than the trainer's own.
        """
        if not self._receiving.acquire(blocking=False):
            return
        try:
            if min_version is not None and self._received is not None and self._received >= min_version:
                return
            self._began, self._offset = time.monotonic(), offset
            self._staged, self._received, self._error = None, None, None
            received = self._recv(min_version, timeout)
            self._prepare(self._memory)
            if self._plan is None and self._make_plan is not None:
                self._take(self._make_plan(self._memory))
            for change in self._changes:
                change.build(self._memory)
            self._received = received
        except BaseException as caught:
            self._error = caught
        finally:
            self._receiving.release()

    def _recv(self, min_version: int | None, timeout: float | None) -> int:
        try:
            return int(self._batch.recv(min_version, timeout=timeout))
        except MismatchError:  # the other ranks took a version while this one failed, which it has now refused
            return int(self._batch.recv(min_version, timeout=timeout))

    def settle(self) -> Verdict:
        """The second part of stage(): whether all ranks have received the same version. Collective; as long as the
        slowest rank takes."""
        if not self._receiving.acquire(blocking=False):
            self._all_agree(None)
            return self._verdict(False, self._began, UnavailableError("a version is still being received"))
        try:
            error = self._error
            if self._received is None and error is None:
                error = InvalidArgumentError("nothing was received: call receive() first")
            agreed = self._all_agree(None if self._received is None else str(self._received))
            received, self._received, self._error = self._received, None, None
            if agreed:
                self._staged = None if received is None else received - self._offset
                return self._verdict(True, self._began)
            self._drop()
            return self._verdict(False, self._began, error)
        finally:
            self._receiving.release()

    def commit(self) -> Verdict:
        """Installs what is staged. Collective. The only part of an update in which no request may run."""
        began = time.monotonic()
        version, self._staged = self._staged, None
        done: list[Callable[[], Any]] = []
        failure = None if version is not None else InvalidArgumentError("nothing is staged: call stage() first")
        ready, copied, left = version is not None, False, 3
        installed: bool | None = False
        try:
            left -= 1
            ready = bool(self._all_agree(str(version) if ready else None))
            if ready:
                failure = self._tried(self._swap, done)
            left -= 1
            ready = bool(self._all_agree(str(version) if ready and failure is None else None))
            if ready:
                copied = not self._undo
                failure = self._tried(self._copy_back_and_forth if self._undo else self._copy, done)
            ready = ready and failure is None
            installed = None if ready else False  # until it is known
            left -= 1
            decision = self._all_agree(str(version) if ready else None)
            installed = decision if ready else False
        finally:
            for _ in range(left):  # interrupted: the ranks stay in step
                self._all_agree(None)
            self._end(version, installed, copied, done)
        return self._verdict(installed is True, began, failure)

    def _end(self, version: int | None, installed: bool | None, copied: bool, done: list[Callable[[], Any]]) -> None:
        if installed:
            assert version is not None
            self._serving.version, self._serving.run, self._serving.torn = version, self._run, False
        elif copied or installed is None or not self._put_back(done):
            self._serving.torn = True
        self._drop()

    def _tried(self, work: Callable[[list[Callable[[], Any]]], None], done: list[Callable[[], Any]]) -> Any:
        """What it raised, or None."""
        try:
            with torch.no_grad():
                work(done)
        except BaseException as caught:
            return caught
        return None

    def _swap(self, done: list[Callable[[], Any]]) -> None:
        assert self._plan is not None
        require_loaded_form(self._parameters(), self._learned, self._plan.pieces)
        for change in self._plan.changes:
            done.append(change.undo)
            change.swap()

    def _copy(self, done: list[Callable[[], Any]]) -> None:
        """What is staged stays as it is: a copy that is interrupted begins again."""
        assert self._plan is not None
        for attempt in range(_ATTEMPTS):
            try:
                parameters = self._parameters()
                for piece in self._plan.pieces:
                    piece.install(parameters[piece.parameter], self._memory[self._learned.key(piece.source)])
                self._refresh()
                return
            except BaseException as caught:
                if attempt + 1 == _ATTEMPTS:
                    raise
                if not isinstance(caught, Exception):
                    self._interrupt = caught  # raised at the end

    def _copy_back_and_forth(self, done: list[Callable[[], Any]]) -> None:
        assert self._plan is not None
        parameters = self._parameters()
        done.insert(0, self._refresh)  # called last
        for piece in self._plan.pieces:
            staged = self._memory[self._learned.key(piece.source)]
            _exchange(piece, parameters[piece.parameter], staged, self._uses[piece.source] > 1, done)
        self._refresh()

    def _put_back(self, done: list[Callable[[], Any]]) -> bool:
        """Whether everything is as it was."""
        failed = [undo for undo in reversed(done) if not self._done(undo)]
        return not failed

    def _done(self, work: Callable[[], Any]) -> bool:
        return any(self._tried(lambda _: work(), []) is None for _ in range(_ATTEMPTS))

    def _refresh(self) -> None:
        for derive in self._plan.refresh if self._plan is not None else ():
            derive()

    def _drop(self) -> None:
        """Lets go of what was built. What cannot is replaced by the next version."""
        for change in self._changes:
            self._done(change.drop)

    def _all_agree(self, proposal: str | None) -> bool | None:
        """None: it cannot be known, as the other ranks cannot be reached."""
        try:
            return self._agree(proposal)
        except Exception as error:
            self._unknown = error
            return None

    def _verdict(self, ok: bool, began: float, error: BaseException | None = None) -> Verdict:
        interrupt, self._interrupt = self._interrupt, None
        unknown, self._unknown = self._unknown, None
        if error is None and not ok:
            error = unknown
        if error is not None and not isinstance(error, Exception):
            interrupt = error
        if interrupt is not None:  # such as KeyboardInterrupt: all ranks are in step, and this one is asked to end
            raise interrupt
        text = "" if ok else ANOTHER_FAILED if error is None else f"{type(error).__name__}: {error}"
        serving = self._serving
        seconds = time.monotonic() - began
        return Verdict(ok, serving.version, self._staged, self._rank, text, seconds, serving.run)


def require_loaded_form(
    parameters: Mapping[str, torch.Tensor], learned: LearnedMap, pieces: Iterable[Piece] | None = None
) -> None:
    """Raises InvalidArgumentError for the first parameter that does not lie as the engine's loader left it."""
    for name in dict.fromkeys(piece.parameter for piece in (learned.pieces if pieces is None else pieces)):
        live, wanted = parameters.get(name), learned.forms[name]
        if live is None or Form.of(live) != wanted:
            found = "is gone" if live is None else f"is {tuple(live.shape)} {live.dtype} with strides {live.stride()}"
            raise InvalidArgumentError(
                f"{name} {found}, and was loaded as {wanted.shape} {wanted.dtype} with strides {wanted.strides}: it "
                "cannot be written in place"
            )


def _exchange(
    piece: Piece, parameter: torch.Tensor, staged: torch.Tensor, is_shared: bool, done: list[Callable[[], Any]]
) -> None:
    """Puts a slice into its place, and what was there into the slice, so that it can be put back without more memory.
    What is cast or repeated, or belongs in other places, too, is kept aside instead."""
    to, source = piece.place(parameter), piece.taken(staged)
    if is_shared or piece.view(parameter) is None:
        kept = to.clone()
        done.append(functools.partial(to.copy_, kept))
        to.copy_(source)
        return
    for here, there in zip(_chunks(to), _chunks(source), strict=True):
        kept = here.clone()
        done.append(functools.partial(here.copy_, kept))
        here.copy_(there)
        there.copy_(kept)
        done[-1] = functools.partial(here.copy_, there)


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Of at most _SCRATCH_BYTES, as far as its dims allow."""
    if tensor.dim() == 0 or tensor.nbytes <= _SCRATCH_BYTES:
        return [tensor]
    dim = max(range(tensor.dim()), key=lambda each: tensor.shape[each])
    rows = max(1, _SCRATCH_BYTES * tensor.shape[dim] // tensor.nbytes)
    return [tensor.narrow(dim, at, min(rows, tensor.shape[dim] - at)) for at in range(0, tensor.shape[dim], rows)]
