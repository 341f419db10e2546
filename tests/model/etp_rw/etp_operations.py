"""The operations of programs, each twice: what a rank does in the protocol, and what one process does.

A weight `p`, its gradient and an optimiser's state `m` have one number for each owner of rows. `plain()` is the oracle:
it knows whole tensors only, and which operations must be refused because ranks bring values of their own (`own=True`).
It shares no code with the protocol.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from etp_protocol import MODULUS, Cell, Protocol, Rank, Temporary, stamp_of
from rank_machine import Await, Code, Memory, Refused, WaitEnded

Whole: TypeAlias = tuple[int, ...]
REFUSED = "refused"


class NotMeaningful(Exception):
    """The program is none: it reads what is not there."""


@dataclass
class PlainTemporary:
    wholes: list[Whole]  # of each rank's own process
    store: str
    own: bool
    recipe: bool = True


@dataclass
class Plain:
    """What one process has."""

    ranks: int
    stores: dict[str, Whole]
    grad: str | None = "g1"
    kept: str | None = None
    kept_by_all: bool = False
    generation: int = 1
    temporary: PlainTemporary | None = None
    mapped: Whole | None = None
    differ: set[str] = field(default_factory=set)  # stores whose rows are not those of one tensor: every use is refused

    def named(self, target: str) -> str:
        """Return the store of a name that all ranks have."""
        store = self.grad if target == "grad" else self.kept if target == "kept" else target
        if store is None or (target == "kept" and not self.kept_by_all):
            raise NotMeaningful
        return store

    def unusable(self, *stores: str) -> bool:
        return any(store in self.differ for store in stores)

    def write(self, store: str, whole: Whole) -> None:
        self.stores[store] = tuple(number % MODULUS for number in whole)
        if self.temporary is not None and self.temporary.store == store:
            self.temporary.recipe = False

    def all_observe(self, value: Hashable) -> list[Hashable]:
        return [(value,)] * self.ranks

    def rank_0_observes(self, value: Hashable) -> list[Hashable]:
        return [(value,)] + [()] * (self.ranks - 1)

    def nothing(self) -> list[Hashable]:
        return [()] * self.ranks

    def refused(self) -> list[Hashable]:
        return [REFUSED] * self.ranks


@dataclass(frozen=True)
class Operation:
    """The protocol's part and the oracle's."""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        raise NotImplementedError

    def plain(self, plain: Plain) -> list[Hashable]:
        """Change what one process has; return what each rank observes, or REFUSED."""
        return plain.nothing()


def store_of(rank: Rank, target: str) -> str:
    """Return the store that a name of the program stands for."""
    store = rank.grad if target == "grad" else rank.kept if target == "kept" else target
    assert store is not None
    return store


def own_row(rank: Rank, store: str, change: Callable[[int], int]) -> int | None:
    """Return what this rank's row becomes, if it has one: no memory of another rank's is read."""
    row = rank.rows.get(store)
    return None if row is None else change(row) % MODULUS


def own_number(rank: Rank, protocol: Protocol, own: bool) -> int:
    """Return what makes the last rank's number, if it is one of its own, differ from the others'."""
    return int(own and rank.number == protocol.ranks - 1)


# Reads ----


@dataclass(frozen=True)
class Use(Operation):
    """A module's forward."""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        rank.observed = ((yield from protocol.pull(rank, "p")),)

    def plain(self, plain: Plain) -> list[Hashable]:
        return plain.refused() if plain.unusable("p") else plain.all_observe(plain.stores["p"])


