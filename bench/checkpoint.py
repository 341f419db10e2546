#!/usr/bin/env python3
"""How fast ranks save and load a checkpoint together, beside as many processes without anything in common.

    PYTHONPATH=build/cpu/python python bench/checkpoint.py                  # 1 GB of ETP weights on 2 ranks
    PYTHONPATH=build/cpu/python python bench/checkpoint.py --megabytes 64 --rounds 3 --folder /dev/shm

Every rank holds an equal part of the rows of each weight. In turns, all ranks call `tessera.checkpoint.save()`, and
each process writes the same bytes by `write_safetensors()` into a file of its own: what the machine gives. Both end
with the bytes on the disk, in a folder that holds those of the round before. The slowest process counts. `ratio` is the
plain time over that of save(), of each pair of turns; to reach: 0.8. Loads are from the page cache, beside reading the
rows with `readinto()`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import tessera
import torch
import torch.distributed
import torch.multiprocessing
from tessera import checkpoint, etp

_COLUMNS = 2048


def slowest(work: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    torch.distributed.barrier()
    begin = time.monotonic()
    work()
    taken = torch.tensor(time.monotonic() - begin)
    torch.distributed.all_reduce(taken, torch.distributed.ReduceOp.MAX)
    return float(taken)


def model_of(weights: int, megabytes: int) -> torch.nn.Module:
    rows = max(1, megabytes * (1 << 20) // (4 * _COLUMNS * weights))
    model = torch.nn.Module()
    for number in range(weights):
        model.register_parameter(f"weight{number}", torch.nn.Parameter(torch.full((rows, _COLUMNS), float(number))))
    return model


def read_all(path: str, into: torch.Tensor) -> None:
    with open(path, "rb", buffering=0) as file:
        view = memoryview(into.numpy()).cast("B")
        while view:
            view = view[file.readinto(view) :]


def measure(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(arguments.port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=arguments.ranks)
    with etp.init_group() as group:
        model = etp.shard_module_(model_of(arguments.weights, arguments.megabytes), group)
        rows = {name: etp.local(parameter) for name, parameter in model.named_parameters()}
        total = sum(tensor.numel() * 4 for tensor in rows.values())
        views = [(name, "f32", tuple(tensor.shape), tensor.data_ptr()) for name, tensor in rows.items()]
        own = os.path.join(folder, f"plain-{rank}.safetensors")
        buffer = torch.empty(total // 4)
        times: dict[str, list[float]] = {"save": [], "plain": [], "load": [], "read": []}
        for round in range(arguments.rounds + 1):
            turns: dict[str, Callable[[], Any]] = {
                "save": lambda: checkpoint.save(model, None, os.path.join(folder, "saved")),
                "plain": lambda: tessera._core.write_safetensors(own, views, {}),
            }
            reads: dict[str, Callable[[], Any]] = {
                "load": lambda: checkpoint.load(model, None, os.path.join(folder, "saved")),
                "read": lambda: read_all(own, buffer),
            }
            for each in (turns, reads):
                for name in sorted(each, reverse=round % 2 == 1):
                    taken = slowest(each[name])
                    if round > 0:  # the first one makes files, and pages
                        times[name].append(taken)
        if rank == 0:
            report(times, total * arguments.ranks)
    torch.distributed.destroy_process_group()


def report(times: dict[str, list[float]], total: int) -> None:
    for ours, plain in (("save", "plain"), ("load", "read")):
        for name in (ours, plain):
            middle = statistics.median(times[name])
            spread = f"{min(times[name]):.3f} to {max(times[name]):.3f}"
            print(f"{name:6} {middle:.3f} s ({spread}), {total / middle / 1e9:.2f} GB/s")
        ratios = [b / a for a, b in zip(times[ours], times[plain], strict=True)]
        print(f"{ours} / {plain}: ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1024, help="of all ranks together")
    parser.add_argument("--weights", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where files are written; default: a temporary one")
    parser.add_argument("--port", type=int, default=29533)
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="tessera-bench-", dir=arguments.folder)
    print(f"{arguments.megabytes} MiB on {arguments.ranks} ranks, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    try:
        torch.multiprocessing.spawn(measure, (arguments, folder), arguments.ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
