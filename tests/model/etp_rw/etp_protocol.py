"""The protocol of reads and writes between the ranks of a group: docs/design/etp-reads-and-writes.md.

Two mechanisms carry everything. A *meeting* is what all ranks do in one order: a numbered call, or the wait for readers
of a write. Each rank writes a mail with the number and what it is about to do; a rank that has all mails compares them.
What comes of a meeting is decided once, in a word that the first rank sets by compare-and-set: a rank that gives up
(a signal, a deadline) proposes a refusal, one that has all mails proposes what the comparison gives, and everybody does
what is decided. A *pull* asks nobody: it waits until the owners have published the version that is wanted, compares the
stamps, and copies rows. Owners may write a version's rows only after a meeting to which every rank comes when it has
ended its pulls, so a rank's mail is its readers-done word.

A fault is a subclass that overrides one method. Hence some methods are small.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from rank_machine import Await, Code, Load, Location, Propose, Refused, Store, Values, Violation, WaitEnded

PARTLY_WRITTEN = -1  # the stamp of what an abandoned batch leaves
MODULUS = 9973  # of all numbers: programs of twenty operations stay small


def stamp_of(*parts: Hashable) -> int:
    """Return a hash that is equal in all processes."""
    return zlib.crc32(repr(parts).encode())


class Unusable(Refused):
    """A store is refused for what lies beside it: no rank is asked, and none is told."""


V = TypeVar("V", bound=Hashable)


class Table(dict[str, V]):
    """A dict that is never changed in place, and so can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def put(self, key: str, value: V) -> Table[V]:
        return Table({**self, key: value})

    def without(self, keys: Iterable[str]) -> Table[V]:
        return Table({key: value for key, value in self.items() if key not in set(keys)})


class Cell(NamedTuple):
    """An owner's row. Everything except `number` is the model's own: it tells a torn read from a whole one."""

    store: str
    content: tuple[int, int]  # the version, and the write within a batch, that made it
    number: int


class Mail(NamedTuple):
    """What a rank brings to a meeting."""

    number: int
    what: str  # operation, tensor, count: equal on all ranks
    stamps: tuple[tuple[str, int], ...] = ()  # of the operands: equal on all ranks
    payload: Hashable = None  # a rank's own
    refusal: str = ""  # the rank comes to refuse whatever meeting this is


@dataclass(frozen=True)
class Temporary:
    """A result of R1, in no shared memory: `factor` times a store, and what has been added since."""

    store: str
    version: int
    factor: int
    row: int | None
    stamp: int
    written: bool = False


@dataclass(frozen=True)
class Mapped:
    """A value of state_dict(): the owners' memory, until copied."""

    store: str
    content: tuple[int, int]
    copy: tuple[int, ...] | None = None


@dataclass(unsafe_hash=True)
class Rank:
    """What a rank knows by itself. Fields hold values that do not change; a copy of it is a snapshot."""

    number: int
    met: int = 0  # number of the last meeting
    hasty: bool = False  # that meeting was refused before all ranks had come
    interrupted: str = ""  # why this operation must end, though its last meeting could not be refused
    versions: Table[int] = field(default_factory=Table)
    places: Table[tuple[str, ...]] = field(default_factory=Table)  # of each store: its owners' blocks
    stamps: Table[int] = field(default_factory=Table)
    rows: Table[int] = field(default_factory=Table)  # this rank's
    contents: Table[tuple[int, int]] = field(
        default_factory=Table
    )  # the content that each store's rows have at this point
    batch: Table[int] = field(default_factory=Table)  # of each store of the batch under way: how often it was written
    broken: Table[str] = field(default_factory=Table)  # why a store is refused until it is overwritten
    grad: str | None = None
    kept: str | None = None  # the store of another reference to a gradient
    temporary: Temporary | None = None
    mapped: Mapped | None = None
    generation: int = 0  # of gradients
    blocks: tuple[str, ...] = ()  # of this rank's memory for gradients: the store that each had last
    observed: tuple[Hashable, ...] = ()
    refusals: tuple[tuple[int | None, str], ...] = ()  # positions in the program, and texts

    def holds(self, store: str) -> bool:
        """Return whether anything that the program can reach reads a gradient's store."""
        temporary = self.temporary is not None and self.temporary.store == store
        mapped = self.mapped is not None and self.mapped.copy is None and self.mapped.store == store
        return store in (self.grad, self.kept) or temporary or mapped


