"""Errors are told to all: what one rank raises in a call that all ranks make ends the call of the others.

A group of ranks and the groups that are made of it, one for each model, are a *family*. A call that is refused on one
rank is refused in all of them, by one mail each, since the other ranks may wait in any: so each refusal counts once in
every group, on every rank, and the next calls match again. Ranks that have been told pass it on in the family's other
groups. Nobody waits for that. A model whose group has counted a refusal brings its runtime back to a common state
before its next use (`ShardedModel.resume`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from .. import _core
from .._errors import Error, InvalidArgumentError, MismatchError

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_families: weakref.WeakSet[Family] = weakref.WeakSet()
_numbers = itertools.count()
_TOLD, _REFUSED = b"\0", b"\1"  # in front of what a rank tells in an exchange
_TEXT_BYTES = 2000  # of a refusal


class Member:
    """A group of a family.

    Attributes:
        core: The group.
        family: What it belongs to.
        number: Its place in the order in which this process has made groups.
    """

    __slots__ = ("__weakref__", "_offset", "core", "family", "number")

    def __init__(self, core: _core.ShardGroup, family: Family) -> None:
        self.core, self.family = core, family
        self.number = next(_numbers)
        self._offset = family.count() - core.refusals
        family.add(self)

    @property
    def count(self) -> int:
        """How many refusals of the family the group has counted."""
        return self.core.refusals + self._offset

    def move(self, family: Family) -> None:
        """Become a member of another family."""
        self._offset += family.count() - self.count
        self.family = family
        family.add(self)


class Family:
    """Groups of the same ranks. Each holds its members weakly."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        _families.add(self)

    def add(self, member: Member) -> None:
        self._members.add(member)

    def members(self) -> list[Member]:
        return sorted(self._members, key=lambda member: member.number)

    def count(self) -> int:
        """Return how many refusals its ranks have told each other."""
        return max((member.count for member in self._members), default=0)

    def unite(self, other: Family) -> None:
        """Take over the members of another family."""
        if other is not self:
            for member in other.members():
                member.move(self)
            other._members.clear()

    def settle(self) -> None:
        """Pass on, in all groups, what has been refused in one of them. Does not wait."""
        most = self.count()
        if all(member.count == most for member in self._members):
            return
        members = self.members()
        latest = next(member.core.latest_refusal for member in members if member.count == most)
        assert latest is not None
        code, text, own = latest
        for member in members:
            with contextlib.suppress(Error):  # a group that has failed
                while member.count < most:
                    member.core.refuse("told", text, code, forwarded=not own)

    def refuse(self, what: str, error: BaseException, text: str | None = None) -> None:
        """Tell the other ranks, wherever they wait, that this one has raised an error in place of a call.

        Args:
            text: What they are told. None: the error's.
        """
        code, own = _as_told(what, error)
        if text is None or not isinstance(error, Exception):
            text = own
        elif code == "cancelled" and not isinstance(error, Error):
            code = "invalid-argument"
        for member in self.members():
            with contextlib.suppress(Error):
                member.core.refuse(what, text, code)

    def tell(self, what: str, error: BaseException, before: int, text: str | None = None) -> None:
        """Tell of an error that leaves a call. `before`: the count when it began; another one: this was told."""
        if is_known(error):
            return
        if self.count() == before:
            self.refuse(what, error, text)
        else:
            self.settle()


_KNOWN = "known_to_ranks"


def known(error: E) -> E:
    """Mark an error of which no rank needs to be told: all raise it, from what they have told each other, and have left
    the call; or its thread has come to no call of all ranks, such as a second one that would train."""
    error.__dict__[_KNOWN] = True
    return error


def is_known(error: BaseException) -> bool:
    return _KNOWN in error.__dict__


def unknown(error: BaseException) -> None:
    """Take the mark away: ranks have not left all that the error ends, such as a step."""
    error.__dict__.pop(_KNOWN, None)


# --- what ranks tell each other in an exchange