@dataclass(frozen=True)
class Read(Operation):
    """`target.norm()`, on all ranks or on rank 0 only."""

    target: str
    only_rank_0: bool = False

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        if self.only_rank_0 and rank.number != 0:
            return
        if self.target == "temporary":
            assert rank.temporary is not None
            rank.observed = ((yield from protocol.gather(rank, rank.temporary)),)
        else:
            rank.observed = ((yield from protocol.pull(rank, store_of(rank, self.target))),)

    def plain(self, plain: Plain) -> list[Hashable]:
        if self.target == "temporary":
            return self._temporary(plain)
        store = plain.kept if self.target == "kept" and self.only_rank_0 else plain.named(self.target)
        if store is None:
            raise NotMeaningful
        if plain.unusable(store):
            return [REFUSED] + [()] * (plain.ranks - 1) if self.only_rank_0 else plain.refused()
        whole = plain.stores[store]
        return plain.rank_0_observes(whole) if self.only_rank_0 else plain.all_observe(whole)

    def _temporary(self, plain: Plain) -> list[Hashable]:
        temporary = plain.temporary
        if temporary is None or (self.only_rank_0 and not temporary.recipe):
            raise NotMeaningful
        if plain.unusable(temporary.store) if temporary.recipe else temporary.own:
            return [REFUSED] + [()] * (plain.ranks - 1) if self.only_rank_0 else plain.refused()
        if self.only_rank_0:
            return plain.rank_0_observes(temporary.wholes[0])
        return [(whole,) for whole in temporary.wholes]


@dataclass(frozen=True)
class PrintSquare(Operation):
    """`if rank == 0: print((p.grad * 2).sum())`"""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        if rank.number == 0:
            temporary = multiply(rank, protocol, store_of(rank, "grad"), 2)
            rank.observed = ((yield from protocol.gather(rank, temporary)),)

    def plain(self, plain: Plain) -> list[Hashable]:
        whole = plain.stores[plain.named("grad")]
        return plain.rank_0_observes(tuple(2 * number % MODULUS for number in whole))


def multiply(rank: Rank, protocol: Protocol, store: str, factor: int) -> Temporary:
    """R1: nobody is asked."""
    protocol.check_usable(rank, [store])
    row = own_row(rank, store, lambda number: number * factor)
    stamp = protocol.stamp_of_result(f"mul({factor})", [rank.stamps[store]])
    return Temporary(store, rank.versions[store], factor, row, stamp)


@dataclass(frozen=True)
class Scale(Operation):
    """R1: `t = target * 3`"""

    target: str = "p"
    own: bool = False

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        rank.temporary = multiply(rank, protocol, store_of(rank, self.target), 3 + own_number(rank, protocol, self.own))
        yield from protocol.release(rank)

    def plain(self, plain: Plain) -> list[Hashable]:
        store = plain.named(self.target)
        factors = [3] * (plain.ranks - 1) + [3 + self.own]
        wholes = [tuple(factor * number % MODULUS for number in plain.stores[store]) for factor in factors]
        plain.temporary = PlainTemporary(wholes, store, self.own or plain.unusable(store))
        return plain.nothing()


@dataclass(frozen=True)
class AddToTemporary(Operation):
    """R3 on what is not kept: `t.add_(1)`"""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        t = rank.temporary
        assert t is not None
        row = None if t.row is None else (t.row + 1) % MODULUS
        stamp = protocol.stamp_of_result("add_(1)", [t.stamp])
        rank.temporary = Temporary(t.store, t.version, t.factor, row, stamp, written=True)
        yield from ()

    def plain(self, plain: Plain) -> list[Hashable]:
        if plain.temporary is None:
            raise NotMeaningful
        plain.temporary.recipe = False
        plain.temporary.wholes = [tuple((n + 1) % MODULUS for n in whole) for whole in plain.temporary.wholes]
        return plain.nothing()


@dataclass(frozen=True)
class MapValue(Operation):
    """`value = model.state_dict()["p"]`, mapped"""

    target: str = "p"

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        yield from protocol.map_value(rank, store_of(rank, self.target))

    def plain(self, plain: Plain) -> list[Hashable]:
        store = plain.named(self.target)
        if plain.unusable(store):
            return plain.refused()
        plain.mapped = plain.stores[store]
        return plain.nothing()


@dataclass(frozen=True)
class Look(Operation):
    """Read the mapped value."""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        assert rank.mapped is not None
        rank.observed = ((yield from protocol.look(rank, rank.mapped)),)

    def plain(self, plain: Plain) -> list[Hashable]:
        if plain.mapped is None:
            raise NotMeaningful
        return plain.all_observe(plain.mapped)


# Writes ----


@dataclass(frozen=True)
class Multiply(Operation):
    """R3: `target.mul_(2)`"""

    target: str = "p"
    own: bool = False

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        store, factor = store_of(rank, self.target), 2 + own_number(rank, protocol, self.own)
        yield from protocol.write(rank, store, f"mul_({factor})", own_row(rank, store, lambda n: n * factor))

    def plain(self, plain: Plain) -> list[Hashable]:
        store = plain.named(self.target)
        if self.own or plain.unusable(store):
            return plain.refused()
        plain.write(store, tuple(2 * number for number in plain.stores[store]))
        return plain.nothing()


