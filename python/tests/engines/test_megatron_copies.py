"""Copies between ranks, over real gloo processes; no Megatron-Core is needed."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import pytest
import tessera
import torch
import torch.distributed
from jobs import Jobs, Rank
from tessera.engines import megatron
from torch_ranks import join_group, launch

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
BIG = 5 << 20  # elements of one piece


def piece(sender: int, receiver: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * sender + 100 * receiver + turn)
    return torch.randint(0, 2, shape, generator=random).to(dtype)


def pieces(size: int) -> list[tuple[int, int, int, tuple[int, ...], torch.dtype]]:
    """(sender, receiver, turn, shape, dtype), of every rank to every rank."""
    found = []
    for sender in range(size):
        for receiver in range(size):
            shapes = [(3, 5), (), (0, 4), (2, 3, 4), (7,), (1 + sender, 2)]
            found += [(sender, receiver, i, shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, DTYPES))]  # noqa: B905
            if receiver == (sender + 1) % size:
                found.append((sender, receiver, 6, (BIG,), torch.float32))
    return found


def exchanged(rank: int, tasks: bool, turns: int) -> tuple[str, list[bool]]:
    """Each rank sends to each, in an order of its own where tasks tell them apart; buffers are new in each turn."""
    size = torch.distributed.get_world_size()
    with megatron.Copies(timeout=120) as copies:
        right = []
        for turn in range(turns):
            todo = pieces(size) if turn != 2 else pieces(size)[:-2]
            got = []
            for at, (sender, receiver, i, shape, dtype) in enumerate(reversed(todo) if tasks and rank % 2 else todo):
                number = todo.index((sender, receiver, i, shape, dtype)) + turn if tasks else None
                if sender == rank:
                    sent = piece(sender, receiver, i + turn, shape, dtype)
                    if sent.dim() == 2 and at % 2:
                        sent = sent.t().contiguous().t()
                    copies.send(sent, receiver, number)
                if receiver == rank:
                    to = torch.zeros(shape, dtype=dtype)
                    if to.dim() == 3:
                        to = torch.zeros(*shape, 2, dtype=dtype)[..., 0]
                    copies.receive(to, sender, number)
                    got.append((to, piece(sender, receiver, i + turn, shape, dtype)))
            before = [to._version for to, _ in got]
            copies.run()
            right += [torch.equal(to, expected) for to, expected in got]
            right += [to._version > was for (to, _), was in zip(got, before, strict=True) if to.numel()]
        return copies.refused, right


def by_order(rank: int) -> Any:
    return exchanged(rank, tasks=False, turns=2)


def by_task(rank: int) -> Any:
    return exchanged(rank, tasks=True, turns=4)


def through_shared_memory(rank: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESSERA_FORCE_PULL", "stream")
        return exchanged(rank, tasks=True, turns=3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_piece_arrives(size: int) -> None:
    for refused, right in launch(by_task, size):
        assert all(right) and right and not refused


def test_pieces_without_numbers_arrive_in_order() -> None:
    for _, right in launch(by_order, 2):
        assert all(right) and right


def test_where_private_memory_cannot_be_read_pieces_go_through_shared_memory() -> None:
    for refused, right in launch(through_shared_memory, 2):
        assert all(right) and right and "TESSERA_FORCE_PULL=stream" in refused


def on_another_device(rank: int) -> bool:
    """Tensors that only copies reach: a subclass of torch.device is not needed to see that they are made."""
    from tessera.engines.megatron import _copies

    with megatron.Copies(timeout=120) as copies, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_copies, "_in_host_memory", lambda tensor: False)
        sent, got = torch.arange(6.0), torch.zeros(6)
        read: list[Any] = []
        copies._reader = Spy(copies._reader, read)
        copies.send(sent, 1 - rank)
        copies.receive(got, 1 - rank)
        copies.run()
        return torch.equal(sent, got) and read[0][4] != got.data_ptr()


class Spy:
    def __init__(self, reader: Any, read: list[Any]) -> None:
        self.reader, self.reads, self.refused = reader, read, reader.refused

    def refer(self, address: int, nbytes: int) -> Any:
        return self.reader.refer(address, nbytes)

    def read(self, reads: list[Any]) -> None:
        self.reads += reads
        self.reader.read(reads)


def test_tensors_of_other_devices_go_by_way_of_the_host() -> None:
    assert launch(on_another_device, 2) == [True, True]


def unlike(rank: int) -> list[str]:
    said = []
    with megatron.Copies(timeout=120) as copies:
        for shape, dtype, receive in [((3,), "f", True), ((2,), "d", True), ((2,), "f", False), ((2,), "f", True)]:
            if rank == 0:
                copies.send(torch.ones(shape, dtype=torch.float64 if dtype == "d" else torch.float32), 1, 7)
            elif receive:
                got = torch.zeros(2)
                copies.receive(got, 0, 7)
            try:
                copies.run()
            except tessera.MismatchError as error:
                said.append(str(error))
        if rank == 0:
            copies.send(torch.ones(2), 1)
        else:
            copies.receive(got, 0, 8)
        try:
            copies.run()
        except tessera.MismatchError as error:
            said.append(str(error))
        if rank == 1:
            assert got.tolist() == [1, 1]
    return said


def test_pieces_that_do_not_fit_are_named_on_every_rank_and_the_next_run_works() -> None:
    first, second = launch(unlike, 2)
    assert first == second and len(first) == 4
    assert "task 7 from rank 0 to rank 1 is sent as (3,) float32 and received as (2,) float32" in first[0]
    assert "sent as (2,) float64" in first[1]
    assert first[2].endswith("task 7 from rank 0 to rank 1 is not received")
    assert "task 8 from rank 0 to rank 1 is not sent; number 0 from rank 0 to rank 1 is not received" in first[3]


def failing(rank: int) -> list[str]:
    said = []
    with megatron.Copies(timeout=120) as copies:
        for point in ("_placed", "_copy", ""):
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1 and point:
                    patch.setattr(copies, point, fails)
                got = torch.zeros(2)
                copies.send(torch.ones(2), 1 - rank)
                copies.receive(got, 1 - rank)
                try:
                    copies.run()
                except (tessera.UnavailableError, MemoryError) as error:
                    said.append(f"{type(error).__name__} {error}")
        assert got.tolist() == [1, 1]
    return said


def fails(*_: object) -> None:
    raise MemoryError("no room")


def test_a_rank_that_fails_ends_the_run_of_all_and_the_next_run_works() -> None:
    other, own = launch(failing, 2)
    assert own == ["MemoryError no room"] * 2
    assert other == [f"UnavailableError {what}: rank 1 failed: MemoryError: no room" for what in ("copies", "copied")]


def killed(rank: Rank) -> str:
    join_group(rank)
    copies = megatron.Copies(timeout=300)
    rank.tell()
    rank.hear()
    try:
        copies.send(torch.ones(4), (rank.rank + 1) % rank.world)
        copies.receive(torch.zeros(4), (rank.rank - 1) % rank.world)
        copies.run()
    except tessera.PeerLostError as error:
        try:
            copies.run()
        except tessera.PeerLostError:
            return str(error)
    return "not lost"


def test_a_killed_rank_ends_the_run_of_the_others_with_its_name() -> None:
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder, Jobs(pathlib.Path(folder), forked=True) as jobs:
        ranks = jobs.start("torch", killed, world=3)
        for rank in ranks:
            rank.hear()
        for rank in ranks[:2]:
            rank.tell()
        ranks[2].kill()
        for rank in ranks[:2]:
            assert "rank 2" in rank.result()


def refused(rank: int) -> list[str]:
    said = []
    copies = megatron.Copies(timeout=120)
    for call in (lambda: copies.send(torch.ones(1), 1), lambda: copies.receive(torch.ones(1), -1)):
        with pytest.raises(tessera.InvalidArgumentError) as error:
            call()
        said.append(str(error.value))
    copies.close()
    copies.close()
    with pytest.raises(tessera.InvalidArgumentError) as error:
        copies.run()
    return [*said, str(error.value)]


def test_ranks_that_are_none_and_closed_copies_are_refused() -> None:
    (said,) = launch(refused, 1)
    assert said[0].startswith("to") and said[1].startswith("source") and "are closed" in said[2]
