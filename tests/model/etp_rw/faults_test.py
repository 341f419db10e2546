"""Faults of the protocol, each planted once: a subclass overrides a method, and the exploration must find it.

The claim that breaks is a part of each case, and so is a program that shows it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from etp_claims import RECOVERY, Explorer
from etp_operations import (
    AbsMax,
    Adafactor,
    Adamw,
    AddToTemporary,
    AddVector,
    Backward,
    Cumsum,
    Fill,
    Keep,
    Look,
    MapValue,
    Multiply,
    Operation,
    PrintSquare,
    Read,
    Resync,
    Scale,
    Use,
    ZeroGrad,
    ZeroOnRank0,
)
from etp_protocol import Protocol, Rank, Temporary, stamp_of
from rank_machine import Code, Load, Location, Machine, Refused, Store, Values

# Reads ----


class RecipeOfAnotherVersion(Protocol):
    """A recipe is repeated after a store in it was written."""

    def recipe_stands(self, rank: Rank, temporary: Temporary) -> bool:
        return not temporary.written


class RecipeOfWrittenTemporary(Protocol):
    """A recipe is repeated after the temporary itself was written."""

    def recipe_stands(self, rank: Rank, temporary: Temporary) -> bool:
        return rank.versions[temporary.store] == temporary.version


class NoRecipe(Protocol):
    """Every gather of a temporary is a numbered call: rank 0 cannot print one."""

    def recipe_stands(self, rank: Rank, temporary: Temporary) -> bool:
        return False


class PullInBatch(Protocol):
    """A batch's present state is pulled, instead of read in a numbered call."""

    def read_in_batch(self, rank: Rank, store: str) -> Code:
        return (yield from self.load_rows(rank, store, rank.contents[store]))


class WriteGoesOnBehindRead(Protocol):
    """Owners go on in a batch while others copy what was met for."""

    def end_read_in_batch(self, rank: Rank, store: str) -> Code:
        yield from ()


class MappedIsNotCopied(Protocol):
    """A rank says that it reads no longer while the program has mapped values."""

    def detach(self, rank: Rank, stores: Sequence[str]) -> Code:
        yield from ()


class MappedIsNotCopiedBeforeRound(Protocol):
    """A rank shows a round, so that gradients are added to, while the program has them mapped."""

    def detach_before_round(self, rank: Rank, store: str) -> Code:
        yield from ()


# Writes ----


class NoWaitForReaders(Protocol):
    """Weights are written at the owners' own pace."""

    def unguarded(self, store: str) -> bool:
        return store == "p"

    def wait_for_readers(self, rank: Rank, what: str, stores: Sequence[str], operands: Sequence[str] = ()) -> Code:
        if not any(map(self.unguarded, stores)):
            yield from super().wait_for_readers(rank, what, stores, operands)


class NoWaitForReadersOfGradients(NoWaitForReaders):
    """Gradients are; a fast rank multiplies while a slow one pulls."""

    def unguarded(self, store: str) -> bool:
        return store.startswith("g")


class NoWaitForReadersOfStates(NoWaitForReaders):
    """States are."""

    def unguarded(self, store: str) -> bool:
        return store == "m"


class ReadersOfEachStore(Protocol):
    """A wait for readers is one for each store: ranks in different writes wait for each other."""

    def all_have_come(self, mails: Values, number: int, what: str) -> bool:
        return super().all_have_come(mails, number, what) and all(mail.what == what for mail in mails)


class WriteIsNotTold(Protocol):
    """A wait for readers does not tell which write it is for."""

    def name_of(self, rank: Rank, operation: str, store: str) -> str:
        return "a write"


class ResultIsNotCompared(Protocol):
    """W2 writes what each rank has computed."""

    def name_of(self, rank: Rank, operation: str, store: str) -> str:
        return super().name_of(rank, operation.partition(" ")[0], store)


class OperandIsNotCompared(Protocol):
    """R4 takes plain operands for equal."""

    def operands_alike(self, digests: Sequence[int]) -> bool:
        return True


class WordBeforeRows(Protocol):
    """A version is published before its rows are written."""

    def write_section(
        self, rank: Rank, store: str, operation: str, row: int | None, operands: Sequence[str] = ()
    ) -> Code:
        self.advance_stamp(rank, store, operation, operands)
        yield Store(self.stamp(rank.number, store), rank.stamps[store])
        yield Store(self.published(rank.number, store), rank.versions[store] + 1)
        yield from self.write_row(rank, store, row)
        yield from self.publish(rank, [store])


