"""Tensors that have moved since they were registered, and what the next transfer does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from ranks import LIMIT, run
from torch import nn

ROWS = 12


def value(version: int) -> torch.Tensor:
    return torch.arange(ROWS * 5, dtype=torch.float32).view(ROWS, 5) + 100 * version


class Model(nn.Module):
    """One rank's part of a matrix whose rows are sharded over `world` ranks."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self.w = nn.Parameter(torch.zeros(ROWS // world, 5))

    def register(self, bus: tessera.Bus, **options: Any) -> tessera.Batch:
        rows = tessera.Part("w", layout=f"{self.world}:S0", shape=(ROWS, 5))
        return bus.register(self, map={"w": rows}, **options)

    def rows(self, version: int) -> torch.Tensor:
        return value(version).chunk(self.world)[self.rank]

    def fill(self, version: int) -> None:
        with torch.no_grad():
            self.w.copy_(self.rows(version))


def swap_data(model: Model) -> None:
    model.w.data = torch.zeros_like(model.w)


def swap_parameter(model: Model) -> None:
    model.w = nn.Parameter(torch.zeros_like(model.w))


def share(model: Model) -> None:
    tessera.share_(model)


def transpose(model: Model) -> None:
    model.w.data = torch.zeros(5, ROWS // model.world).t()


MOVES = [swap_data, swap_parameter, share, transpose]
VERSIONS = 4
Step = Callable[[int, Model], None]


def nothing(version: int, model: Model) -> None:
    pass


def sends(rank: int, world: int, step: Step = nothing, **options: Any) -> Callable[[tessera.Bus], tessera.BatchStats]:
    def work(bus: tessera.Bus) -> tessera.BatchStats:
        model = Model(rank, world)
        batch = model.register(bus, **options)
        for version in range(1, VERSIONS + 1):
            step(version, model)
            model.fill(version)
            batch.send(version, timeout=LIMIT / 3)
        ended.wait(LIMIT)  # what is staged here ends with this job
        return batch.stats

    return work


def takes(rank: int, world: int, step: Step = nothing, **options: Any) -> Callable[[tessera.Bus], tessera.BatchStats]:
    def work(bus: tessera.Bus) -> tessera.BatchStats:
        model = Model(rank, world)
        batch = model.register(bus, **options)
        while batch.version < VERSIONS:
            step(batch.version + 1, model)
            version = batch.recv(timeout=LIMIT / 3)
            assert torch.equal(model.w, model.rows(version)), version
        ended.wait(LIMIT)
        return batch.stats

    return work


ended = threading.Barrier(1)


def transfers(senders: list[Any], receivers: list[Any]) -> dict[str, list[tessera.BatchStats]]:
    global ended
    ended = threading.Barrier(len(senders) + len(receivers))
    return run({"trainer": senders, "inference": receivers})


@pytest.mark.parametrize("move", MOVES)
def test_what_is_sent_is_registered_again(move: Callable[[Model], None]) -> None:
    """By receivers that wait already: the trainer goes on once they do."""

    def step(version: int, model: Model) -> None:
        if version == 3:
            time.sleep(0.1)
            move(model)

    seen = transfers([sends(0, 1, step)], [takes(rank, 2) for rank in range(2)])
    assert [stats.sessions for stats in seen["inference"]] == [2, 2]


@pytest.mark.parametrize("movers", [{0}, {2}, {0, 1, 2}])
def test_own_ranks_that_offer_already_are_met_again(movers: set[int]) -> None:
    def step(version: int, model: Model) -> None:
        if version in (2, 4) and model.rank in movers:
            time.sleep(0.1 * model.rank)
            swap_parameter(model)

    seen = transfers([sends(rank, 3, step) for rank in range(3)], [takes(rank, 2) for rank in range(2)])
    assert all(stats.sessions >= 3 for stats in seen["inference"])


@pytest.mark.parametrize("move", MOVES)
def test_staged_nobody_else_hears_of_it(move: Callable[[Model], None]) -> None:
    def step(version: int, model: Model) -> None:
        if version in (2, 3):
            move(model)

    seen = transfers(
        [sends(rank, 2, step, mode="staged") for rank in range(2)],
        [takes(rank, 3, step, mode="staged") for rank in range(3)],
    )
    assert [stats.sessions for of_job in seen.values() for stats in of_job] == [1] * 5


def test_what_is_received_in_place_cannot_move() -> None:
    def take(bus: tessera.Bus) -> None:
        model = Model(0, 1)
        with model.register(bus) as batch:
            batch.recv(timeout=LIMIT / 3)
            kept = model.w
            swap_parameter(model)
            with pytest.raises(
                tessera.InvalidArgumentError,
                match="tensor w: its memory has moved since it was registered: .* accepts it in place: its tensors "
                "cannot be moved: close it and register it again",
            ):
                batch.recv(timeout=LIMIT / 3)
            model.w = kept
            assert batch.recv(timeout=LIMIT / 3) == 2
            assert torch.equal(model.w, value(2))

    def send(bus: tessera.Bus) -> None:
        model = Model(0, 1)
        batch = model.register(bus)
        for version in (1, 2):
            model.fill(version)
            batch.send(version, timeout=LIMIT / 3)

    run({"trainer": [send], "inference": [take]})


def test_what_has_moved_before_the_first_transfer_is_where_it_is() -> None:
    def send(bus: tessera.Bus) -> None:
        model = Model(0, 1)
        batch = model.register(bus)
        swap_parameter(model)
        model.fill(1)
        batch.send(timeout=LIMIT / 3)

    def take(bus: tessera.Bus) -> None:
        model = Model(0, 1)
        batch = model.register(bus)
        swap_parameter(model)
        batch.recv(timeout=LIMIT / 3)
        assert torch.equal(model.w, value(1))
        assert batch.stats.sessions == 1

    run({"trainer": [send], "inference": [take]})


def test_what_is_freed_before_the_first_send_is_refused_and_not_read() -> None:
    def send(bus: tessera.Bus) -> None:
        tensors = {"w": torch.ones(1 << 22), "kept": torch.ones(3)}
        batch = bus.register(tensors, hold="weak")
        del tensors["w"]
        with pytest.raises(tessera.InvalidArgumentError, match="tensor w: its memory was freed"):
            batch.send(timeout=LIMIT / 3)
        refused.wait(LIMIT)

    refused = threading.Barrier(3)
    run({"trainer": [send, send], "inference": [lambda bus: refused.wait(LIMIT)]})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model.w.data.to(torch.bfloat16), "its dtype has changed from f32 to bf16"),
        (lambda model: torch.zeros(ROWS, 6), r"its shape has changed from \(12, 5\) to \(12, 6\)"),
    ],
)
def test_another_tensor_is_refused(change: Callable[[Model], torch.Tensor], why: str) -> None:
    def send(bus: tessera.Bus) -> None:
        model = Model(0, 1)
        batch = model.register(bus)
        batch.send(1, timeout=LIMIT / 3)
        model.w = nn.Parameter(change(model))
        with pytest.raises(tessera.InvalidArgumentError, match=f"tensor w: {why} since it was registered: close"):
            batch.send(2, timeout=LIMIT / 3)

    run({"trainer": [send], "inference": [lambda bus: Model(0, 1).register(bus).recv(timeout=LIMIT / 3)]})


