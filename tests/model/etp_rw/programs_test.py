"""Programs of a few operations in every order of their ranks' accesses, and long ones in random orders.

The normal lane takes what a change of the protocol is likely to break; the slow one (`-m slow`) all programs of three
operations of the alphabet.
"""

import copy
import itertools
import random
from collections.abc import Iterable, Sequence

import pytest
from etp_claims import RECOVERY, Explorer
from etp_operations import (
    AbsMax,
    Adafactor,
    Adamw,
    AddToTemporary,
    AddVector,
    AddVectors,
    Backward,
    Clamp,
    Clip,
    Cumsum,
    Fill,
    Keep,
    Look,
    MapValue,
    Multiply,
    NotMeaningful,
    Operation,
    PrintSquare,
    Read,
    Resync,
    Scale,
    Sgd,
    SleepUntilRefused,
    SubtractTemporary,
    Use,
    ZeroGrad,
    ZeroOnRank0,
    begin,
)
from etp_protocol import Protocol

# Each mechanism once.
CORE: tuple[Operation, ...] = (
    Use(),
    Read("grad", only_rank_0=True),
    PrintSquare(),
    Scale(),
    Read("temporary"),
    Multiply(),
    AddVector(),
    Cumsum(),
    Clip(),
    AbsMax(),
    Sgd(),
    Adafactor(),
    Backward(),
    ZeroGrad(),
)
ALPHABET: tuple[Operation, ...] = (
    *CORE,
    Read("p", only_rank_0=True),
    Read("m", only_rank_0=True),
    Read("temporary", only_rank_0=True),
    Read("kept"),
    Read("kept", only_rank_0=True),
    Scale("grad"),
    AddToTemporary(),
    SubtractTemporary(),
    Multiply("grad"),
    Multiply("m"),
    Clamp(),
    AddVectors(),
    Adamw(),
    Adafactor(reads_first=True),
    Fill(),
    Keep(),
    Keep(only_rank_0=True),
    MapValue(),
    MapValue("grad"),
    Look(),
)
# Three ranks have millions of states in its five meetings.
SHORTER = [operation for operation in ALPHABET if operation != Adafactor(reads_first=True)]
# Operations that all ranks make, with a number, operand, result or error of one rank's own.
OWN: tuple[Operation, ...] = (
    Multiply(own=True),
    Multiply("grad", own=True),
    AddVector(own=True),
    AddVectors(own=True),
    Cumsum(own=True),
    Cumsum(fails=True),
    Adamw(own=True),
    Adafactor(own=True),
    Adafactor(fails="at once"),
    Adafactor(fails="late"),
    Adafactor(reads_first=True, fails="at once"),
    Scale(own=True),
)
# Whatever was refused before, the weight can be overwritten and used.
TAIL: tuple[Operation, ...] = (Use(), Fill(), Use())

TWO = Protocol(2)
THREE = Protocol(3)
LAST_WITHOUT_ROWS = Protocol(3, owners=2)


def check_all(protocol: Protocol, programs: Iterable[Sequence[Operation]], at_least: int) -> None:
    explorer = Explorer(protocol)
    for program in programs:
        try:
            explorer.check(program)
        except NotMeaningful:
            continue
    print(f"{explorer.programs} programs, {explorer.states} states")
    assert explorer.programs >= at_least


def with_own(operations: Sequence[Operation], others: int) -> Iterable[Sequence[Operation]]:
    """Return programs with one operation of OWN, at each place among `others` operations."""
    for own, rest in itertools.product(OWN, itertools.product(operations, repeat=others)):
        for place in range(others + 1):
            yield (*rest[:place], own, *rest[place:], *TAIL)


def random_program(protocol: Protocol, seed: int, length: int, own: bool) -> list[Operation]:
    """Draw operations, each of which means something after those before it."""
    draw = random.Random(seed)
    _, _, plain = begin(protocol)
    program: list[Operation] = []
    while len(program) < length:
        operation = draw.choice(OWN) if own and draw.random() < 0.2 else draw.choice(ALPHABET)
        attempt = copy.deepcopy(plain)
        try:
            operation.plain(attempt)
        except NotMeaningful:
            continue
        plain = attempt
        program.append(operation)
    return program


def check_random(protocol: Protocol, seeds: range, own: bool) -> None:
    explorer = Explorer(protocol)
    for seed in seeds:
        explorer.check(random_program(protocol, seed, 20, own), seed)


# Programs that one process could run ----


def test_two_ranks_give_the_values_of_one_process() -> None:
    check_all(TWO, itertools.product(CORE, repeat=3), 1500)


def test_three_ranks_give_the_values_of_one_process() -> None:
    synchronising = (PrintSquare(), Multiply(), Cumsum(), AbsMax(), Adafactor(), Backward())
    check_all(THREE, itertools.product((Use(), *synchronising), synchronising), 42)


def test_every_operation_with_a_rank_without_rows() -> None:
    check_all(LAST_WITHOUT_ROWS, itertools.product(SHORTER), 25)


@pytest.mark.parametrize("held", [Keep(), Keep(only_rank_0=True), Scale("grad"), MapValue("grad")])
def test_memory_of_gradients_is_reused_only_when_nobody_holds_it(held: Operation) -> None:
    """The mapped value is copied, and does not hold the store; the others do."""
    read = {Scale("grad"): Read("temporary"), MapValue("grad"): Look()}.get(held, Read("kept", only_rank_0=True))
    for protocol in (TWO, THREE):
        Explorer(protocol).check([held, ZeroGrad(), Backward(), read])


