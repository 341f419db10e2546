#!/usr/bin/env python3
"""Tessera compared with the usual alternatives: one bf16 matrix from 4 processes into 2, in five changes of layout.

    PYTHONPATH=build/cpu/python python bench/peers.py                 # 1 GiB, width 8192, digest off
    PYTHONPATH=build/cpu/python python bench/peers.py --width 1024 --digest --size 256 --repeat 5

Peers, over gloo: gather and broadcast (the whole matrix on one rank of each job), point to point (the exact regions, as
a careful engineer would write it: contiguous regions in place, others through buffers), and
torch.distributed.checkpoint through tmpfs (save plus load). Tessera reads shared memory (tessera.zeros) in place, and
once more by way of copies on both sides (staged).

All six processes wait for each other before each repetition; its time runs until the last one has its part. Rates are
delivered bytes, in 10^9 per second; `x` is Tessera's over the peer's. What arrives is compared. `extra` is the most
memory that a rank took besides the tensors (RssAnon, sampled every 2 ms), in per cent of its own tensor; `shared`,
likewise, the shared memory of the machine (Shmem: includes tmpfs, and other programs), in per cent of all six tensors.
(Each process of Tessera keeps 64 MiB of it for reuse.)
"""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import tessera
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

SOURCES, DESTINATIONS = 4, 2
WORLD = SOURCES + DESTINATIONS


@dataclass(frozen=True)
class Change:
    name: str
    source_mesh: tuple[int, ...]
    source: tuple[Placement, ...]
    destination: tuple[Placement, ...]


CHANGES = (
    Change("rows-to-rows", (4,), (Shard(0),), (Shard(0),)),
    Change("rows-to-columns", (4,), (Shard(0),), (Shard(1),)),
    Change("replicated-rows-to-columns", (2, 2), (Replicate(), Shard(0)), (Shard(1),)),
    Change("rows-to-replicas", (4,), (Shard(0),), (Replicate(),)),
    Change("columns-to-rows", (4,), (Shard(1),), (Shard(0),)),
)

Region = tuple[slice, slice]


def region(layout: tessera.Layout, shape: tuple[int, int], rank: int) -> Region:
    """What a rank owns: one interval for each dim, in these layouts."""
    owned = layout.owned(shape, rank)
    if owned is None:
        raise ValueError(f"rank {rank} owns nothing of {layout}")
    ((rows,), (columns,)) = owned
    return slice(*rows), slice(*columns)


def overlap(a: Region, b: Region) -> Region | None:
    both = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return None if any(each.start >= each.stop for each in both) else (both[0], both[1])


def within(part: Region, whole: Region) -> Region:
    """`part` in the coordinates of a local tensor that holds `whole`."""
    rows, columns = (slice(p.start - w.start, p.stop - w.start) for p, w in zip(part, whole, strict=True))
    return rows, columns


def kibibytes(file: str, field: str) -> int:
    """The value of `field` in a file of /proc, in bytes."""
    for line in pathlib.Path(file).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0