def test_waits_for_a_version_go_on() -> None:
    def take(bus: tessera.Bus) -> None:
        model = Model(0, 1)
        batch = model.register(bus)
        batch.recv(timeout=LIMIT / 3)
        assert batch.wait_version(2, timeout=LIMIT / 3) == 2
        batch.recv(timeout=LIMIT / 3)
        assert torch.equal(model.w, value(2))

    def send(bus: tessera.Bus) -> None:
        model = Model(0, 1)
        batch = model.register(bus)
        for version in (1, 2):
            if version == 2:
                time.sleep(0.2)
                swap_data(model)
            model.fill(version)
            batch.send(version, timeout=LIMIT / 3)

    run({"trainer": [send], "inference": [take]})


def test_parts_of_a_tensor_move_with_it() -> None:
    """Two tensors of the bus in one here: [q; k]."""
    q, k = value(1), value(2)

    def send(bus: tessera.Bus) -> None:
        model = nn.Module()
        model.register_parameter("qk", nn.Parameter(torch.zeros(2 * ROWS, 5)))
        names = {"qk": [tessera.Part("q", slice(None, ROWS)), tessera.Part("k", slice(ROWS, None))]}
        batch = bus.register(model, map=names)
        batch.send(1, timeout=LIMIT / 3)
        model.qk = nn.Parameter(torch.cat([q, k]))
        batch.send(2, timeout=LIMIT / 3)

    def take(bus: tessera.Bus) -> None:
        taken = {"q": torch.zeros(ROWS, 5), "k": torch.zeros(ROWS, 5)}
        batch = bus.register(taken)
        batch.recv(1, timeout=LIMIT / 3)
        batch.recv(2, timeout=LIMIT / 3)
        assert torch.equal(taken["q"], q)
        assert torch.equal(taken["k"], k)

    run({"trainer": [send], "inference": [take]})