@dataclass(frozen=True)
class SubtractTemporary(Operation):
    """R3: `p.sub_(t)`"""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        temporary = rank.temporary
        assert temporary is not None
        row = own_row(rank, "p", lambda n: n - (temporary.row or 0))
        yield from protocol.write(rank, "p", "sub_", row, ["temporary"])

    def plain(self, plain: Plain) -> list[Hashable]:
        temporary = plain.temporary
        if temporary is None:
            raise NotMeaningful
        if temporary.own or plain.unusable("p"):
            return plain.refused()
        plain.write("p", tuple(a - b for a, b in zip(plain.stores["p"], temporary.wholes[0], strict=True)))
        return plain.nothing()


@dataclass(frozen=True)
class Sgd(Operation):
    """By hand: `p -= 2 * p.grad`"""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        grad = store_of(rank, "grad")
        protocol.check_usable(rank, [grad])
        row = own_row(rank, "p", lambda n: n - 2 * rank.rows[grad])
        yield from protocol.write(rank, "p", "sub_(2 * grad)", row, [grad])

    def plain(self, plain: Plain) -> list[Hashable]:
        grad = plain.named("grad")
        if plain.unusable("p", grad):
            return plain.refused()
        plain.write("p", tuple(a - 2 * b for a, b in zip(plain.stores["p"], plain.stores[grad], strict=True)))
        return plain.nothing()


@dataclass(frozen=True)
class AddVector(Operation):
    """R4: `p.add_(x)` with a plain `x`; operands that differ are W2's."""

    own: bool = False

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        vector = [5 + i + own_number(rank, protocol, self.own) for i in range(protocol.owners)]
        yield from write_plain_operand(rank, protocol, "add_", vector, lambda number, i: number + vector[i])

    def plain(self, plain: Plain) -> list[Hashable]:
        if self.own or plain.unusable("p"):
            return plain.refused()
        plain.write("p", tuple(number + 5 + i for i, number in enumerate(plain.stores["p"])))
        return plain.nothing()


@dataclass(frozen=True)
class Clamp(Operation):
    """R4: `p.clamp_(min=x)` with ranks' own `x`, all of them too small to matter: W2 finds equal results."""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        vector = [-1 - rank.number] * protocol.owners
        yield from write_plain_operand(rank, protocol, "clamp_", vector, lambda number, i: max(number, vector[i]))

    def plain(self, plain: Plain) -> list[Hashable]:
        if plain.unusable("p"):
            return plain.refused()
        plain.write("p", plain.stores["p"])
        return plain.nothing()


def write_plain_operand(
    rank: Rank, protocol: Protocol, operation: str, operand: list[int], change: Callable[[int, int], int]
) -> Code:
    """R4 on the weight: one exchange of the operand's digest, which is the wait for readers of an equal one."""
    protocol.check_usable(rank, ["p"])
    yield from protocol.detach(rank, ["p"])
    digest = stamp_of(*operand)
    digests = yield from protocol.meet(rank, protocol.name_of(rank, operation, "p"), ["p"], digest)
    if protocol.operands_alike(digests):
        row = own_row(rank, "p", lambda number: change(number, rank.number))
        yield from protocol.write_section(rank, "p", f"{operation} {digest}", row, ["p"])
        return
    whole = yield from protocol.pull(rank, "p")
    whole = tuple(change(number, i) % MODULUS for i, number in enumerate(whole))
    yield from write_whole(rank, protocol, "p", operation, whole)


def write_whole(rank: Rank, protocol: Protocol, store: str, operation: str, whole: Whole) -> Code:
    """W2's second half: the digest of what the store would be is compared, then each rank keeps its row."""
    row = whole[rank.number] if rank.number < protocol.owners else None
    yield from protocol.write(rank, store, f"{operation} giving {stamp_of(*whole)}", row, [store])


