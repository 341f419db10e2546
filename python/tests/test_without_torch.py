"""The package without torch: in interpreters where its import fails."""

from __future__ import annotations

from typing import Any

import numpy
from jobs import Jobs, Rank


def test_importing_tessera_imports_no_torch(jobs: Jobs) -> None:
    (process,) = jobs.start("alone", imported_modules)
    assert not {"torch", "ml_dtypes"} & process.result()


def imported_modules(_: Rank) -> set[str]:
    import sys

    import tessera  # noqa: F401

    return {name.partition(".")[0] for name in sys.modules}


def test_the_import_of_torch_does_fail(jobs: Jobs) -> None:
    (process,) = jobs.start("alone", try_torch, without=["torch"])
    assert process.result() == "torch is blocked in this test"


def try_torch(_: Rank) -> str:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return str(error)
    return "imported"


def test_planning(jobs: Jobs) -> None:
    (process,) = jobs.start("alone", plan_and_simulate, without=["torch"])
    bytes_moved, moved = process.result()
    whole = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)
    assert bytes_moved == whole.nbytes
    assert (moved[2] == whole[:, :2].astype(numpy.float16)).all()
    assert (moved[3] == whole[:, 2:].astype(numpy.float16)).all()


def plan_and_simulate(_: Rank) -> Any:
    import tessera

    plan = tessera.plan((6, 4), numpy.float32, "dp=2:S0", "tp=2@2,3:S1")
    whole = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)
    return plan.stats["bytes_moved"], tessera.simulate(plan, {0: whole[:3], 1: whole[3:]}, "f16")


def test_quantising(jobs: Jobs) -> None:
    (process,) = jobs.start("alone", quantise, without=["torch"])
    x, codes, values = process.result()
    assert numpy.abs(values - x).max() <= numpy.abs(x).max() / 28
    assert codes.dtype == "float8_e4m3fn"


def quantise(_: Rank) -> Any:
    import tessera

    x = numpy.random.default_rng(0).standard_normal((64, 96)).astype(numpy.float32)
    q = tessera.quantize(x, "mxfp8")
    room = tessera.QuantizedTensor.empty(x.shape, "mxfp8")
    room.row.codes[...], room.row.scales[...] = q.row.codes, q.row.scales
    return x, q.row.codes, room.dequantize()


def test_a_transfer(jobs: Jobs) -> None:
    jobs.start("trainer", train, world=2, without=["torch"])
    jobs.start("inference", infer, without=["torch"])
    results = jobs.results()
    (received,) = results["inference"]
    assert received == [(1, True), (2, True), (3, True)]
    assert results["trainer"] == [["step"], ["step"]]


def whole(version: int) -> numpy.ndarray[Any, Any]:
    return (numpy.arange(24) + 100 * version).reshape(6, 4).astype(numpy.float32)


def train(rank: Rank) -> list[str]:
    """Two ranks with half of the rows each, and a bias that both hold."""
    rows = numpy.zeros((3, 4), numpy.float32)
    state = {"w": (rows, "dp=2:S0", (6, 4)), "bias": numpy.ones(4), "step": 3}
    with rank.connect("weights", peer="inference") as bus, bus.register(state) as batch:
        for version in (1, 2, 3):
            rows[:] = numpy.split(whole(version), 2)[rank.rank]
            batch.send(timeout=60)
        return list(batch.skipped)


def infer(rank: Rank) -> list[tuple[int, bool]]:
    state = {"w": numpy.zeros((6, 4), numpy.float32), "bias": numpy.zeros(4)}
    received = []
    with rank.connect("weights", peer="trainer") as bus, bus.register(state) as batch:
        for _ in range(3):
            version = batch.recv(timeout=60)
            received.append((version, bool((state["w"] == whole(version)).all() and (state["bias"] == 1).all())))
    return received
