#!/usr/bin/env python3
"""What the Python package adds to a steady-state transfer: its CPU time, next to that of the core's own calls.

    PYTHONPATH=build/cpu/python python bench/python_layer.py

Two processes transfer tensors of 16 bytes in place, as parameters of a module. The calling thread's CPU time is counted
(waits cost none), for `batch.send()` or `batch.recv()` and for the same through the core only; `adds` is the
difference. To reach: 10 us, and 0.3 us for each tensor.

Then dicts of 10,000 and 100,000 NumPy arrays are registered. To reach: 0.3 s and 3 s in all, with the other process's
registering on the other CPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy
import tessera
import torch

ROLES = {"send": ("trainer", "inference"), "recv": ("inference", "trainer")}
LIMIT = 60.0


def registered(bus: tessera.Bus, count: int) -> tessera.Batch:
    model = torch.nn.Module()
    for index in range(count):
        model.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(4)))
    batch = bus.register(model)
    batch._keeps = model  # type: ignore[attr-defined]
    return batch


def through_core(batch: tessera.Batch, what: str) -> Callable[[], Any]:
    call = getattr(batch._attachment.require_core(), what)
    return lambda: call(None, None).wait(None)


def connect(what: str, count: int) -> tessera.Bus:
    role, peer = ROLES[what]
    return tessera.connect(
        f"layer{count}",
        role=role,
        peer=peer,
        rank=0,
        world=1,
        namespace="bench",
        store="auto",
        agent="embedded",
        timeout=LIMIT,
    )


def other_end(what: str, counts: list[int], transfers: int) -> None:
    for count in counts:
        with connect(what, count) as bus:
            batch = registered(bus, count)
            for _ in range(transfers):
                getattr(batch, what)()


def register_arrays(what: str, count: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds, and seconds of the core, to register a dict of NumPy arrays."""
    arrays = {f"layers.{index}.weight": numpy.zeros(4, numpy.float32) for index in range(count)}
    with connect(what, count) as bus:
        begin, cpu = time.monotonic(), time.process_time()
        batch = bus.register(arrays, direction=what)  # type: ignore[arg-type]
        taken = time.monotonic() - begin, time.process_time() - cpu, batch.stats.register_seconds
        batch.close()
    return taken


def measure_registering() -> None:
    print(f"{'NumPy arrays':>12}{'s to register':>15}{'of CPU':>10}{'of the core':>13}")
    for count in (10_000, 100_000):
        process = multiprocessing.get_context("spawn").Process(target=register_arrays, args=("recv", count))
        process.start()
        whole, cpu, core = register_arrays("send", count)
        print(f"{count:>12}{whole:>15.2f}{cpu:>10.2f}{core:>13.2f}")
        process.join(LIMIT)


def seconds(call: Callable[[], Any], repeat: int) -> float:
    """CPU time of one call: from the fastest batch of ten, since other load only adds to it."""
    taken = []
    for _ in range(repeat // 10):
        begin = time.thread_time()
        for _ in range(10):
            call()
        taken.append((time.thread_time() - begin) / 10)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=300, help="transfers each way, a multiple of 10")
    options = parser.parse_args()
    counts = [1, 10, 100, 1000]
    print(f"torch {torch.__version__}, tessera {tessera.__version__}; us of CPU a transfer, of one thread\n")
    print(f"{'':4}  {'tensors':>8}{'package':>10}{'core':>10}{'adds':>10}")
    for what, other in (("send", "recv"), ("recv", "send")):
        transfers = 2 * options.repeat + 10
        process = multiprocessing.get_context("spawn").Process(target=other_end, args=(other, counts, transfers))
        process.start()
        added = []
        for count in counts:
            with connect(what, count) as bus:
                batch = registered(bus, count)
                package = getattr(batch, what)
                for _ in range(10):
                    package()
                with_package = seconds(package, options.repeat)
                alone = seconds(through_core(batch, what), options.repeat)
                added.append(1e6 * (with_package - alone))
                print(f"{what:4}  {count:>8}{1e6 * with_package:>10.1f}{1e6 * alone:>10.1f}{added[-1]:>10.1f}")
        print(f"{what:4}  {added[0]:.1f} us, and {(added[-1] - added[0]) / (counts[-1] - counts[0]):.2f} us a tensor\n")
        process.join(LIMIT)
    measure_registering()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tessera-", dir="/dev/shm") as folder:
        os.environ["TESSERA_RUNTIME_DIR"] = folder
        main()