@dataclass(frozen=True)
class AddVectors(Operation):
    """`torch._foreach_add_([p, m], [x, y])`: one exchange for all elements; with `own`, a `y` of a rank's own.

    Equal operands go on rows, then the others one after another by W2: what was written before a refusal stays.
    """

    own: bool = False

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        rows = range(protocol.owners)
        vectors = {
            "p": [5 + i for i in rows],
            "m": [6 + i + own_number(rank, protocol, self.own) for i in rows],
        }
        stores = list(vectors)
        protocol.check_usable(rank, stores)
        yield from protocol.detach(rank, stores)
        own = tuple(stamp_of(*vector) for vector in vectors.values())
        digests = yield from protocol.meet(rank, protocol.name_of(rank, "_foreach_add_", "p"), stores, own)
        others: list[str] = []
        alike = map(protocol.operands_alike, zip(*digests, strict=True))
        for store, digest, equal in zip(stores, own, alike, strict=True):
            if equal:
                has_row = store in rank.rows
                row = (rank.rows[store] + vectors[store][rank.number]) % MODULUS if has_row else None
                yield from protocol.write_section(rank, store, f"add_ {digest}", row, [store])
            else:
                others.append(store)
        for store in others:
            whole = yield from protocol.pull(rank, store)
            whole = tuple((number + x) % MODULUS for number, x in zip(whole, vectors[store], strict=True))
            yield from write_whole(rank, protocol, store, "add_", whole)

    def plain(self, plain: Plain) -> list[Hashable]:
        if plain.unusable("p", "m"):
            return plain.refused()
        plain.write("p", tuple(number + 5 + i for i, number in enumerate(plain.stores["p"])))
        if self.own:
            return plain.refused()
        plain.write("m", tuple(number + 6 + i for i, number in enumerate(plain.stores["m"])))
        return plain.nothing()


@dataclass(frozen=True)
class Cumsum(Operation):
    """W2: `p.cumsum_(0)`; with `fails`, rank 0's raises."""

    own: bool = False
    fails: bool = False

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        whole = yield from protocol.pull(rank, "p")
        if self.fails and rank.number == 0:
            yield from protocol.tell(rank, "rank 0: cumsum_: out of memory")
        sums = tuple((sum(whole[: i + 1]) + own_number(rank, protocol, self.own)) % MODULUS for i in range(len(whole)))
        yield from write_whole(rank, protocol, "p", "cumsum_", sums)

    def plain(self, plain: Plain) -> list[Hashable]:
        if self.own or self.fails or plain.unusable("p"):
            return plain.refused()
        whole = plain.stores["p"]
        plain.write("p", tuple(sum(whole[: i + 1]) for i in range(len(whole))))
        return plain.nothing()


@dataclass(frozen=True)
class Clip(Operation):
    """torch's own clipping: norms are plain, the coefficient is an operand of 0 dims."""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        grad = store_of(rank, "grad")
        coefficient = sum((yield from protocol.pull(rank, grad))) % 7 + 2
        yield from protocol.write(rank, grad, f"mul_({coefficient})", own_row(rank, grad, lambda n: n * coefficient))

    def plain(self, plain: Plain) -> list[Hashable]:
        grad = plain.named("grad")
        whole = plain.stores[grad]
        plain.write(grad, tuple(number * (sum(whole) % 7 + 2) for number in whole))
        return plain.nothing()


@dataclass(frozen=True)
class AbsMax(Operation):
    """`n = p.grad.abs().max(); p.grad.mul_(3)`"""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        grad = store_of(rank, "grad")
        rank.observed = (max((yield from protocol.gather(rank, multiply(rank, protocol, grad, 1)))),)
        yield from protocol.write(rank, grad, "mul_(3)", own_row(rank, grad, lambda n: n * 3))

    def plain(self, plain: Plain) -> list[Hashable]:
        grad = plain.named("grad")
        whole = plain.stores[grad]
        plain.write(grad, tuple(number * 3 for number in whole))
        return plain.all_observe(max(whole))


@dataclass(frozen=True)
class Fill(Operation):
    """`p.fill_(7)`: overwrites the whole, whatever it was."""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        yield from protocol.write(rank, "p", "fill_(7)", own_row(rank, "p", lambda _: 7), whole=True)

    def plain(self, plain: Plain) -> list[Hashable]:
        plain.write("p", (7,) * len(plain.stores["p"]))
        plain.differ.discard("p")
        return plain.nothing()