def told_of(what: str, blob: bytes, error: BaseException | None = None) -> bytes:
    """Return what a rank tells: bytes for the others, or why it has none."""
    if error is None:
        return _TOLD + blob
    code, text = _as_told(what, error)
    return _REFUSED + f"{code}\n{text}".encode(errors="replace")[:_TEXT_BYTES]


def answers_of(answers: Sequence[bytes], error: BaseException | None = None) -> list[bytes]:
    """Return what all ranks have told. An error of one of them, `error` on this one, is raised on all."""
    if error is not None:
        raise known(error)
    for rank, answer in enumerate(answers):
        if answer[:1] != _TOLD:
            code, _, text = answer[1:].decode(errors="replace").partition("\n")
            raise known(_error(code, f"rank {rank}: {text or 'it gave no reason'}"))
    return [answer[1:] for answer in answers]


def refused_before(core: _core.ShardGroup) -> Error:
    """Return the error of a call that is not made, as one of its kind has been refused."""
    latest = core.latest_refusal
    assert latest is not None
    return known(_error(latest[0], latest[1]))


def _error(code: str, text: str) -> Error:
    return next((each for each in Error.__subclasses__() if each.code == code), InvalidArgumentError)(text)


def json_of(answers: Iterable[bytes], what: str, is_possible: Callable[[Any], bool]) -> list[Any]:
    """Return what ranks have told as JSON of `what`, which may be anything: `is_possible` returns False, or throws, for
    what cannot be true."""
    found = []
    for rank, answer in enumerate(answers):
        try:
            told = json.loads(answer)
            possible = is_possible(told)
        except (ValueError, TypeError, AttributeError, LookupError):
            possible = False
        if not possible:
            raise MismatchError(f"rank {rank} tells what cannot be true of {what}")
        found.append(told)
    return found


def numbers_of(answers: Iterable[bytes], form: str, what: str) -> list[tuple[Any, ...]]:
    """Return what ranks have told as numbers of `what`, in a form of `struct`."""
    found = []
    for rank, answer in enumerate(answers):
        if len(answer) != struct.calcsize(form):
            raise MismatchError(f"rank {rank} tells {len(answer)} bytes of {what}, not {struct.calcsize(form)}")
        found.append(struct.unpack(form, answer))
    return found


def _as_told(what: str, error: BaseException) -> tuple[str, str]:
    """Return the code and the text that other ranks get."""
    if isinstance(error, Error) and error.code != "error":
        return error.code, str(error)
    said = " ".join(str(error).split())
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if not isinstance(error, Exception):
        return "cancelled", f"interrupted in {what} by {text}"
    mistakes = (ValueError, TypeError, LookupError, AttributeError)
    code = "invalid-argument" if isinstance(error, mistakes) else "cancelled"
    return code, f"{text} (in {what})"


@contextlib.contextmanager
def telling(what: str, families: Iterable[Family]) -> Iterator[None]:
    """Tell the other ranks of these families of any exception that leaves it: their call ends with the same text."""
    before = [(family, family.count()) for family in families]
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        for family, count in before:
            family.tell(what, error, count)
        raise


def collective(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a call that all ranks make. What it has to do with is found in its arguments; if these have lost it, all
    families are told."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            with telling(what, families_in((*args, *kwargs.values()))):
                return function(*args, **kwargs)

        return wrapper

    return decorate


def families_in(values: Iterable[Any]) -> list[Family]:
    """Return the families of groups, models, optimisers and tensors; all that there are, if there is none of these."""
    found: dict[Family, None] = {}
    for value in values:
        family = getattr(getattr(value, "member", None), "family", None)  # of a group, or a model's weights
        if family is not None:
            found[family] = None
            continue
        for tensor in _tensors_of(value):
            model = getattr(getattr(tensor, "store", None), "model", None)
            if model is not None:
                found[model.member.family] = None
    return list(found) or list(_families)


def _tensors_of(value: Any) -> Iterable[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return value.parameters()
    if isinstance(value, torch.optim.Optimizer):
        return [each for group in value.param_groups for each in group["params"]]
    return value if isinstance(value, (list, tuple)) else []
