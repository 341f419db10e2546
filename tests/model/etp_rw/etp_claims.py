"""What must hold of a program in every order, and the explorations of programs that check it.

Three kinds of programs: those that one process could run, which must give its values; those in which a rank brings
something of its own to an operation that all ranks make, which must be refused there, on all ranks alike, while the
rest goes on; and those that go separate ways (an operation of rank 0 only, a signal in a wait), after which the ranks
meet again and must find the group able to work and everything whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from etp_operations import REFUSED, Fill, Multiply, Operation, Resync, Statement, Use, begin, expect
from etp_protocol import Protocol, Rank, Unusable
from rank_machine import Cache, Machine, Memory, Refused, Violation

# How a program goes on after its ranks went separate ways: the weight can be overwritten and is whole again.
RECOVERY: tuple[Operation, ...] = (Resync(), Fill(), Multiply(), Use())


@dataclasses.dataclass(frozen=True)
class Claims:
    """Compares what operations observe with `expected`: a row for each position; None: not compared."""

    program: Sequence[Operation]
    expected: Sequence[list[Hashable] | None]
    abandons: int | None = None  # the position where ranks meet again
    must_refuse: bool = False

    def after(self, rank: int, position: int, state: Any, ended: Exception | None) -> tuple[int, Any]:
        assert isinstance(state, Rank)
        row = self.expected[position]
        wanted = None if row is None else row[rank]
        where = f"{self.program[position]} of rank {rank}"
        cleared = dataclasses.replace(state, observed=())
        abandoned = self.abandons is not None and position < self.abandons
        if isinstance(ended, Refused):
            if not (abandoned and isinstance(ended, Unusable)):
                cleared.refusals = (*state.refusals, (None if abandoned else position, str(ended)))
            if not abandoned and wanted != REFUSED:
                raise Violation("refused", f"{where}: {ended}")
        elif wanted == REFUSED:
            raise Violation("accepted", f"{where} must be refused")
        elif ended is None and wanted is not None and wanted != state.observed:
            raise Violation("value", f"{where}: {state.observed}, must be {wanted}")
        if ended is not None and self.abandons is not None:
            return max(position, self.abandons), cleared
        return position + 1, cleared

    def at_end(self, states: Sequence[Any]) -> None:
        """Compare refusals: of each position where the program says, else all of them in their order."""
        if self.abandons is None:
            texts: dict[Hashable, str] = {}
            for position, text in (refusal for state in states for refusal in state.refusals):
                if texts.setdefault(position, text) != text:
                    raise Violation("texts", f"{self.program[position]}: {texts[position]!r} and {text!r}")
            return
        told = {tuple(text for _, text in state.refusals) for state in states}
        if len(told) > 1:
            raise Violation("texts", f"ranks were refused with {told}")
        if self.must_refuse and told == {()}:
            raise Violation("accepted", "a program that goes separate ways")


@dataclasses.dataclass
class Explorer:
    """Explores programs of one protocol; what ranks do in equal states is computed once for all of them."""

    protocol: Protocol
    programs: int = 0
    states: int = 0
    _cache: Cache = dataclasses.field(default_factory=dict)

    def check(self, program: Sequence[Operation], seed: int | None = None) -> None:
        """Check that every order, or one drawn from `seed`, gives what one process gives. Throws NotMeaningful."""
        machine = self.machine(program)
        self.programs += 1
        self.states += machine.explore() if seed is None else machine.walk(seed)

    def check_recovery(
        self, program: Sequence[Operation], recovery: Sequence[Operation] = RECOVERY, **options: Any
    ) -> None:
        """Check that ranks that go separate ways in `program` are refused with the same texts and go on."""
        self.programs += 1
        self.states += self.recovery_machine(program, recovery, **options).explore()

    def machine(self, program: Sequence[Operation]) -> Machine:
        ranks, memory, plain = begin(self.protocol)
        return self._machine(ranks, memory, Claims(program, expect(plain, program)))

    def recovery_machine(
        self,
        program: Sequence[Operation],
        recovery: Sequence[Operation] = RECOVERY,
        *,
        must_refuse: bool = False,
        **options: Any,
    ) -> Machine:
        """Return the machine for `program`, at whose end, or when a rank abandons it, `recovery` follows.

        That observes what it would after a program that does nothing. `options` are the machine's.
        """
        ranks, memory, plain = begin(self.protocol)
        expected: list[list[Hashable] | None] = [None] * len(program)
        if options.get("signals"):  # then all ranks run the program, as far as they come
            expected = [*expect(plain, program)]
        expected += expect(plain, recovery)
        claims = Claims([*program, *recovery], expected, len(program), must_refuse)
        return self._machine(ranks, memory, claims, **options)

    def _machine(self, ranks: list[Rank], memory: Memory, claims: Claims, **options: Any) -> Machine:
        if len(self._cache) > 200_000:
            self._cache.clear()
        programs = [[Statement(operation, self.protocol) for operation in claims.program]] * self.protocol.ranks
        return Machine(programs, ranks, memory, claims, abandons=claims.abandons, cache=self._cache, **options)
