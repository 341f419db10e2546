"""A machine that runs the ranks of a program in every order.

A rank is a generator: it yields an access to shared memory (an `Access`) and is resumed with what the access returned.
Between two accesses nothing of a rank can be seen by others, so an order of accesses is an order of the program.

Generators cannot be copied, and an exploration needs many continuations of one state. But what a rank does next depends
only on the operation it is in, on its own state at the operation's beginning, and on what its accesses have returned
since. These three are a rank's *frame*: a value that is turned into a generator again by feeding it the recorded
results. So a rank is a finite automaton that is learned on the way, and a state of the machine is the memory and a
frame of each rank, all of them numbers; `explore` visits every state once, however many orders lead to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Location: TypeAlias = tuple[Hashable, ...]
Memory: TypeAlias = dict[Location, Any]
Values: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Returns the values of some locations; None for those that were never stored to."""

    locations: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Returns nothing."""

    location: Location
    value: Hashable


@dataclass(frozen=True, slots=True)
class Await:
    """Loads as soon as `ready` holds of the values. A signal or a deadline ends it by `WaitEnded`."""

    locations: tuple[Location, ...]
    ready: Callable[[Values], bool] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Propose:
    """A compare-and-set: stores `value` unless the location has this number or a later one. Returns what is there."""

    location: Location
    number: int
    value: Hashable


Access: TypeAlias = Load | Store | Await | Propose
Code: TypeAlias = Generator[Access, Any, Any]


class WaitEnded(Exception):
    """Ends a wait without what it waits for."""


class Refused(Exception):
    """Ends an operation of ours by name. The text is the same on all ranks."""


class Violation(AssertionError):
    """A claim does not hold. `kind`: torn, value, deadlock, accepted, refused, texts."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Operation(Protocol):
    """A statement of the program, as one rank runs it."""

    def run(self, snapshot: Hashable) -> tuple[Code, Callable[[], Hashable]]:
        """Return the code from this rank state on, and a function that gives the state it has reached."""


class Check(Protocol):
    """The claims of an exploration."""

    def after(self, rank: int, position: int, state: Any, ended: Exception | None) -> tuple[int, Any]:
        """Check what an operation gave; return the position that follows and the state at its beginning.

        `ended`: the Refused or WaitEnded that it ended by.
        """

    def at_end(self, states: Sequence[Any]) -> None:
        """Check the states of all ranks once none has anything left to do."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a rank is: the operation, its state when it began, and what its accesses have returned since."""

    rank: int
    position: int
    state: Hashable
    results: Values = ()
    signals: int = 0  # that have arrived


@dataclass(frozen=True, slots=True)
class _Ended:
    """An operation's outcome."""

    state: Hashable
    by: Exception | None
    signalled: bool


@dataclass(frozen=True, slots=True)
class _Thrown:
    """Stands among the results of accesses for an exception that ended one."""

    why: str


SIGNAL = _Thrown("a signal's handler has raised")
DEADLINE = _Thrown("its deadline has passed")