class Protocol:
    """The accesses of each rank. `owners`: how many ranks have rows, the first ones."""

    def __init__(self, ranks: int, owners: int | None = None) -> None:
        self.ranks = ranks
        self.owners = ranks if owners is None else owners

    # Words ----

    def mail(self, rank: int, number: int) -> Location:
        """Return one of two places: a rank may write the next mail while others still read the last one."""
        return "mail", rank, number % 2

    def decision(self, number: int) -> Location:
        return "decision", number % 2

    def published(self, rank: int, store: str) -> Location:
        return "published", rank, store

    def stamp(self, rank: int, store: str) -> Location:
        return "stamp", rank, store

    def row(self, owner: int, block: str) -> Location:
        return "row", owner, block

    def produced(self, rank: int) -> Location:
        return "produced", rank

    def released(self, rank: int, store: str) -> Location:
        return "released", rank, store

    # Meetings ----

    def meet(self, rank: Rank, what: str, operands: Sequence[str] = (), payload: Hashable = None) -> Code:
        """Return all ranks' payloads. Throws Refused on all ranks or on none."""
        if rank.interrupted:
            yield from self.tell(rank, f"rank {rank.number} has left {what}: {rank.interrupted}")
        number = yield from self.take_number(rank)
        stamps = tuple((store, self.stamp_now(rank, store)) for store in operands)
        yield Store(self.mail(rank.number, number), Mail(number, what, stamps, payload))
        mails = yield from self.await_mails(rank, number, what)
        return [mail.payload for mail in mails]

    def await_mails(self, rank: Rank, number: int, what: str) -> Code:
        places = tuple(self.mail(q, number) for q in range(self.ranks))

        def ready(values: Values) -> bool:
            return self.all_have_come(values[:-1], number, what) or (values[-1] is not None and values[-1][0] == number)

        try:
            values = yield Await((*places, self.decision(number)), ready)
        except WaitEnded as reason:
            return (yield from self.leave(rank, number, what, str(reason), places))
        mails = values[:-1]
        rank.hasty = not self.all_have_come(mails, number, what)
        yield from self.decide(number, "" if rank.hasty else self.difference(mails))
        return mails

    def all_have_come(self, mails: Values, number: int, what: str) -> bool:
        """Return whether all ranks are in the meeting of this number, whatever they take it for."""
        return all(mail is not None and mail.number >= number for mail in mails)

    def leave(self, rank: Rank, number: int, what: str, reason: str, places: tuple[Location, ...]) -> Code:
        """Refuse the meeting that this rank waits in. If the others have had it, this rank has, too, and ends next."""
        mails = yield Load(places)
        missing = [q for q, mail in enumerate(mails) if mail is None or mail.number < number]
        rank.hasty = bool(missing)
        yield from self.decide(number, f"rank {rank.number} has left {what}, without ranks {missing}: {reason}")
        rank.interrupted = reason
        rank.hasty = False
        return (yield Load(places))

    def tell(self, rank: Rank, text: str) -> Code:
        """Refuse the next meeting, whatever the others take it for, without waiting for them."""
        number = yield from self.take_number(rank)
        yield Store(self.mail(rank.number, number), Mail(number, "", refusal=text))
        rank.hasty = True
        yield from self.decide(number, text)
        raise AssertionError("a meeting has been had without this rank")

    def take_number(self, rank: Rank) -> Code:
        """Return the number of the next meeting. After a refusal some ranks may not have come to the last one."""
        if rank.hasty:
            last = rank.met
            places = tuple(self.mail(q, last) for q in range(self.ranks))
            yield Await(places, lambda mails: all(mail is not None and mail.number >= last for mail in mails))
            rank.hasty = False
        rank.met += 1
        return rank.met

    def decide(self, number: int, refusal: str) -> Code:
        """Throw the refusal of a meeting, this rank's or another's, unless it has been had."""
        _, text = yield Propose(self.decision(number), number, refusal)
        if text:
            raise Refused(text)

    def difference(self, mails: Sequence[Mail]) -> str:
        """Return in which way ranks have come to different meetings; a function of the mails only."""
        for mail in mails:
            if mail.refusal:
                return mail.refusal
        for q, mail in enumerate(mails):
            if mail.what != mails[0].what:
                return f"rank 0 is in {mails[0].what}, rank {q} in {mail.what}"
        for operand, (store, _) in enumerate(mails[0].stamps):
            if text := self.stamps_differ(store, [mail.stamps[operand][1] for mail in mails]):
                return text
        return ""

    # Reads ----

    def pull(self, rank: Rank, store: str) -> Code:
        """Return the whole of a store's present version."""
        yield from self.await_version(rank, store)
        return (yield from self.load_rows(rank, store, rank.contents[store]))

    def await_version(self, rank: Rank, store: str) -> Code:
        self.check_usable(rank, [store])
        version = rank.versions[store]
        words = [self.published(q, store) for q in range(self.ranks)]
        stamps = [self.stamp(q, store) for q in range(self.ranks)]
        values = yield Await(
            (*words, *stamps), lambda values: all(v is not None and v >= version for v in values[: self.ranks])
        )
        self.compare_shown(store, values[self.ranks :])

    def compare_shown(self, store: str, stamps: Sequence[int]) -> None:
        """Compare the stamps that lie beside a version, before any use of it."""
        if text := self.stamps_differ(store, stamps):
            raise Unusable(text)

    def load_rows(self, rank: Rank, store: str, content: tuple[int, int]) -> Code:
        numbers: list[int] = []
        for owner in range(self.owners):
            if owner == rank.number:
                numbers.append(rank.rows[store])
                continue
            (cell,) = yield Load((self.row(owner, rank.places[store][owner]),))
            if cell is None or (cell.store, cell.content) != (store, content):
                raise Violation("torn", f"rank {rank.number} wants {store} as of {content}, reads {cell}")
            numbers.append(cell.number)
        return tuple(numbers)

    def stamps_differ(self, store: str, stamps: Sequence[int]) -> str:
        if PARTLY_WRITTEN in stamps:
            return f"{store} was written in part by a step that was abandoned"
        for q, stamp in enumerate(stamps):
            if stamp != stamps[0]:
                return f"{store} is not the same on ranks 0 and {q}"
        return ""

    def check_usable(self, rank: Rank, stores: Iterable[str]) -> None:
        for store in stores:
            if store in rank.broken:
                raise Unusable(rank.broken[store])

    def read_in_batch(self, rank: Rank, store: str) -> Code:
        """Return the whole of what a batch has made so far of a store."""
        yield from self.meet(rank, f"read {store} in a batch", [store])
        whole = yield from self.load_rows(rank, store, rank.contents[store])
        yield from self.end_read_in_batch(rank, store)
        return whole

    def end_read_in_batch(self, rank: Rank, store: str) -> Code:
        """Wait until all have copied: the owners go on to write."""
        yield from self.meet(rank, f"have read {store} in a batch")

    def gather(self, rank: Rank, temporary: Temporary) -> Code:
        """Return the whole of a temporary: by its recipe from all that it was made of, or out of the ranks' mails."""
        if self.recipe_stands(rank, temporary):
            whole = yield from self.pull(rank, temporary.store)
            return tuple(number * temporary.factor % MODULUS for number in whole)
        rows = yield from self.meet(rank, "gather a temporary", ["temporary"], temporary.row)
        return tuple(rows[: self.owners])

    def recipe_stands(self, rank: Rank, temporary: Temporary) -> bool:
        return not temporary.written and rank.versions[temporary.store] == temporary.version

    def map_value(self, rank: Rank, store: str) -> Code:
        yield from self.await_version(rank, store)
        rank.mapped = Mapped(store, rank.contents[store])

    def look(self, rank: Rank, mapped: Mapped) -> Code:
        if mapped.copy is not None:
            return mapped.copy
        return (yield from self.load_rows(rank, mapped.store, mapped.content))

    # Writes ----

    def write(
        self, rank: Rank, store: str, operation: str, row: int | None, operands: Sequence[str] = (), whole: bool = False
    ) -> Code:
        """Write this rank's row outside of a batch. `operation` has every argument that is no tensor.

        `whole`: the tensor is overwritten, whatever it was.
        """
        operands = list(operands) if whole else [store, *operands]
        self.check_usable(rank, [operand for operand in operands if operand != "temporary"])
        yield from self.wait_for_readers(rank, self.name_of(rank, operation, store), [store], operands)
        yield from self.write_section(rank, store, operation, row, operands)

    def write_section(
        self, rank: Rank, store: str, operation: str, row: int | None, operands: Sequence[str] = ()
    ) -> Code:
        """Write and publish, after a meeting that was a wait for readers."""
        self.advance_stamp(rank, store, operation, operands)
        yield from self.write_row(rank, store, row)
        yield from self.publish(rank, [store])

    def name_of(self, rank: Rank, operation: str, store: str) -> str:
        """Return what is told of a write: operation, tensor, count."""
        return f"{operation} of {store}, write {rank.versions[store] + 1}"

    def wait_for_readers(self, rank: Rank, what: str, stores: Sequence[str], operands: Sequence[str] = ()) -> Code:
        yield from self.detach(rank, stores)
        yield from self.meet(rank, what, operands)

    def detach(self, rank: Rank, stores: Sequence[str]) -> Code:
        """Copy what is mapped of stores that others are about to write."""
        mapped = rank.mapped
        if mapped is not None and mapped.copy is None and mapped.store in stores:
            rank.mapped = Mapped(mapped.store, mapped.content, (yield from self.look(rank, mapped)))

    def operands_alike(self, digests: Sequence[int]) -> bool:
        """Return whether ranks have brought equal plain operands; a function of what all have told all."""
        return len(set(digests)) == 1

    def stamp_now(self, rank: Rank, store: str) -> int:
        if store == "temporary":
            return rank.temporary.stamp if rank.temporary else 0
        return rank.stamps[store]

    def advance_stamp(self, rank: Rank, store: str, operation: str, operands: Sequence[str]) -> None:
        stamps = [self.stamp_now(rank, operand) for operand in operands]
        rank.stamps = rank.stamps.put(store, self.stamp_of_result(operation, stamps))

    def stamp_of_result(self, operation: str, stamps: Sequence[int]) -> int:
        """Return the stamp of a result. What comes of rows that were written in part is no better than they are."""
        return PARTLY_WRITTEN if PARTLY_WRITTEN in stamps else stamp_of(operation, *stamps)

    def write_row(self, rank: Rank, store: str, row: int | None) -> Code:
        write = rank.batch.get(store, 0) + 1
        if store in rank.batch:
            rank.batch = rank.batch.put(store, write)
        content = (rank.versions[store] + 1, write)
        rank.contents = rank.contents.put(store, content)
        if rank.number < self.owners:
            assert row is not None
            rank.rows = rank.rows.put(store, row)
            place = self.row(rank.number, rank.places[store][rank.number])
            yield Store(place, Cell(store, content, row))

    def publish(self, rank: Rank, stores: Sequence[str]) -> Code:
        for store in stores:
            rank.versions = rank.versions.put(store, rank.versions[store] + 1)
            yield Store(self.stamp(rank.number, store), rank.stamps[store])
            yield Store(self.published(rank.number, store), rank.versions[store])
        rank.broken = rank.broken.without(stores)

    # Batches ----

    def begin_batch(self, rank: Rank, what: str, stores: Sequence[str], operands: Sequence[str]) -> Code:
        self.check_usable(rank, [*stores, *operands])
        yield from self.wait_for_readers(rank, what, stores, [*stores, *operands])
        rank.batch = Table(dict.fromkeys(stores, 0))

    def write_in_batch(self, rank: Rank, store: str, operation: str, row: int | None, operands: Sequence[str]) -> Code:
        self.advance_stamp(rank, store, operation, [store, *operands])
        yield from self.write_row(rank, store, row)

    def end_batch(self, rank: Rank) -> Code:
        stores = sorted(rank.batch)
        rank.batch = Table()
        yield from self.publish(rank, stores)

    def abandon_batch(self, rank: Rank) -> Code:
        """End a batch that cannot go on, on this rank: others may have ended it, or be about to.

        So this rank publishes, too. What it has written has a stamp that refuses every use; what it has not written has
        the stamp of before, which is that of all ranks only if none of them has written.
        """
        for store, writes in rank.batch.items():
            if writes > 0:
                rank.stamps = rank.stamps.put(store, self.stamp_of_part(rank, store))
        yield from self.end_batch(rank)

    def stamp_of_part(self, rank: Rank, store: str) -> int:
        return PARTLY_WRITTEN

    # Gradients ----

    def backward(self, rank: Rank, contribution: Sequence[int]) -> Code:
        """Add this rank's gradient of every row to the owners' rows."""
        accumulated = rank.grad
        store = accumulated or f"g{rank.generation + 1}"
        if accumulated:
            self.check_usable(rank, [accumulated])
            yield from self.detach_before_round(rank, accumulated)
        number = rank.met + 1  # the wait for gradients', so that ranks agree on it, whatever was abandoned before
        yield Store(self.produced(rank.number), (number, tuple(contribution)))
        try:
            yield from self.reduce(rank, store, number)
        except (Refused, WaitEnded):
            if accumulated:
                rank.broken = rank.broken.put(accumulated, f"{accumulated}: a backward was abandoned")
            else:
                self.forget(rank, [store])
                rank.blocks = tuple("" if last == store else last for last in rank.blocks)
            raise
        if not accumulated:
            rank.generation += 1
            rank.grad = store

    def detach_before_round(self, rank: Rank, store: str) -> Code:
        """Copy what is mapped: owners add to their rows once all ranks have shown their rounds."""
        yield from self.detach(rank, [store])

    def reduce(self, rank: Rank, store: str, number: int) -> Code:
        rounds = yield from self.await_rounds(rank, number)
        total = None
        if rank.number < self.owners:
            total = sum(contribution[rank.number] for _, contribution in rounds) % MODULUS
        fresh = store not in rank.versions
        block = None
        if fresh:
            block = yield from self.choose_block(rank, store)
            rank.versions = rank.versions.put(store, 0)
            rank.stamps = rank.stamps.put(store, 0)
            rank.places = rank.places.put(store, (block,) * self.ranks)
        elif total is not None:
            total = (rank.rows[store] + total) % MODULUS
        self.advance_stamp(rank, store, f"round {number}", [store])
        yield from self.write_row(rank, store, total)
        blocks = yield from self.meet(rank, f"wait for gradients of {store}", [], block)
        if fresh:
            rank.places = rank.places.put(store, tuple(blocks))
        yield from self.publish(rank, [store])

    def await_rounds(self, rank: Rank, number: int) -> Code:
        """Return all ranks' rounds. A rank that has come to the next meeting without one will not show it."""
        rounds = tuple(self.produced(q) for q in range(self.ranks))
        mails = tuple(self.mail(q, number) for q in range(self.ranks))

        def shown(values: Values) -> list[bool]:
            return [value is not None and value[0] >= number for value in values[: self.ranks]]

        def left(values: Values) -> list[int]:
            arrived = [mail is not None and mail.number >= number for mail in values[self.ranks :]]
            return [q for q in range(self.ranks) if arrived[q] and not shown(values)[q]]

        values = yield Await((*rounds, *mails), lambda values: all(shown(values)) or bool(left(values)))
        if not all(shown(values)):
            yield from self.tell(rank, f"rank {left(values)[0]} has no round for a backward of rank {rank.number}")
        return values[: self.ranks]

    def choose_block(self, rank: Rank, store: str) -> Code:
        """Return memory for an owner's row of a new gradient, told to all in the wait for gradients.

        A block is free once every rank has released the store that it had last. All ranks have shown their rounds, so
        a rank that dropped its last reference before this backward has said so.
        """
        if rank.number >= self.owners:
            return None
        for index, last in enumerate(rank.blocks):
            if (yield from self.is_free(rank, last)):
                rank.blocks = (*rank.blocks[:index], store, *rank.blocks[index + 1 :])
                return f"g.{index}"
        rank.blocks = (*rank.blocks, store)
        return f"g.{len(rank.blocks) - 1}"

    def is_free(self, rank: Rank, store: str) -> Code:
        """Return whether memory that had the rows of `store` may have others."""
        if not store:
            return True
        words = yield Load(tuple(self.released(q, store) for q in range(self.ranks)))
        return all(words)

    def release(self, rank: Rank) -> Code:
        """Tell which gradients' stores this rank has dropped its last reference to."""
        dropped = [store for store in rank.versions if store.startswith("g") and not rank.holds(store)]
        for store in dropped:
            yield Store(self.released(rank.number, store), True)
        self.forget(rank, dropped)

    def forget(self, rank: Rank, stores: Sequence[str]) -> None:
        rank.versions = rank.versions.without(stores)
        rank.places = rank.places.without(stores)
        rank.stamps = rank.stamps.without(stores)
        rank.rows = rank.rows.without(stores)
        rank.contents = rank.contents.without(stores)
        rank.broken = rank.broken.without(stores)