@dataclass(frozen=True)
class ZeroOnRank0(Operation):
    """`if rank == 0: p.zero_()`"""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        if rank.number == 0:
            yield from protocol.write(rank, "p", "zero_()", own_row(rank, "p", lambda _: 0), whole=True)


# Batches ----


@dataclass(frozen=True)
class Adamw(Operation):
    """An elementwise step; its numbers go into the stamps. With `fails`, rank 0's raises before its first write."""

    own: bool = False
    fails: bool = False

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        grad, rate = store_of(rank, "grad"), 2 + own_number(rank, protocol, self.own)
        yield from protocol.begin_batch(rank, "step of AdamW", ["m", "p"], [grad])
        if self.fails and rank.number == 0:
            yield from fail_in_batch(rank, protocol)
        state = own_row(rank, "m", lambda n: n + rank.rows[grad])
        yield from protocol.write_in_batch(rank, "m", f"step({rate})", state, [grad])
        weight = own_row(rank, "p", lambda n: n - rate * rank.rows["m"])
        yield from protocol.write_in_batch(rank, "p", f"step({rate})", weight, ["m"])
        yield from protocol.end_batch(rank)

    def plain(self, plain: Plain) -> list[Hashable]:
        grad = plain.named("grad")
        if plain.unusable("m", "p", grad):
            return plain.refused()
        plain.write("m", tuple(a + b for a, b in zip(plain.stores["m"], plain.stores[grad], strict=True)))
        plain.write("p", tuple(a - 2 * b for a, b in zip(plain.stores["p"], plain.stores["m"], strict=True)))
        if self.own:
            plain.differ |= {"m", "p"}
        return plain.nothing()


@dataclass(frozen=True)
class Adafactor(Operation):
    """A step that reads the weight's norm, after it has written the weight or, with `reads_first`, before.

    With `fails` "at once" or "late", rank 0's raises before its first access or between the first two.
    """

    own: bool = False
    reads_first: bool = False
    fails: str = ""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        grad, rate = store_of(rank, "grad"), 1 + own_number(rank, protocol, self.own)
        yield from protocol.begin_batch(rank, "step of Adafactor", ["p"], [grad])
        if self.fails == "at once" and rank.number == 0:
            yield from fail_in_batch(rank, protocol)
        try:
            norm = 3
            if self.reads_first:
                norm = sum((yield from protocol.read_in_batch(rank, "p"))) % 5 + 2
            weight = own_row(rank, "p", lambda n: n * norm - rate * rank.rows[grad])
            yield from protocol.write_in_batch(rank, "p", f"step({rate}, {norm})", weight, [grad])
            if self.fails == "late" and rank.number == 0:
                yield from fail_in_batch(rank, protocol)
            norm = sum((yield from protocol.read_in_batch(rank, "p"))) % 5 + 2
            weight = own_row(rank, "p", lambda n: n * norm)
            yield from protocol.write_in_batch(rank, "p", f"mul_({norm})", weight, [])
        except Refused:
            yield from protocol.abandon_batch(rank)
            raise
        yield from protocol.end_batch(rank)

    def plain(self, plain: Plain) -> list[Hashable]:
        grad = plain.named("grad")
        if plain.unusable("p", grad):
            return plain.refused()
        if self.reads_first and self.fails == "at once":  # no rank has written
            plain.write("p", plain.stores["p"])
            return plain.refused()
        norm = sum(plain.stores["p"]) % 5 + 2 if self.reads_first else 3
        whole = tuple((a * norm - b) % MODULUS for a, b in zip(plain.stores["p"], plain.stores[grad], strict=True))
        plain.write("p", tuple(number * (sum(whole) % 5 + 2) for number in whole))
        if self.own or self.fails:
            plain.differ.add("p")
            return plain.refused()
        return plain.nothing()


def fail_in_batch(rank: Rank, protocol: Protocol) -> Code:
    """Raise on this rank only; what ends a step's block tells the others."""
    yield from protocol.abandon_batch(rank)
    yield from protocol.tell(rank, "rank 0 has raised in its step")


# Gradients ----