class Memory:
    """The most memory while it is watched, above what it was at first: this process's own, and the machine's shared."""

    def __init__(self) -> None:
        self.own = 0
        self.shared = 0

    @staticmethod
    def taken() -> tuple[int, int]:
        return kibibytes("/proc/self/status", "RssAnon"), kibibytes("/proc/meminfo", "Shmem")

    @contextmanager
    def watched(self) -> Iterator[None]:
        (own, shared), over = self.taken(), threading.Event()

        def watch() -> None:
            while not over.wait(0.002):
                own_now, shared_now = self.taken()
                self.own, self.shared = max(self.own, own_now - own), max(self.shared, shared_now - shared)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class Process:
    """One of the six processes, for one change."""

    def __init__(self, rank: int, change: Change, shape: tuple[int, int], digest: bool, groups: Groups) -> None:
        self.rank, self.change, self.shape, self.digest, self.groups = rank, change, shape, digest, groups
        self.sends = rank < SOURCES
        source = tessera.Layout(tessera.Mesh(change.source_mesh), change.source)
        destination = tessera.Layout(tessera.Mesh((DESTINATIONS,)), change.destination).shifted(SOURCES)
        self.layout = source if self.sends else destination
        self.regions = [region(source if r < SOURCES else destination, shape, r) for r in range(WORLD)]
        self.mine = self.regions[rank]
        sizes = [each.stop - each.start for each in self.mine]
        self.tensor = tessera.zeros(sizes, torch.bfloat16) if self.sends else torch.zeros(sizes, dtype=torch.bfloat16)
        self.tensor.copy_(self.expected()) if self.sends else self.tensor.fill_(-1)

    def expected(self) -> torch.Tensor:
        rows, columns = self.mine
        r = torch.arange(rows.start, rows.stop, dtype=torch.int32)[:, None]
        c = torch.arange(columns.start, columns.stop, dtype=torch.int32)[None, :]
        return ((r * 7 + c) % 251).to(torch.bfloat16)

    # --- the ways to do it: each object is made once, and called for every repetition

    def tessera(self, mode: Literal["inplace", "staged"] = "inplace") -> Callable[[], object]:
        role, peer = ("trainer", "inference") if self.sends else ("inference", "trainer")
        rank, world = (self.rank, SOURCES) if self.sends else (self.rank - SOURCES, DESTINATIONS)
        bus = tessera.connect(
            "bench",
            role=role,
            peer=peer,
            rank=rank,
            world=world,
            namespace=f"{self.change.name}-{mode}",
            digest=self.digest,
            threads=1,
        )
        layout = self.layout if self.sends else self.layout.shifted(-SOURCES)
        tensors = {"w": (self.tensor, layout, self.shape)}
        batch = bus.register(tensors, mode=mode, direction="send" if self.sends else "recv")
        self.close = bus.close
        return batch.send if self.sends else batch.recv

    def tessera_staged(self) -> Callable[[], object]:
        return self.tessera("staged")

    def point_to_point(self) -> Callable[[], object]:
        """Each destination takes a region from the first rank that holds it; replicas take turns."""
        holders: dict[str, list[int]] = {}
        for rank in range(SOURCES):
            holders.setdefault(str(self.regions[rank]), []).append(rank)
        routes = []
        for number, destination in enumerate(range(SOURCES, WORLD)):
            for ranks in holders.values():
                source = ranks[number % len(ranks)]
                if part := overlap(self.regions[source], self.regions[destination]):
                    routes.append((source, destination, part))

        def transfer() -> None:
            pending = []
            for source, destination, part in routes:
                if self.rank == source:
                    piece = self.tensor[within(part, self.mine)].contiguous()
                    pending.append((dist.isend(piece, destination), piece, None))
                elif self.rank == destination:
                    place = self.tensor[within(part, self.mine)]
                    piece = (
                        place
                        if place.is_contiguous()
                        else torch.empty_like(place, memory_format=torch.contiguous_format)
                    )
                    pending.append((dist.irecv(piece, source), piece, place))
            for work, piece, place in pending:
                work.wait()
                if place is not None and place is not piece:
                    place.copy_(piece)

        return transfer

    def gather_and_broadcast(self) -> Callable[[], object]:
        def transfer() -> None:
            full = torch.empty(self.shape, dtype=torch.bfloat16) if self.rank in (0, *range(SOURCES, WORLD)) else None
            if self.sends:
                pieces = [torch.empty_like(self.tensor) for _ in range(SOURCES)] if self.rank == 0 else None
                dist.gather(self.tensor, pieces, dst=0, group=self.groups.sources)
                if full is not None and pieces is not None:
                    for rank, piece in enumerate(pieces):
                        full[self.regions[rank]] = piece
                    dist.send(full, SOURCES)
            elif full is not None:
                if self.rank == SOURCES:
                    dist.recv(full, 0)
                dist.broadcast(full, SOURCES, group=self.groups.destinations)
                self.tensor.copy_(full[self.mine])

        return transfer

    def distributed_checkpoint(self) -> Callable[[], object]:
        group = self.groups.sources if self.sends else self.groups.destinations
        mesh = self.groups.meshes[self.change.source_mesh if self.sends else (DESTINATIONS,)]
        placements = self.change.source if self.sends else self.change.destination
        tensor = DTensor.from_local(
            self.tensor, mesh, placements, shape=torch.Size(self.shape), stride=(self.shape[1], 1)
        )

        def transfer() -> None:
            if self.sends:
                checkpoint.save({"w": tensor}, checkpoint_id=self.groups.folder, process_group=group)
            dist.barrier()
            if not self.sends:
                checkpoint.load({"w": tensor}, checkpoint_id=self.groups.folder, process_group=group)
            dist.barrier()
            if self.rank == 0:
                shutil.rmtree(self.groups.folder)

        return transfer

    def close(self) -> None: ...


