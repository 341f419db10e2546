#!/usr/bin/env python3
"""What tessera.etp adds to a step of a model: CPU time of the training thread, next to that of plain torch.

    PYTHONPATH=build/cpu/python python bench/etp_python.py
    PYTHONPATH=build/cpu/python python bench/etp_python.py --ranks 2 --json

A chain of small linear layers is trained sharded and unsharded, a step of each in turn. The calling thread's CPU time is
counted (waits cost none, other threads of the runtime are not in it), so `adds` is Python's share and that of the core's
calls together. To reach: 20 us for a use of a weight, in forward and in backward, and 4 ms for a step of 100 weights.

With one rank the weights have a format, as they would else be left as they are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tessera
import torch
from tessera import etp
from tessera.etp._views import model_of

LIMIT = 60.0
WARM = 5  # steps, in which the plan and the pools of buffers settle
USE, STEP = 20.0, 40.0  # us a weight, to reach
PARTS = ("forward", "backward", "its end", "optimiser")


class Clock:
    """CPU microseconds of this thread, by part of a step."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {part: [] for part in PARTS}
        self.within = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.within, begin = 0.0, time.thread_time_ns()
        yield
        self.parts[name].append((time.thread_time_ns() - begin) / 1e3 - self.within)

    def apart(self, name: str, call: Callable[[], Any]) -> Callable[[], None]:
        """What is done within a part, and counted by itself."""

        def timed() -> None:
            begin = time.thread_time_ns()
            call()
            self.within = (time.thread_time_ns() - begin) / 1e3
            self.parts[name].append(self.within)

        return timed

    def median(self, part: str) -> float:
        taken = self.parts[part][WARM:]
        return statistics.median(taken) if taken else 0.0


def built(options: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(options.width, options.width, bias=False) for _ in range(options.weights)]
    return torch.nn.Sequential(*layers)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, clock: Clock) -> None:
    with clock.part("forward"):
        loss = model(x).sum()
    with clock.part("backward"):
        loss.backward()
    with clock.part("optimiser"):
        optimizer.step()
    optimizer.zero_grad()


def measured(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    clocks = {"plain": Clock(), "etp": Clock()}
    models = {"plain": built(options), "etp": built(options)}
    name = f"bench-{options.run}"
    group = etp.init_group(store="auto", rank=rank, size=options.ranks, name=name, timeout=LIMIT)
    with group:
        formats = {".*weight": options.format} if options.format or options.ranks == 1 else None
        etp.shard_module_(models["etp"], group, formats=formats, min_elements=0)
        sharded = model_of(models["etp"])
        assert sharded is not None
        sharded.drain = clocks["etp"].apart("its end", sharded.drain)  # type: ignore[method-assign]
        x = torch.randn(options.tokens, options.width)
        optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
        for _ in range(WARM + options.repeat):
            for contender, model in models.items():
                step(model, optimizers[contender], x, clocks[contender])
        report = etp.report(models["etp"])
    return {
        "us": {name: {part: clock.median(part) for part in PARTS} for name, clock in clocks.items()},
        "uses": report.consumptions,
        "gathered on demand": report.on_demand,
    }


def show(options: argparse.Namespace, found: dict[str, Any]) -> None:
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, tessera {tessera.__version__}; {os.cpu_count()} CPUs, load {load:.1f}")
    print(f"{options.weights} weights [{options.width}, {options.width}], {options.ranks} ranks, rank 0")
    print(f"us of CPU of one thread; medians of {options.repeat} steps\n")
    print(f"{'':10}{'plain':>10}{'etp':>10}{'adds':>10}{'a weight':>10}{'to reach':>10}")
    total = dict.fromkeys(("plain", "etp"), 0.0)
    for part in PARTS:
        plain, ours = (found["us"][name][part] for name in ("plain", "etp"))
        total = {"plain": total["plain"] + plain, "etp": total["etp"] + ours}
        line(part, plain, ours, options.weights, USE if part in ("forward", "backward") else None)
    line("in all", total["plain"], total["etp"], options.weights, STEP)


def line(name: str, plain: float, ours: float, weights: int, goal: float | None) -> None:
    adds = ours - plain
    to_reach = "" if goal is None else f"{goal:.0f}"
    print(f"{name:10}{plain:>10.0f}{ours:>10.0f}{adds:>10.0f}{adds / weights:>10.1f}{to_reach:>10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the weights")
    parser.add_argument("--weights", type=int, default=100)
    parser.add_argument("--width", type=int, default=32, help="rows and columns of a weight")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=100, help="steps")
    parser.add_argument("--format", default="", help="what travels; default: the parameters' dtype")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args()
    options.run = os.getpid()
    if options.ranks == 1 and not options.format:
        options.format = "f32"
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=measured, args=(rank, options)) for rank in range(1, options.ranks)]
    for process in others:
        process.start()
    found = measured(0, options)
    for process in others:
        process.join(LIMIT)
    if options.json:
        print(json.dumps({"options": vars(options), "load": os.getloadavg()[0], **found}, indent=1))
    else:
        show(options, found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tessera-", dir="/dev/shm") as folder:
        os.environ["TESSERA_RUNTIME_DIR"] = folder
        main()