@pytest.mark.parametrize("protocol", [TWO, THREE, LAST_WITHOUT_ROWS])
def test_long_programs(protocol: Protocol) -> None:
    check_random(protocol, range(150), own=False)


# Values of a rank's own ----


def test_differences_are_refused_alike_and_the_rest_goes_on() -> None:
    check_all(TWO, with_own(CORE, 1), 150)


@pytest.mark.parametrize("protocol", [THREE, LAST_WITHOUT_ROWS])
def test_differences_are_refused_alike_on_three_ranks(protocol: Protocol) -> None:
    check_all(protocol, with_own((), 0), 8)


@pytest.mark.parametrize("protocol", [TWO, LAST_WITHOUT_ROWS])
def test_long_programs_with_differences(protocol: Protocol) -> None:
    check_random(protocol, range(1000, 1150), own=True)


# Ranks that go separate ways ----


@pytest.mark.parametrize("protocol", [TWO, THREE])
@pytest.mark.parametrize(
    "program",
    [
        (ZeroOnRank0(),),
        (ZeroOnRank0(), Multiply()),
        (ZeroOnRank0(), Multiply("m")),
        (ZeroOnRank0(), Backward()),
        (ZeroOnRank0(), Adafactor()),
        (Scale(), AddToTemporary(), Read("temporary", only_rank_0=True)),
        (Scale(), AddToTemporary(), Read("temporary", only_rank_0=True), Cumsum()),
    ],
)
def test_an_operation_of_rank_0_only_is_refused_before_a_row_is_written(
    protocol: Protocol, program: Sequence[Operation]
) -> None:
    recovery = (Resync(), Use(), *RECOVERY[1:])
    Explorer(protocol).check_recovery(program, recovery, must_refuse=True)


def test_a_rank_that_writes_what_others_write_later_is_refused_by_then() -> None:
    """The first zero_() of rank 0 meets the others' only one: no difference. Its second meets what comes next."""
    program = (ZeroOnRank0(), Fill(), Fill())
    Explorer(TWO).check_recovery(program, must_refuse=True)


@pytest.mark.parametrize("protocol", [TWO, THREE])
@pytest.mark.parametrize("first", [ZeroOnRank0(), Read("temporary", only_rank_0=True)])
def test_a_deadline_is_a_refusal_for_those_that_come_later(protocol: Protocol, first: Operation) -> None:
    program = (Scale(), AddToTemporary(), first, SleepUntilRefused(), Use())
    Explorer(protocol).check_recovery(program, deadlines=True, must_refuse=True)


@pytest.mark.parametrize("protocol", [TWO, THREE])
@pytest.mark.parametrize("step", [Adamw(fails=True), Adafactor(fails="at once")])
@pytest.mark.parametrize("after", [(), (Use(),), (Multiply(),), (Backward(),)])
def test_a_step_that_raises_on_one_rank_is_refused_on_all(
    protocol: Protocol, step: Operation, after: Sequence[Operation]
) -> None:
    Explorer(protocol).check_recovery((step, *after), must_refuse=True)


def test_a_signal_in_any_wait() -> None:
    explorer = Explorer(TWO)
    for operation in ALPHABET:
        try:
            explorer.check_recovery([operation], signals=1)
        except NotMeaningful:
            continue
    for program in ((Multiply(), Adafactor()), (Adafactor(), Backward()), (Backward(), Clip()), (Clamp(), Sgd())):
        explorer.check_recovery(program, signals=1)


def test_gradients_after_an_abandoned_backward_are_whole() -> None:
    recovery = (Resync(), Fill(), ZeroGrad(), Backward(), Read("grad"))
    Explorer(TWO).check_recovery([Backward()], recovery, signals=1)


def test_signals_one_after_another() -> None:
    Explorer(TWO).check_recovery([Multiply()], signals=3)


# The slow lane ----


@pytest.mark.slow
@pytest.mark.parametrize("first", ALPHABET, ids=str)
def test_all_programs_of_two_ranks(first: Operation) -> None:
    check_all(TWO, ((first, *rest) for rest in itertools.product(ALPHABET, repeat=2)), 0)


@pytest.mark.slow
@pytest.mark.parametrize("first", CORE, ids=str)
def test_programs_of_three_ranks(first: Operation) -> None:
    check_all(THREE, ((first, *rest) for rest in itertools.product(CORE, repeat=2)), 0)


@pytest.mark.slow
def test_all_differences_among_two_other_operations() -> None:
    check_all(TWO, with_own(CORE, 2), 3000)


@pytest.mark.slow
def test_differences_on_three_ranks_beside_another_operation() -> None:
    for protocol in (THREE, LAST_WITHOUT_ROWS):
        check_all(protocol, with_own(CORE, 1), 150)


@pytest.mark.slow
def test_a_signal_in_any_wait_of_two_operations() -> None:
    explorer = Explorer(TWO)
    for program in itertools.product(ALPHABET, repeat=2):
        try:
            explorer.check_recovery(program, signals=1)
        except NotMeaningful:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("operation", SHORTER, ids=str)
def test_a_signal_in_any_wait_of_any_operation_on_three_ranks(operation: Operation) -> None:
    try:
        Explorer(THREE).check_recovery([operation], signals=1)
    except NotMeaningful:
        pytest.skip("reads what is not there")


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_many_long_programs(own: bool) -> None:
    for protocol in (TWO, THREE, LAST_WITHOUT_ROWS):
        check_random(protocol, range(10_000, 13_000), own)