class Groups:
    """gloo groups and meshes, made once: a mesh costs descriptors and threads."""

    def __init__(self, folder: str) -> None:
        self.folder = folder + "/checkpoint"
        self.sources = dist.new_group(list(range(SOURCES)))
        self.destinations = dist.new_group(list(range(SOURCES, WORLD)))
        self.meshes = {
            (4,): DeviceMesh("cpu", torch.arange(4), _init_backend=True),
            (2, 2): DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=True),
            (2,): DeviceMesh("cpu", torch.arange(4, 6), _init_backend=True),
        }


METHODS = ("tessera", "tessera_staged", "point_to_point", "gather_and_broadcast", "distributed_checkpoint")


class Result(NamedTuple):
    """The result of one rank."""

    change: str
    method: str
    times: list[float]
    extra: float  # of its tensor
    shared: int  # bytes
    size: int  # of its tensor, bytes
    good: bool


def work(rank: int, options: argparse.Namespace, folder: str, results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    groups = Groups(folder)
    for change in CHANGES:
        if options.only in change.name:
            for method in METHODS:
                results.put(measure(rank, change, method, options, groups))
                gc.collect()  # free its tensors before the next one's memory is measured
                dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, change: Change, method: str, options: argparse.Namespace, groups: Groups) -> Result:
    shape = (options.size * (1 << 20) // 2 // options.width, options.width)
    process = Process(rank, change, shape, options.digest, groups)
    memory, times = Memory(), []
    dist.barrier()  # all tensors are ready
    with memory.watched():
        dist.barrier()
        transfer = getattr(process, method)()
        for _ in range(options.repeat + 1):
            dist.barrier()
            start = time.perf_counter()
            transfer()
            dist.barrier()
            times.append(time.perf_counter() - start)
    good = process.sends or torch.equal(process.tensor, process.expected())
    process.close()
    size = process.tensor.nbytes
    return Result(change.name, method, times[1:], memory.own / size, memory.shared, size, good)


def report(options: argparse.Namespace, said: list[Result]) -> bool:
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    digest = "on" if options.digest else "off"
    print(f"{options.size} MiB of bf16, width {options.width}, digest {digest}, 4 to 2 processes")
    print(f"{cores} CPUs, load {load:.1f}, torch {torch.__version__}, tessera {tessera.__version__}\n")
    print(f"{'change':28} {'way':24} {'GB/s':>7} {'min':>7} {'max':>7} {'x':>7} {'extra %':>8} {'shared %':>8}")
    good = True
    for change in CHANGES:
        delivered = options.size * (1 << 20) * (DESTINATIONS if change.destination == (Replicate(),) else 1)
        ours = 0.0
        for method in METHODS:
            rows = [row for row in said if (row.change, row.method) == (change.name, method)]
            if len(rows) < WORLD:
                continue
            rates = sorted(
                delivered / seconds / 1e9 for seconds in map(max, zip(*(row.times for row in rows), strict=True))
            )
            rate = statistics.median(rates)
            ours = rate if method == "tessera" else ours
            shared = max(row.shared for row in rows) / sum(row.size for row in rows)
            right = all(row.good for row in rows)
            good = good and right
            print(
                f"{change.name:28} {method:24} {rate:7.2f} {rates[0]:7.2f} {rates[-1]:7.2f} {ours / rate:7.1f} "
                f"{100 * max(row.extra for row in rows):8.1f} {100 * shared:8.1f}{'' if right else '  WRONG'}"
            )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="MiB of the matrix")
    parser.add_argument("--width", type=int, default=8192, help="columns")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions that count, after one that does not")
    parser.add_argument("--digest", action="store_true", help="let Tessera check what arrives")
    parser.add_argument("--only", default="", help="changes whose name holds this")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds; what has been measured is shown then")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-", dir="/dev/shm") as folder:
        os.environ["TESSERA_RUNTIME_DIR"] = folder
        results = mp.get_context("spawn").SimpleQueue()
        context = mp.spawn(work, (options, folder, results), WORLD, join=False)
        said: list[Result] = []
        end, ended = time.monotonic() + options.limit, False
        try:
            while not ended and time.monotonic() < end:
                ended = context.join(timeout=0.2)
                while not results.empty():
                    said.append(results.get())
        finally:
            for process in context.processes:
                process.kill()
    good = report(options, said)
    if not ended:
        print(f"the processes had not ended after {options.limit:.0f} s", file=sys.stderr)
    return 0 if good and ended else 1


if __name__ == "__main__":
    raise SystemExit(main())