Cache: TypeAlias = dict[tuple[int, Operation, Hashable, Values], Access | _Ended]
# Numbers of the ranks' frames, then of the values of all locations.
_State: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class Machine:
    """Runs `programs`, one for each rank, from `states` and `memory`.

    `signals`: how many may arrive in waits, each in any wait of any rank. `deadlines`: whether waits end once no rank
    can go on; else that is a deadlock. `abandons`: the position that an interrupted rank goes on with. `cache` may be
    shared by machines whose operations do the same in the same states.
    """

    def __init__(
        self,
        programs: Sequence[Sequence[Operation]],
        states: Sequence[Hashable],
        memory: Memory,
        check: Check,
        *,
        signals: int = 0,
        deadlines: bool = False,
        abandons: int | None = None,
        cache: Cache | None = None,
    ) -> None:
        self._programs = programs
        self._check = check
        self._signals = signals
        self._deadlines = deadlines
        self._abandons = abandons
        self._cache: Cache = {} if cache is None else cache
        self._memory = memory
        self._states = states
        self._frames = _Numbers()
        self._values = _Numbers()
        self._locations = _Numbers()
        self._successors: dict[tuple[int, Hashable], int] = {}
        self._accesses: dict[int, Access | None] = {}
        self.states = 0  # that were visited

    def explore(self) -> int:
        """Visit every state that some order reaches; return their number. Throws Violation with the order."""
        for violation in self._visit():
            raise violation
        return self.states

    def find_violations(self) -> dict[str, Violation]:
        """Visit every state that some order reaches without a violation; return the first one of each kind."""
        violations: dict[str, Violation] = {}
        for violation in self._visit():
            violations.setdefault(violation.kind, violation)
        return violations

    def _visit(self) -> Iterator[Violation]:
        state = self._begin()
        parents: dict[_State, tuple[_State, int] | None] = {state: None}
        stack = [state]
        while stack:
            state = stack.pop()
            try:
                choices = self._choices(state)
            except Violation as violation:
                yield self._with_order(violation, parents, state)
                continue
            for rank, thrown in choices:
                try:
                    successor = self._advance(state, rank, thrown)
                except Violation as violation:
                    yield self._with_order(violation, parents, state, rank)
                    continue
                if successor not in parents:
                    parents[successor] = (state, rank)
                    stack.append(successor)
        self.states = len(parents)

    def walk(self, seed: int) -> int:
        """Run one order, drawn from `seed`; return the number of accesses."""
        draw = random.Random(seed)
        state, steps = self._begin(), 0
        favourite = 0  # runs of one rank's accesses leave the others far behind
        while choices := self._choices(state):
            if draw.random() < 0.1:
                favourite = draw.randrange(len(self._programs))
            favoured = [choice for choice in choices if choice[0] == favourite]
            state = self._advance(state, *draw.choice(favoured or choices))
            steps += 1
        return steps

    def _begin(self) -> _State:
        frames = tuple(self._settle(Frame(rank, 0, state)) for rank, state in enumerate(self._states))
        values: list[int] = [self._values.of(None)] * len(self._memory)
        for location, value in self._memory.items():
            values[self._locations.of(location)] = self._values.of(value)
        return frames, tuple(values)

    def _choices(self, state: _State) -> list[tuple[int, _Thrown | None]]:
        choices: list[tuple[int, _Thrown | None]] = []
        waiting: list[int] = []
        signals = self._signals
        if signals:
            signals -= sum(self._frames[frame].signals for frame in state[0])
        for rank, frame in enumerate(state[0]):
            access = self._accesses[frame]
            if access is None:
                continue
            if isinstance(access, Await):
                if access.ready(self._load(state, access.locations)):
                    choices.append((rank, None))
                else:
                    waiting.append(rank)
                if signals > 0 and self._may_abandon(frame):
                    choices.append((rank, SIGNAL))
            else:
                choices.append((rank, None))
        if choices:
            return choices
        if waiting and not self._deadlines:
            raise Violation("deadlock", ", ".join(f"rank {r} waits in {self._name(state, r)}" for r in waiting))
        if not waiting:
            self._check.at_end([self._frames[frame].state for frame in state[0]])
        return [(rank, DEADLINE) for rank in waiting]

    def _may_abandon(self, frame: int) -> bool:
        """Return whether signals arrive: up to the operation at which ranks meet again, and in that one, too."""
        position: int = self._frames[frame].position
        return self._abandons is None or position <= self._abandons

    def _load(self, state: _State, locations: tuple[Location, ...]) -> Values:
        memory = state[1]
        places = [self._locations.of(location) for location in locations]
        return tuple(self._values[memory[place]] if place < len(memory) else None for place in places)

    def _store(self, state: _State, location: Location, value: Hashable) -> tuple[int, ...]:
        memory, place = state[1], self._locations.of(location)
        if place >= len(memory):
            memory += (self._values.of(None),) * (place + 1 - len(memory))
        return (*memory[:place], self._values.of(value), *memory[place + 1 :])

    def _advance(self, state: _State, rank: int, thrown: _Thrown | None) -> _State:
        frames, memory = state
        access = self._accesses[frames[rank]]
        result: Any = None
        if thrown is not None:
            result = thrown
        elif isinstance(access, Load | Await):
            result = self._load(state, access.locations)
        elif isinstance(access, Store):
            memory = self._store(state, access.location, access.value)
        elif isinstance(access, Propose):
            (result,) = self._load(state, (access.location,))
            if result is None or result[0] < access.number:
                result = (access.number, access.value)
                memory = self._store(state, access.location, result)
        step = (frames[rank], result)
        successor = self._successors.get(step)
        if successor is None:
            frame = self._frames[frames[rank]]
            signals = frame.signals + (thrown is SIGNAL)
            frame = Frame(rank, frame.position, frame.state, (*frame.results, result), signals)
            successor = self._successors[step] = self._settle(frame)
        return (*frames[:rank], successor, *frames[rank + 1 :]), memory

    def _settle(self, frame: Frame) -> int:
        """Begin the operations that follow, as far as they make no access. Return the frame's number."""
        program = self._programs[frame.rank]
        access = None
        while frame.position < len(program):
            outcome = self._pending(frame)
            if not isinstance(outcome, _Ended):
                access = outcome
                break
            position, state = self._check.after(frame.rank, frame.position, outcome.state, outcome.by)
            if outcome.signalled and self._abandons is not None:
                position = max(position, self._abandons)
            frame = Frame(frame.rank, position, state, (), frame.signals)
        number = self._frames.of(frame)
        self._accesses[number] = access
        return number

    def _pending(self, frame: Frame) -> Access | _Ended:
        """Return the access that a rank makes next, or its operation's outcome."""
        operation = self._programs[frame.rank][frame.position]
        key = (frame.rank, operation, frame.state, frame.results)
        pending = self._cache.get(key)
        if pending is None:
            pending = self._cache[key] = _replay(operation, frame)
        return pending

    def _name(self, state: _State, rank: int) -> str:
        return str(self._programs[rank][self._frames[state[0][rank]].position])

    def _with_order(
        self,
        violation: Violation,
        parents: Mapping[_State, tuple[_State, int] | None],
        state: _State,
        rank: int | None = None,
    ) -> Violation:
        """Add the accesses that led to `state`, and the one of `rank` that breaks the claim."""
        order: list[str] = []
        parent: tuple[_State, int] | None = None if rank is None else (state, rank)
        parent = parent or parents[state]
        while parent is not None:
            state, rank = parent
            order.append(f"rank {rank}: {self._name(state, rank)}: {self._accesses[state[0][rank]]}")
            parent = parents[state]
        return Violation(violation.kind, "\n  ".join([violation.text, *reversed(order)]))


class _Numbers:
    """Numbers values in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._all: list[Any] = []

    def of(self, value: Hashable) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._all)
            self._all.append(value)
        return number

    def __getitem__(self, number: int) -> Any:
        return self._all[number]


def _replay(operation: Operation, frame: Frame) -> Access | _Ended:
    code, state = operation.run(frame.state)
    try:
        access = next(code)
        for result in frame.results:
            access = code.throw(WaitEnded(result.why)) if isinstance(result, _Thrown) else code.send(result)
    except StopIteration:
        return _Ended(state(), None, SIGNAL in frame.results)
    except (Refused, WaitEnded) as error:
        return _Ended(state(), error, SIGNAL in frame.results)
    return access
