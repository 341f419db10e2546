"""Outcomes of updates, as every driver of an engine tells them: `RankStatus` of a rank, `EngineUpdate` of the engine.

Both travel as JSON: their fields by name. A reader ignores fields that it does not know, and takes the
default of one that is missing, so that two releases understand each other.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

ANOTHER_FAILED = "another rank failed"
"""What a rank says that is well, and goes back with one that is not."""
_MOST_NAMED = 4
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Verdict:
    """The outcome of stage() or commit() on one rank; the same `ok` on all of them.

    Attributes:
        ok: Whether it is done. If not, everything serves as before, unless LiveWeights.torn.
        version: The version that serves now; 0 before the first update.
        staged: The version that waits for commit(); None: none.
        rank: Of the engine.
        error: What failed here, or that another rank failed.
        seconds: That it took here.
        run: Whose version it is; see Serving.
    """

    ok: bool
    version: int
    staged: int | None
    rank: int
    error: str = ""
    seconds: float = 0.0
    run: str = ""


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank of an engine, as it tells it.

    Attributes:
        version: The version that it serves; 0 before the first update, without a run.
        run: Trainer.run of the trainer that sent it; empty: it was not sent.
        torn: Its weights may be of two versions.
        trainer: Run of the trainer that it has met; None: it has met none.
        failure: What its last step has raised; empty: nothing.
        verdict: What came of its last update; None: there was none with this trainer.
        busy: A step runs beside requests.
        received: The version that was received last; None: none.
        ready: It waits to be installed.
        updating: The engine's own update is under way, which one that was interrupted leaves behind.
        in_place: How many pieces of parameters an update copies into place.
        exchanged: How many parameters it installs by an exchange of pages.
        rebuilt: How many layers it builds again.
    """

    version: int
    run: str = ""
    torn: bool = False
    trainer: str | None = None
    failure: str = ""
    verdict: Verdict | None = None
    busy: bool = False
    received: int | None = None
    ready: bool = False
    updating: bool = False
    in_place: int = 0
    exchanged: int = 0
    rebuilt: int = 0

    @property
    def error(self) -> str:
        """Say why the last update was not installed; empty: it was, or there was none."""
        return "" if self.verdict is None or self.verdict.ok else self.verdict.error

    def shortened(self, most: int) -> RankStatus:
        """Return it with texts of at most so many characters."""
        verdict = self.verdict
        if verdict is not None:
            verdict = dataclasses.replace(verdict, error=verdict.error[:most])
        return dataclasses.replace(self, failure=self.failure[:most], verdict=verdict)


Ranks = Sequence[RankStatus]
"""The statuses of all ranks of an engine, in their order."""


@dataclass(frozen=True)
class EngineUpdate:
    """The outcome of an update in one server, or the version that it serves.

    Attributes:
        ok: Whether all its ranks serve the new version. If not, all serve the one before; or the server is left paused,
            which `error` then says, as a copy into place has failed for good, or as its ranks do not say what they
            hold. The next send() that works ends it.
        version: The version that it serves; None if it does not say, or if ranks differ.
        error: Why not.
        pause: Seconds in which no request ran.
        run: Trainer.run of the trainer that sent this version: after a restart it may be an earlier one.
        ranks: What each rank said.
    """

    ok: bool
    version: int | None
    error: str = ""
    pause: float = 0.0
    run: str = ""
    ranks: tuple[RankStatus, ...] = field(default=(), repr=False)

    @staticmethod
    def of(
        ranks: Ranks, error: str = "", *, pause: float = 0.0, when_mixed: str = "the server is left paused"
    ) -> EngineUpdate:
        """Return what its ranks' statuses come to.

        Args:
            error: What else went wrong.
            when_mixed: What it means for the server that its ranks have weights of two versions.
        """
        serves = served(ranks)
        run, version = ("", None) if serves is None else serves
        error = error or failed(ranks) or refused(ranks)
        if serves is None:
            error = f"{error or 'ranks differ'}; weights of two versions are mixed, and {when_mixed}"
        return EngineUpdate(not error, version, error, pause, run, tuple(ranks))

    def after(self, wanted: int, run: str) -> EngineUpdate:
        """Return what it is for a trainer that has sent version `wanted` of `run`."""
        error = self.error
        if not error and self.run != run:
            error = f"it goes on with version {self.version} of an earlier trainer"
        if not error and self.version is not None and self.version < wanted:
            error = f"it took version {self.version}, which was on its way, and not {wanted}"
        return dataclasses.replace(self, ok=not error, error=error)


def served(ranks: Ranks) -> tuple[str, int] | None:
    """Return run and version that all ranks of a server serve; None if weights are mixed."""
    different = {(each.run, each.version, each.torn) for each in ranks}
    run, version, torn = different.pop() if len(different) == 1 else ("", 0, True)
    return None if torn else (run, version)


def shown(ranks: Ranks) -> int | None:
    """Return the version that all ranks of a server serve and that was sent to it; None: there is none to show."""
    run, version = served(ranks) or ("", 0)
    return version if run or version > 0 else None


def failed(ranks: Ranks) -> str:
    """Say what a step has raised in ranks, or nothing."""
    return _named((rank, each.failure) for rank, each in enumerate(ranks) if each.failure)


def refused(ranks: Ranks) -> str:
    """Say why an update was not installed, or nothing."""
    verdicts = [(rank, each.verdict) for rank, each in enumerate(ranks) if each.verdict is not None]
    return _named((rank, verdict.error) for rank, verdict in verdicts if not verdict.ok)


def _named(errors: Iterable[tuple[int, str]]) -> str:
    """Name ranks with their errors: those that know why, if there are some. Empty for none."""
    said = [f"rank {rank}: {error}" for rank, error in errors]
    known = [each for each in said if not each.endswith(ANOTHER_FAILED)] or said[:1]
    return "; ".join(known[:_MOST_NAMED])


# --- JSON


def fields_of(told: Verdict | RankStatus | EngineUpdate) -> dict[str, Any]:
    """Return what is sent: values of JSON, by the names of fields."""
    return dataclasses.asdict(told)


def read(kind: type[_Kind], given: Any) -> _Kind:
    """Return what another process has told. Throws ValueError for what cannot be that."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{given!r} is no {kind.__name__}")
    values = {}
    types_of_fields = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        if each.name in given:
            values[each.name] = _value(types_of_fields[each.name], given[each.name])
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise ValueError(f"a {kind.__name__} without {each.name!r}")
    return kind(**values)


def _value(kind: Any, given: Any) -> Any:
    if isinstance(kind, types.UnionType):
        (kind,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
        return None if given is None else _value(kind, given)
    if typing.get_origin(kind) is tuple:
        (element, _) = typing.get_args(kind)
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise ValueError(f"{given!r} is no list")
        return tuple(_value(element, each) for each in given)
    if dataclasses.is_dataclass(kind):
        return read(typing.cast("type[Any]", kind), given)
    accepted = (int, float) if kind is float else kind
    if not isinstance(given, accepted) or (isinstance(given, bool) and kind is not bool):
        raise ValueError(f"{given!r} is no {kind.__name__}")
    return given
