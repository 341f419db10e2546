#!/usr/bin/env python3
"""A step of etp.Muon, whose matrices are orthogonalised by one rank each, next to every rank doing all of it.

    PYTHONPATH=build/cpu/python python bench/etp_muon.py
    PYTHONPATH=build/cpu/python python bench/etp_muon.py --ranks 4 --json

Square matrices of 33 M parameters, fp32, one thread a rank. `all` is a step of torch.optim.Muon on the whole model, on
every rank at once, as with DDP; `etp` is one of etp.Muon on the sharded model, with its update, from the moment that
all ranks begin until all have ended. Both are made in turn, and the ratio is the median of the pairs'. To reach: 0.65
with 2 ranks, 0.4 with 4. `exchange` is a step of the sharded model without any iteration: what moving matrices costs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from tessera import etp

LIMIT = 900.0  # seconds
WARM = 1
TARGETS = {2: 0.65, 4: 0.4}


def built(options: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(options.width, options.width, bias=False) for _ in range(options.matrices)]
    return torch.nn.Sequential(*layers)


def measured(rank: int, options: argparse.Namespace) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    whole, model = built(options), built(options)
    with etp.init_group(store="auto", rank=rank, size=options.ranks, name=options.run, timeout=LIMIT) as group:
        etp.shard_module_(model, group, min_elements=0)
        for plain, sharded in zip(whole.parameters(), model.parameters(), strict=True):
            plain.grad = torch.randn(plain.shape)
            sharded.grad = etp.from_local(torch.randn(etp.local(sharded).shape), like=sharded)
        optimizers: dict[str, torch.optim.Optimizer] = {
            "all": torch.optim.Muon(whole.parameters(), lr=1e-3, ns_steps=options.ns_steps),
            "etp": etp.Muon(model.parameters(), lr=1e-3, ns_steps=options.ns_steps),
            "exchange": etp.Muon(model.parameters(), lr=0.0, ns_steps=0),
        }
        taken: dict[str, list[float]] = {name: [] for name in optimizers}
        for step in range(WARM + options.repeat):
            for name, optimizer in optimizers.items():
                group.core.exchange("begin", b"")
                begin = time.monotonic()
                optimizer.step()
                group.core.exchange("end", b"")
                if step >= WARM:
                    taken[name].append((time.monotonic() - begin) * 1e3)
    return taken


def show(ranks: int, options: argparse.Namespace, taken: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [own / whole for own, whole in zip(taken["etp"], taken["all"], strict=True)]
    found = {
        "ranks": ranks,
        "parameters": options.matrices * options.width**2,
        "ms": {name: statistics.median(each) for name, each in taken.items()},
        "ratio": statistics.median(ratios),
        "spread": (min(ratios), max(ratios)),
        "to reach": TARGETS.get(ranks),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    if options.json:
        print(json.dumps(found))
    else:
        times = ", ".join(f"{name} {value:.0f} ms" for name, value in found["ms"].items())
        print(
            f"{ranks} ranks, {options.matrices} matrices of {options.width}^2: {times}; ratio {found['ratio']:.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}), to reach {found['to reach']}; {found['cores']} cores, load "
            f"{found['load']:.1f}",
            flush=True,
        )
    return found


def work(rank: int, options: argparse.Namespace, into: Any) -> None:
    into.put((rank, measured(rank, options)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="default: 2 and 4")
    parser.add_argument("--matrices", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--ns-steps", type=int, default=5, help="iterations: with fewer, moving matrices weighs more")
    parser.add_argument("--repeat", type=int, default=5, help="steps of each that are counted")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for ranks in options.ranks or list(TARGETS):
        with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
            os.environ["TESSERA_RUNTIME_DIR"] = folder
            each = argparse.Namespace(**vars(options) | {"ranks": ranks, "run": f"muon-{os.getpid()}-{ranks}"})
            into = context.Queue()
            processes = [context.Process(target=work, args=(rank, each, into), daemon=True) for rank in range(ranks)]
            for process in processes:
                process.start()
            taken = dict(into.get(timeout=LIMIT) for _ in processes)
            for process in processes:
                process.join(LIMIT)
        show(ranks, options, taken[0])


if __name__ == "__main__":
    main()
