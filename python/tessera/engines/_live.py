"""The weights of an engine that serves: a version is staged beside them, then installed on all ranks or on none."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from .._errors import InvalidArgumentError
from ._learn import Form, LearnedMap, Piece

Agree = Callable[[bool], bool]
"""Collective over the ranks of an engine: whether all of them said True. One rank: `lambda ok: ok`."""

_SCRATCH_BYTES = 1 << 20  # stays in a core's cache
_ATTEMPTS = 3


@dataclass(frozen=True)
class Verdict:
    """What came of stage() or commit(), on one rank; the same `ok` on all of them.

    Attributes:
        ok: Whether it is done. If not, everything serves as before, unless LiveWeights.torn.
        version: The version that serves now; 0 before the first update.
        staged: The version that waits for commit(); None: none.
        rank: Of the engine.
        error: What failed here, or that another rank failed.
        seconds: That it took here.
    """

    ok: bool
    version: int
    staged: int | None
    rank: int
    error: str = ""
    seconds: float = 0.0


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
        """Puts back what swap() replaced, also if that was interrupted."""

    def drop(self) -> None:
        """Lets go of what was built, or was replaced."""


class Plan(NamedTuple):
    """How each part of a version is installed."""

    pieces: Sequence[Piece]  # copied into place
    changes: Sequence[Change] = ()  # what installs the others
    refresh: Sequence[Callable[[], None]] = ()  # derives from weights in place what depends on them; also after an undo


class LiveWeights:
    """One rank's part of an engine's weights. Not thread-safe; every rank of the engine calls stage() and commit() in
    the same order, and neither of them raises in only one rank: what fails is told by the Verdict, on all ranks.

    stage() does all that can fail, beside the weights that serve, so that requests go on. commit() swaps and copies
    within memory; `undo` says what is put back if any rank fails.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        learned: LearnedMap,
        batch: Receiver,
        staged: Mapping[str, torch.Tensor],
        *,
        agree: Agree = lambda ok: ok,
        rank: int = 0,
        plan: Callable[[Mapping[str, torch.Tensor]], Plan] | None = None,
        undo: bool = False,
    ) -> None:
        """
        Args:
            parameters: The live ones, by the names of `learned`; asked at every commit.
            learned: Of this rank.
            batch: Receives `staged`, by the map of `learned`.
            staged: What learned.staging() gave.
            agree: Of the engine's ranks.
            rank: Of this one, for messages.
            plan: Called once, with the first version, when it is staged. None: all pieces are copied into place.
            undo: Whether the copies into place can be undone, which takes about twice their time: each piece is
                exchanged with what it replaces, so that no more memory is needed. If not, they begin only once every
                rank has everything and has swapped in what was built beside, all of which is undone if any rank fails;
                then nothing but copies within memory is left, and one that is interrupted begins again.

        Raises:
            InvalidArgumentError: Without a plan: a parameter does not lie as the loader left it.
        """
        self._parameters = parameters
        self._learned = learned
        self._batch = batch
        self._memory = staged
        self._agree = agree
        self._rank = rank
        self._make_plan = plan
        self._plan: Plan | None = None
        self._version = 0
        self._staged: int | None = None
        self._received: int | None = None
        self._error: BaseException | None = None
        self._began = 0.0
        self._undo = undo
        self._torn = False
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
    def version(self) -> int:
        """That serves; 0 before the first update."""
        return self._version

    @property
    def staged(self) -> int | None:
        """The version that waits for commit(), if any."""
        return self._staged

    @property
    def torn(self) -> bool:
        """Whether a copy into place has failed for good, so that weights of two versions are mixed: do not serve them.
        The next update that succeeds ends it."""
        return self._torn

    def stage(self, min_version: int | None = None, timeout: float | None = None) -> Verdict:
        """Receives the newest version, at least `min_version`, and builds what it needs: receive() and settle(). A
        version that was staged and not committed is replaced."""
        self.receive(min_version, timeout)
        return self.settle()

    def receive(self, min_version: int | None = None, timeout: float | None = None) -> None:
        """The first part of stage(), which may run in a thread of its own while requests are served: nothing in it
        needs other ranks to call it, too. Never raises."""
        self._began = time.monotonic()
        self._staged, self._received, self._error = None, None, None
        try:
            received = int(self._batch.recv(min_version, timeout=timeout))
            if self._plan is None and self._make_plan is not None:
                self._take(self._make_plan(self._memory))
            for change in self._changes:
                change.build(self._memory)
            self._received = received
        except BaseException as caught:
            self._error = caught

    def settle(self) -> Verdict:
        """The second part of stage(): whether all ranks have received. Collective; quick."""
        error = self._error
        if self._received is None and error is None:
            error = InvalidArgumentError("nothing was received: call receive() first")
        if self._all_agree(error is None):
            self._staged, self._received = self._received, None
            return self._verdict(True, self._began)
        self._received = self._error = None
        for change in self._changes:
            change.drop()
        return self._verdict(False, self._began, error)

    def commit(self) -> Verdict:
        """Installs what is staged. Collective. The only part of an update in which no request may run."""
        began = time.monotonic()
        version, self._staged = self._staged, None
        if not self._all_agree(version is not None):
            error = None if version is not None else InvalidArgumentError("nothing is staged: call stage() first")
            return self._verdict(False, began, error)
        assert version is not None
        done: list[Callable[[], Any]] = []
        installed = copied = False
        failure = self._tried(self._swap, done)
        if self._all_agree(failure is None):
            copied = not self._undo
            failure = self._tried(self._copy_back_and_forth if self._undo else self._copy, done)
            installed = self._all_agree(failure is None)
        if installed:
            self._version, self._torn = version, False
        elif copied:
            self._torn = True
        else:
            self._put_back(done)
        for change in self._changes:
            change.drop()
        return self._verdict(installed, began, failure)

    @staticmethod
    def _tried(work: Callable[[list[Callable[[], Any]]], None], done: list[Callable[[], Any]]) -> BaseException | None:
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
            except Exception:
                if attempt + 1 == _ATTEMPTS:
                    raise

    def _copy_back_and_forth(self, done: list[Callable[[], Any]]) -> None:
        assert self._plan is not None
        parameters = self._parameters()
        done.insert(0, self._refresh)  # called last
        for piece in self._plan.pieces:
            staged = self._memory[self._learned.key(piece.source)]
            _exchange(piece, parameters[piece.parameter], staged, self._uses[piece.source] > 1, done)
        self._refresh()

    def _put_back(self, done: list[Callable[[], Any]]) -> None:
        with torch.no_grad():
            for undo in reversed(done):
                undo()

    def _refresh(self) -> None:
        for derive in self._plan.refresh if self._plan is not None else ():
            derive()

    def _all_agree(self, ok: bool) -> bool:
        try:
            return self._agree(ok)
        except Exception:  # a rank is gone, and the engine with it
            return False

    def _verdict(self, ok: bool, began: float, error: BaseException | None = None) -> Verdict:
        if error is not None and not isinstance(error, Exception):  # such as KeyboardInterrupt: all is as it was
            raise error
        text = "" if ok else "another rank failed" if error is None else f"{type(error).__name__}: {error}"
        return Verdict(ok, self._version, self._staged, self._rank, text, time.monotonic() - began)


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