class PublishedByTheNextMeeting(Protocol):
    """A write is published later than it returns."""

    def publish(self, rank: Rank, stores: Sequence[str]) -> Code:
        for store in stores:
            rank.versions = rank.versions.put(store, rank.versions[store] + 1)
            yield Store(self.stamp(rank.number, store), rank.stamps[store])

    def meet(self, rank: Rank, what: str, operands: Sequence[str] = (), payload: Hashable = None) -> Code:
        for store, version in rank.versions.items():
            yield Store(self.published(rank.number, store), version)
        return (yield from super().meet(rank, what, operands, payload))


# Stamps ----


class WordBeforeStamp(Protocol):
    """A version is published before its stamp is stored."""

    def publish(self, rank: Rank, stores: Sequence[str]) -> Code:
        for store in stores:
            yield Store(self.published(rank.number, store), rank.versions[store] + 1)
        yield from super().publish(rank, stores)


class NumbersNotInStamp(Protocol):
    """A stamp has the operation's name only."""

    def stamp_of_result(self, operation: str, stamps: Sequence[int]) -> int:
        return super().stamp_of_result(operation.partition("(")[0], stamps)


class ComparedAfterShown(Protocol):
    """Stamps are compared in the next meeting, and not before a version is used."""

    def compare_shown(self, store: str, stamps: Sequence[int]) -> None:
        pass


class ComparedByOwnersOnly(Protocol):
    """Ranks without rows have no say."""

    def stamps_differ(self, store: str, stamps: Sequence[int]) -> str:
        return super().stamps_differ(store, stamps[: self.owners])


class PartlyWrittenIsForgotten(Protocol):
    """A result of rows that were written in part gets a stamp like any other."""

    def stamp_of_result(self, operation: str, stamps: Sequence[int]) -> int:
        return stamp_of(operation, *stamps)


# Gradients ----


class MemoryReusedAtOnce(Protocol):
    """A new gradient takes the memory of the last one, whoever holds that."""

    def is_free(self, rank: Rank, store: str) -> Code:
        yield from ()
        return True


class MemoryReusedByOwnReferences(Protocol):
    """An owner asks only whether its own process holds the store."""

    def is_free(self, rank: Rank, store: str) -> Code:
        yield from ()
        return not rank.holds(store)


class RoundAwaitedForever(Protocol):
    """A rank waits for the round of one that has gone on without."""

    def await_rounds(self, rank: Rank, number: int) -> Code:
        silent = _SilentRounds(self.ranks, self.owners)
        return (yield from silent.await_rounds(rank, number))


class _SilentRounds(Protocol):
    def mail(self, rank: int, number: int) -> Location:
        return ("nothing",)


class RoundsCountedByRank(Protocol):
    """Rounds are numbered by each rank's own count of backwards, abandoned ones included."""

    def await_rounds(self, rank: Rank, number: int) -> Code:
        own = rank.stamps.get("backwards", 0) + 1
        rank.stamps = rank.stamps.put("backwards", own)
        (shown,) = yield Load((self.produced(rank.number),))
        yield Store(self.produced(rank.number), (own, shown[1]))
        silent = _SilentRounds(self.ranks, self.owners)
        return (yield from silent.await_rounds(rank, own))


# Failures ----


class FailureIsNotTold(Protocol):
    """A rank that raises goes on; the others wait for it."""

    def tell(self, rank: Rank, text: str) -> Code:
        yield from ()
        raise Refused(text)


class NumberStandsStill(Protocol):
    """A rank that refuses a meeting does not count it."""

    def tell(self, rank: Rank, text: str) -> Code:
        try:
            yield from super().tell(rank, text)
        finally:
            rank.met -= 1


class LeavesWithoutDecision(Protocol):
    """A rank that gives up says so in a word of its own, which others may not see in time."""

    def decide(self, number: int, refusal: str) -> Code:
        if refusal:
            yield Store(self.decision(number), (number, refusal))
            raise Refused(refusal)
        (decided,) = yield Load((self.decision(number),))
        if decided is not None and decided[0] == number:
            raise Refused(decided[1])


class OneMail(Protocol):
    """A rank has one place for its mails, and overwrites one that others still read."""

    def mail(self, rank: int, number: int) -> Location:
        return "mail", rank


class HastyRefusals(Protocol):
    """A rank refuses one meeting after another while a slow one has not seen the first."""

    def take_number(self, rank: Rank) -> Code:
        yield from ()
        rank.met += 1
        return rank.met


class BatchAbandonedInSilence(Protocol):
    """A step that raises on one rank leaves its versions as they were."""

    def abandon_batch(self, rank: Rank) -> Code:
        yield from ()
        rank.batch = type(rank.batch)()


class PartIsNotMarked(Protocol):
    """What an abandoned step has written is published like a whole step."""

    def stamp_of_part(self, rank: Rank, store: str) -> int:
        return rank.stamps[store]


