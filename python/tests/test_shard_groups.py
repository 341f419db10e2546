"""Groups of ranks beneath etp: what one of them refuses."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import tessera
from ranks import until
from tessera._core import ShardGroup

LIMIT = 60.0
T = TypeVar("T")


def run_ranks(size: int, body: Callable[[ShardGroup], T]) -> list[T]:
    """Run the ranks of a group on threads, and return what they return."""
    blobs: list[bytes] = [b""] * size
    barrier = threading.Barrier(size, timeout=LIMIT)

    def run(rank: int) -> T:
        def exchange(blob: bytes) -> list[bytes]:
            blobs[rank] = blob
            barrier.wait()
            return list(blobs)

        group = ShardGroup.over(exchange, rank, size, "test", LIMIT)
        result = body(group)
        group.close()
        return result

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_a_refusal_reaches_the_ranks_that_derive_a_group_and_the_group_lives(runtime_dir: Path) -> None:
    def body(group: ShardGroup) -> list[bytes]:
        if group.rank == 1:
            group.refuse("wrap", "13 rows cannot be cut")
        else:
            with pytest.raises(tessera.InvalidArgumentError, match=r"^rank 1: 13 rows cannot be cut$"):
                group.derive("test/1")
        group.derive("test/2").close()
        return group.exchange("ranks", str(group.rank).encode())

    assert run_ranks(3, body) == [[b"0", b"1", b"2"]] * 3


def test_a_refusal_has_the_class_of_its_code(runtime_dir: Path) -> None:
    def body(group: ShardGroup) -> None:
        if group.rank == 0:
            with pytest.raises(tessera.InvalidArgumentError, match="no error has the code 'odd'"):
                group.refuse("load", "text", "odd")
            group.refuse("load", "no such file", code="not-found")
        else:
            with pytest.raises(tessera.NotFoundError, match="rank 0: no such file"):
                group.exchange("load", b"")

    run_ranks(2, body)


def test_the_next_group_removes_what_a_killed_rank_has_left(runtime_dir: Path) -> None:
    """A rank has a folder with a lock and a socket only while its group forms."""
    join = "from tessera._core import ShardGroup; ShardGroup.over_store('auto', 'job', 0, 2, 'job', 60.0)"
    before = set(runtime_dir.glob("p-*/group"))
    rank = subprocess.Popen([sys.executable, "-c", join])
    until(lambda: bool(set(runtime_dir.glob("p-*/group")) - before))
    rank.kill()
    rank.wait(LIMIT)
    (left,) = set(runtime_dir.glob("p-*/group")) - before
    assert run_ranks(2, lambda group: left.parent.exists()) == [False, False]