@dataclass(frozen=True)
class Backward(Operation):
    """A forward and a backward, whose gradient is added up over ranks and to what is accumulated."""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        weight = yield from protocol.pull(rank, "p")
        yield from protocol.backward(rank, gradient_of(weight, rank.number))

    def plain(self, plain: Plain) -> list[Hashable]:
        if plain.unusable("p"):
            return plain.refused()
        gradients = [gradient_of(plain.stores["p"], rank) for rank in range(plain.ranks)]
        if plain.grad is None:
            plain.generation += 1
            plain.grad = f"g{plain.generation}"
            plain.stores[plain.grad] = (0,) * len(plain.stores["p"])
        plain.write(plain.grad, tuple(map(sum, zip(plain.stores[plain.grad], *gradients, strict=True))))
        return plain.nothing()


def gradient_of(weight: Whole, rank: int) -> Whole:
    return tuple(number * (rank + 2) + i for i, number in enumerate(weight))


@dataclass(frozen=True)
class ZeroGrad(Operation):
    """`p.grad = None`"""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        rank.grad = None
        yield from protocol.release(rank)

    def plain(self, plain: Plain) -> list[Hashable]:
        plain.grad = None
        return plain.nothing()


@dataclass(frozen=True)
class Keep(Operation):
    """`kept = p.grad`, on all ranks or on rank 0 only"""

    only_rank_0: bool = False

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        if not self.only_rank_0 or rank.number == 0:
            rank.kept = rank.grad
            yield from protocol.release(rank)

    def plain(self, plain: Plain) -> list[Hashable]:
        if plain.kept is not None:
            raise NotMeaningful
        plain.kept, plain.kept_by_all = plain.named("grad"), not self.only_rank_0
        return plain.nothing()


# After a refusal ----


@dataclass(frozen=True)
class Resync(Operation):
    """A program that has caught a refusal meets the other ranks: again, as long as it is refused."""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        while True:
            try:
                yield from protocol.meet(rank, "resync")
                return
            except Refused as refusal:
                rank.refusals = (*rank.refusals, (None, str(refusal)))
            except WaitEnded:
                pass


@dataclass(frozen=True)
class SleepUntilRefused(Operation):
    """Every rank except 0 is away until a rank has given up waiting for it."""

    def run(self, rank: Rank, protocol: Protocol) -> Code:
        if rank.number != 0:
            number = rank.met + 1
            yield Await((protocol.decision(number),), lambda values: values[0] is not None and values[0][0] == number)


# Programs ----


@dataclass(frozen=True)
class Statement:
    """An operation as a machine's rank runs it."""

    operation: Operation
    protocol: Protocol

    def run(self, snapshot: Hashable) -> tuple[Code, Callable[[], Hashable]]:
        assert isinstance(snapshot, Rank)
        rank = copy.copy(snapshot)
        rank.interrupted = ""
        return self.operation.run(rank, self.protocol), lambda: rank

    def __str__(self) -> str:
        return str(self.operation)


def begin(protocol: Protocol) -> tuple[list[Rank], Memory, Plain]:
    """Return ranks, memory and oracle with a weight, a state, and the gradient of an earlier backward."""
    wholes = {"p": (3, 5, 8), "m": (1, 1, 2), "g1": (2, 7, 4)}
    plain = Plain(protocol.ranks, {store: whole[: protocol.owners] for store, whole in wholes.items()})
    memory: Memory = {}
    ranks = []
    for q in range(protocol.ranks):
        rank = Rank(q, grad="g1", generation=1)
        for store, whole in plain.stores.items():
            block = "g.0" if store == "g1" else store
            rank.versions = rank.versions.put(store, 1)
            rank.stamps = rank.stamps.put(store, 0)
            rank.contents = rank.contents.put(store, (1, 1))
            rank.places = rank.places.put(store, (block,) * protocol.owners)
            memory[protocol.published(q, store)] = 1
            memory[protocol.stamp(q, store)] = 0
            if q < protocol.owners:
                rank.rows = rank.rows.put(store, whole[q])
                rank.blocks = ("g1",)
                memory[protocol.row(q, block)] = Cell(store, (1, 1), whole[q])
        ranks.append(rank)
    return ranks, memory, plain


def expect(plain: Plain, program: Sequence[Operation]) -> list[list[Hashable]]:
    """Return what each operation gives on each rank. Throws NotMeaningful."""
    plain = copy.deepcopy(plain)
    return [operation.plain(plain) for operation in program]
