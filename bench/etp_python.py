#!/usr/bin/env python3
"""What tessera.etp adds to a step of a model: CPU time of the training thread, next to plain torch and the core.

    PYTHONPATH=build/cpu/python python bench/etp_python.py
    PYTHONPATH=build/cpu/python python bench/etp_python.py --ranks 2 --json

A chain of small linear layers is trained sharded and unsharded, and the core's calls of such a step are made by
themselves, in turn. The calling thread's CPU time is counted (waits cost none), of the fastest batch of ten steps,
since other load only adds to it. `python` is what the package adds to the other two. To reach: 20 us for a use of a
weight, in forward and in backward, and 4 ms for a step of 100 weights.

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
from tessera.etp.views import model_of

LIMIT = 60.0
BATCH = 10
WARM = 5  # steps, in which the plan and the pools of buffers settle
USE, STEP = 20.0, 40.0  # us a weight, to reach
CONTENDERS = ("plain", "core", "etp")
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

    def least(self, part: str) -> float:
        taken = self.parts[part][WARM:]
        return min((statistics.median(taken[i : i + BATCH]) for i in range(0, len(taken), BATCH)), default=0.0)


class Core:
    """The core's calls of a step, with nothing around them."""

    def __init__(self, group: etp.Group, options: argparse.Namespace) -> None:
        self.runtime = tessera._core.EtpRuntime(group.of_model().core)
        rows = columns = options.width
        names = [f"{i}.weight" for i in range(options.weights)]
        self.weights = [self.runtime.add(name, rows, columns, "f32", options.format) for name in names]
        self.runtime.start()

    def step(self, clock: Clock) -> None:
        runtime = self.runtime
        with clock.part("forward"):
            for weight in self.weights:
                runtime.acquire(weight, "fwd", 0, True, True, None)
        with clock.part("backward"):
            for weight in reversed(self.weights):
                runtime.acquire(weight, "bwd", 0, False, False, None)
                runtime.produce(runtime.gradient_buffer(weight, 0)[0])
        with clock.part("its end"):
            runtime.drain()
        with clock.part("optimiser"):
            runtime.begin_update(self.weights)
            runtime.end_update()


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
    clocks = {name: Clock() for name in CONTENDERS}
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
        core = Core(group, options)
        optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
        for _ in range(WARM + options.repeat):
            for contender, model in models.items():
                step(model, optimizers[contender], x, clocks[contender])
            core.step(clocks["core"])
        report = etp.report(models["etp"])
    return {
        "us": {name: {part: clock.least(part) for part in PARTS} for name, clock in clocks.items()},
        "uses": report.consumptions,
        "gathered on demand": report.on_demand,
    }


def show(options: argparse.Namespace, found: dict[str, Any]) -> None:
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, tessera {tessera.__version__}; {os.cpu_count()} CPUs, load {load:.1f}")
    print(f"{options.weights} weights [{options.width}, {options.width}], ranks {options.ranks}, this is rank 0")
    print(f"us of CPU of one thread, of {options.repeat} steps\n")
    print("".join(f"{head:>10}" for head in ("", *CONTENDERS, "python", "a weight", "to reach")))
    whole = dict.fromkeys(CONTENDERS, 0.0)
    for part in PARTS:
        taken = {name: found["us"][name][part] for name in CONTENDERS}
        whole = {name: whole[name] + taken[name] for name in CONTENDERS}
        line(part, taken, options.weights, USE if part in ("forward", "backward") else None)
    line("in all", whole, options.weights, STEP)


def line(part: str, taken: dict[str, float], weights: int, goal: float | None) -> None:
    python = taken["etp"] - taken["plain"] - taken["core"]
    to_reach = "" if goal is None else f"{goal:.0f}"
    figures = "".join(f"{taken[name]:>10.0f}" for name in CONTENDERS)
    print(f"{part:>10}{figures}{python:>10.0f}{python / weights:>10.1f}{to_reach:>10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the weights")
    parser.add_argument("--weights", type=int, default=100)
    parser.add_argument("--width", type=int, default=32, help="rows and columns of a weight")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=100, help="steps, a multiple of 10")
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