@dataclass(frozen=True)
class Case:
    """A fault, a program, and the claim that it breaks. With `recovery`, ranks go separate ways."""

    protocol: Protocol
    kind: str
    program: Sequence[Operation]
    recovery: Sequence[Operation] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def machine(self, protocol: Protocol) -> Machine:
        explorer = Explorer(protocol)
        if self.recovery:
            return explorer.recovery_machine(self.program, self.recovery, **self.options)
        return explorer.machine(self.program)

    def __str__(self) -> str:
        return type(self.protocol).__name__


RESYNC_AND_USE = (Resync(), Use(), *RECOVERY[1:])
BACKWARD_AGAIN = (Resync(), Fill(), ZeroGrad(), Backward(), Read("grad"))
KEPT_BY_0 = (Keep(only_rank_0=True), ZeroGrad(), Backward(), Read("kept", only_rank_0=True))

CASES = [
    Case(RecipeOfAnotherVersion(2), "value", [Scale(), Multiply(), Read("temporary")]),
    Case(RecipeOfWrittenTemporary(2), "value", [Scale(), AddToTemporary(), Read("temporary")]),
    Case(NoRecipe(2), "deadlock", [PrintSquare()]),
    Case(PullInBatch(2), "torn", [Adafactor()]),
    Case(WriteGoesOnBehindRead(2), "torn", [Adafactor()]),
    Case(MappedIsNotCopied(2), "torn", [MapValue(), Multiply(), Look()]),
    Case(MappedIsNotCopiedBeforeRound(2), "torn", [MapValue("grad"), Backward(), Look()]),
    Case(NoWaitForReaders(2), "torn", [Use(), Multiply()]),
    Case(NoWaitForReadersOfGradients(2), "torn", [AbsMax()]),
    Case(NoWaitForReadersOfStates(2), "torn", [Read("m", only_rank_0=True), Multiply("m")]),
    Case(ReadersOfEachStore(2), "deadlock", [ZeroOnRank0(), Multiply("m")], RESYNC_AND_USE),
    Case(WriteIsNotTold(2), "refused", [ZeroOnRank0(), Multiply()], RESYNC_AND_USE),
    Case(ResultIsNotCompared(2), "accepted", [Cumsum(own=True)]),
    Case(OperandIsNotCompared(2), "accepted", [AddVector(own=True)]),
    Case(WordBeforeRows(2), "torn", [Multiply(), Use()]),
    Case(PublishedByTheNextMeeting(2), "deadlock", [Multiply(), Read("p", only_rank_0=True)]),
    Case(WordBeforeStamp(2), "refused", [Multiply(), Use()]),
    Case(NumbersNotInStamp(2), "accepted", [Adamw(own=True), Use()]),
    Case(ComparedAfterShown(2), "accepted", [Adamw(own=True), Use()]),
    Case(ComparedByOwnersOnly(3, owners=2), "accepted", [Adamw(own=True), Use()]),
    Case(PartlyWrittenIsForgotten(2), "accepted", [Adafactor(own=True), Scale(), Fill(), Read("temporary")]),
    Case(MemoryReusedAtOnce(2), "torn", [Keep(), ZeroGrad(), Backward(), Read("kept")]),
    Case(MemoryReusedByOwnReferences(2), "torn", KEPT_BY_0),
    Case(RoundAwaitedForever(2), "deadlock", [Backward()], RECOVERY, {"signals": 1}),
    Case(RoundsCountedByRank(2), "deadlock", [Backward()], BACKWARD_AGAIN, {"signals": 1}),
    Case(FailureIsNotTold(2), "deadlock", [Cumsum(fails=True)]),
    Case(NumberStandsStill(2), "deadlock", [Cumsum(fails=True), Multiply()]),
    Case(LeavesWithoutDecision(2), "refused", [Multiply()], RECOVERY, {"signals": 1}),
    Case(OneMail(2), "refused", [AddVector(), Multiply()]),
    Case(HastyRefusals(2), "texts", [Multiply()], RECOVERY, {"signals": 3}),
    Case(BatchAbandonedInSilence(2), "deadlock", [Adamw(fails=True), Use()], RECOVERY),
    Case(PartIsNotMarked(2), "accepted", [Adafactor(fails="late"), Use()]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_planted_fault_is_found(case: Case) -> None:
    violations = case.machine(case.protocol).find_violations()
    print(*violations.values(), sep="\n")
    assert case.kind in violations


@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_program_is_right_without_the_fault(case: Case) -> None:
    case.machine(Protocol(case.protocol.ranks, case.protocol.owners)).explore()
