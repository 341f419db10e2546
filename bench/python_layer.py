#!/usr/bin/env python3
"""What the Python package adds to a steady-state transfer: its CPU time, next to that of the core's own calls.

    PYTHONPATH=build/cpu/python python bench/python_layer.py

Two processes transfer tensors of 16 bytes in place, as parameters of a module. The calling thread's CPU time is counted
(waits cost none), for `batch.send()` or `batch.recv()` and for the same through the core only; `adds` is the
difference. To reach: 10 us, and 0.3 us for each tensor.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

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
    call = getattr(batch._core, what)
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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tessera-", dir="/dev/shm") as folder:
        os.environ["TESSERA_RUNTIME_DIR"] = folder
        main()
