"""Compares, bit for bit."""

from __future__ import annotations

import tessera

from .cases import Case
from .launching import Outcome
from .reference import DTYPES, as_carrier, from_bytes, to_bytes
from .worker import Local, Record


def bus_failures(outcome: Outcome) -> list[str]:
    """Differences between what the bus delivered and torch's results."""
    return [
        f"{case}\n  bus, process {process}: {difference}"
        for case in outcome.cases
        for process, record in outcome.records[case.index].items()
        if record.expected is not None
        and (difference := _difference(case.target, record.received, record.expected)) is not None
    ]


def torch_failures(outcome: Outcome) -> list[str]:
    """Contradictions between torch's own results, or with the rank-order sum, and harmed memory."""
    return [
        f"{case}\n  process {process}: {problem}"
        for case in outcome.cases
        for process, record in outcome.records[case.index].items()
        for problem in record.problems
    ]


def simulate_failures(outcome: Outcome) -> list[str]:
    """Differences between simulate() and torch, given torch's own local tensors."""
    return [failure for case in outcome.cases for failure in _simulated(case, outcome.records[case.index])]


def _simulated(case: Case, records: dict[int, Record]) -> list[str]:
    sources = {
        process: from_bytes(record.source.data, DTYPES[case.dtype], record.source.shape)
        for process, record in records.items()
        if record.source is not None
    }
    try:
        plan = tessera.plan(case.elements_shape, DTYPES[case.dtype], case.src.layout(), case.dst.layout())
        arrays = {process: tensor.numpy() for process, tensor in sources.items()} if _numpy_too(case) else sources
        moved = tessera.simulate(plan, arrays, DTYPES[case.target])
    except tessera.Error as error:
        return [f"{case}\n  simulate: {type(error).__name__}: {error}"]
    failures = []
    for process, record in records.items():
        if record.expected is None:
            continue
        given = moved.get(process)
        local = None
        if given is not None:
            data = given.tobytes() if _numpy_too(case) else to_bytes(given)
            local = Local(data, tuple(given.shape))
        difference = _difference(case.target, local, record.expected)
        if difference is not None:
            failures.append(f"{case}\n  simulate, rank {process}: {difference}")
    return failures


def _numpy_too(case: Case) -> bool:
    """Half of the cases are simulated with NumPy arrays, where torch can make them."""
    return case.index % 2 == 0 and not any(
        each in ("bf16", "f4") or each.startswith("f8") for each in (case.dtype, case.target)
    )


def _difference(dtype: str, given: Local | None, expected: Local) -> str | None:
    if given is None:
        return "nothing came"
    if given.shape != expected.shape:
        return f"its local shape is {given.shape}, torch's {expected.shape}"
    if given.data == expected.data:
        return None
    bits, wanted = (as_carrier(from_bytes(each.data, DTYPES[dtype], each.shape)) for each in (given, expected))
    places = (bits != wanted).nonzero().tolist()
    first = tuple(places[0])
    mask = (1 << 8 * bits.itemsize) - 1
    return (
        f"{len(places)} of {bits.numel()} elements differ, first at {list(first)}: "
        f"{int(bits[first]) & mask:#x}, torch has {int(wanted[first]) & mask:#x}"
    )
