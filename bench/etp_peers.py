#!/usr/bin/env python3
"""Training steps with ETP compared with DDP, FSDP2, and what is possible: one model, on processes that share a machine.

    PYTHONPATH=build/cpu/python python bench/etp_peers.py                    # 2 and 4 processes, about four minutes
    PYTHONPATH=build/cpu/python python bench/etp_peers.py --ranks 2 --width 512 --layers 8 --only etp

A Llama-like model in fp32 and AdamW, one thread a process. All contenders have the same weights at first, and the same
tokens, which differ between ranks:

- ddp: DistributedDataParallel over gloo: a whole model on every rank;
- fsdp2-block: fully_shard(), a unit a block; fsdp2-weight: a unit a weight, as ETP has it; over gloo;
- etp: shard_module_(); etp-bf16, etp-mxfp8, etp-nvfp4: the blocks' weights travel in that format, and are computed with
  in fp32;
- ceiling: whole weights that nobody else writes, nothing sent, the optimiser on 1/N of the rows of each weight.

Contenders take turns in the same processes: a round is `--steps` steps of each, between two barriers, in an order that
is turned by one from round to round. `wall` is a step's time, `CPU` that of all threads of all ranks together; `x` are
the medians of their ratios to the ceiling of the same round, with the least and the most. Where there are fewer CPUs
than ranks, or others use them, CPU time says more.

Before, the losses of the first steps, averaged over ranks, are compared with ddp's: the greatest relative difference is
shown, and where it is above the tolerance the figures mean nothing and the exit status is 1. (The ceiling's ranks train
apart: its first loss is compared.)

`memory` is the most that a rank takes beyond a process that has imported everything, in steps after the first: Pss of
private and shared memory, sampled every 5 ms, of processes that run this contender only; the mean of ranks. It includes
activations. `state` is what of it are parameters, gradients and the optimiser's state.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import tessera
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tessera import etp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

CHECKED = 5  # steps whose losses are compared; they warm the contenders up, too
BLOCKS = r"blocks\..*"


# --- the model


class Attention(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = rotated(q, rotation), rotated(k, rotation)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotation
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.before, self.between = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate, self.up = (torch.nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.before(x), rotation)
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(torch.nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, heads = options.width, options.heads
        self.embedding = torch.nn.Embedding(options.words, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads, options.hidden) for _ in range(options.layers))
        self.norm = torch.nn.RMSNorm(width)
        self.head = torch.nn.Linear(width, options.words, bias=False)
        size = width // heads // 2
        angles = torch.outer(torch.arange(options.tokens), 10_000.0 ** (-torch.arange(size) / size))
        self.rotation = angles.cos(), angles.sin()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.head(self.norm(x))


def built(options: argparse.Namespace) -> Llama:
    torch.manual_seed(1)
    return Llama(options)


# --- the contenders


class Contender:
    """A model and its optimiser. `losses` are this rank's."""

    def __init__(self, options: argparse.Namespace, model: torch.nn.Module) -> None:
        self.options = options
        self.model = model
        self.optimizer = self.optimizer_of(model)
        self.losses: list[float] = []

    def optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self) -> None:
        options = self.options
        generator = torch.Generator().manual_seed(len(self.losses) * dist.get_world_size() + dist.get_rank())
        even = torch.rand(options.batch, options.tokens + 1, generator=generator)
        words = (even**4 * options.words).long()  # some are frequent, which is learnt within a few steps
        loss = F.cross_entropy(self.model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        self.update()
        self.losses.append(loss.item())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> Iterator[torch.Tensor]:
        """What a rank keeps from step to step, and gradients."""
        for parameter in self.model.parameters():
            rows = parameter.to_local() if hasattr(parameter, "to_local") else etp.local(parameter.detach())
            yield from (rows, rows)  # a gradient is as large
        for state in self.optimizer.state.values():
            for each in state.values():
                yield each.to_local() if hasattr(each, "to_local") else each


class Ceiling(Contender):
    def optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        self.parts: list[tuple[torch.nn.Parameter, torch.nn.Parameter, slice]] = []
        for parameter in model.parameters():
            rows, share = parameter.shape[0], -(-parameter.shape[0] // dist.get_world_size())
            mine = slice(min(dist.get_rank() * share, rows), min((dist.get_rank() + 1) * share, rows))
            self.parts.append((parameter, torch.nn.Parameter(parameter.detach()[mine]), mine))
        return torch.optim.AdamW([part for _, part, _ in self.parts], lr=1e-3)

    def update(self) -> None:
        for parameter, part, mine in self.parts:
            part.grad = None if parameter.grad is None else parameter.grad[mine]
        super().update()
        self.model.zero_grad()


def ddp(options: argparse.Namespace, group: etp.Group) -> Contender:
    return Contender(options, DistributedDataParallel(built(options)))


def fsdp2(options: argparse.Namespace, units: Callable[[Llama], Iterable[torch.nn.Module]]) -> Contender:
    model = built(options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*units(model), model):
        fully_shard(unit, mesh=mesh)
    return Contender(options, model)


def fsdp2_block(options: argparse.Namespace, group: etp.Group) -> Contender:
    return fsdp2(options, lambda model: (*model.blocks, model.embedding, model.head))


def fsdp2_weight(options: argparse.Namespace, group: etp.Group) -> Contender:
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    return fsdp2(options, lambda model: [each for each in model.modules() if isinstance(each, kinds)])


def sharded(format: str | None) -> Callable[[argparse.Namespace, etp.Group], Contender]:
    def make(options: argparse.Namespace, group: etp.Group) -> Contender:
        formats = {BLOCKS: format} if format else None
        model = etp.shard_module_(built(options), group, formats=formats, compute_dtype=torch.float32)
        return Contender(options, model)

    return make


class Kind(NamedTuple):
    make: Callable[[argparse.Namespace, etp.Group], Contender]
    tolerance: float  # of losses, relative to ddp's


# Sums have another order; formats have 8, 3 and 1 bits of mantissa.
KINDS = {
    "ceiling": Kind(lambda options, group: Ceiling(options, built(options)), 1e-5),
    "ddp": Kind(ddp, 1e-5),
    "fsdp2-block": Kind(fsdp2_block, 1e-5),
    "fsdp2-weight": Kind(fsdp2_weight, 1e-5),
    "etp": Kind(sharded(None), 1e-5),
    "etp-bf16": Kind(sharded("bf16"), 1e-3),
    "etp-mxfp8": Kind(sharded("mxfp8"), 1e-2),
    "etp-nvfp4": Kind(sharded("nvfp4"), 5e-2),
}


# --- what a rank does


@contextmanager
def joined(rank: int, size: int, folder: str) -> Iterator[etp.Group]:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with etp.init_group() as group:
        yield group
        dist.barrier()
    dist.destroy_process_group()


def compete(rank: int, size: int, folder: str, names: list[str], options: argparse.Namespace, answer: Any) -> None:
    """Answers, by contender: its first losses, and (wall, CPU) seconds of a step, by round."""
    with joined(rank, size, folder) as group:
        contenders = {name: KINDS[name].make(options, group) for name in names}
        for contender in contenders.values():
            for _ in range(CHECKED):
                contender.step()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for number in range(options.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(timed(contenders[name], options.steps))
        losses = {name: contender.losses[:CHECKED] for name, contender in contenders.items()}
        answer.put((rank, {name: (losses[name], times[name]) for name in names}))


def timed(contender: Contender, steps: int) -> tuple[float, float]:
    gc.collect()
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contender.step()
    used = time.process_time() - cpu
    dist.barrier()
    return (time.perf_counter() - begin) / steps, used / steps


def remember(rank: int, size: int, folder: str, names: list[str], options: argparse.Namespace, answer: Any) -> None:
    """Answers the memory of one contender, and what of it is state; in bytes."""
    with joined(rank, size, folder) as group:
        warm_up()
        before = taken()
        contender = KINDS[names[0]].make(options, group)
        contender.step()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        most, over = 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.wait(0.005):
                most = max(most, taken())

        watcher = threading.Thread(target=watch, name="memory")
        watcher.start()
        for _ in range(CHECKED):
            contender.step()
        over.set()
        watcher.join()
        answer.put((rank, (most - before, sum(each.nbytes for each in contender.state()))))


def warm_up() -> None:
    """Imports what torch imports late, and starts its allocators."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    gc.collect()


def taken() -> int:
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = dict(line.split()[:2] for line in lines[1:])
    return (int(found["Pss_Anon:"]) + int(found["Pss_Shmem:"])) << 10


# --- the processes, and what they answer


def run(work: Callable[..., None], size: int, names: list[str], options: argparse.Namespace) -> list[Any]:
    """What work() answers on each rank."""
    context = multiprocessing.get_context("forkserver")
    answer = context.Queue()
    with tempfile.TemporaryDirectory(prefix="tessera-", dir="/dev/shm") as folder:
        arguments = [(rank, size, folder, names, options, answer) for rank in range(size)]
        ranks = [context.Process(target=work, args=each) for each in arguments]
        end = time.monotonic() + options.limit
        try:
            for process in ranks:
                process.start()
            found: dict[int, Any] = {}
            while len(found) < size:
                if any(process.exitcode for process in ranks) or time.monotonic() > end:
                    raise SystemExit(f"{', '.join(names)} on {size} ranks: not done, see above, or raise --limit")
                if not answer.empty():
                    rank, value = answer.get()
                    found[rank] = value
                time.sleep(0.05)
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in ranks:
                process.kill()
    return [found[rank] for rank in range(size)]


def measured(size: int, names: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures by contender."""
    ranks = run(compete, size, names, options)
    losses = {
        name: [statistics.fmean(step) for step in zip(*(r[name][0] for r in ranks), strict=True)] for name in names
    }
    rounds = {name: list(zip(*(rank[name][1] for rank in ranks), strict=True)) for name in names}
    wall = {name: [max(w for w, _ in each) for each in rounds[name]] for name in names}
    cpu = {name: [sum(c for _, c in each) for each in rounds[name]] for name in names}
    figures = {}
    for name in names:
        seen = 1 if name == "ceiling" else CHECKED
        differences = [abs(a / b - 1) for a, b in zip(losses[name][:seen], losses["ddp"][:seen], strict=True)]
        figures[name] = {
            "losses": losses[name],
            "difference": max(differences),
            "tolerance": KINDS[name].tolerance,
            "wall": wall[name],
            "cpu": cpu[name],
            "x wall": [a / b for a, b in zip(wall[name], wall["ceiling"], strict=True)],
            "x cpu": [a / b for a, b in zip(cpu[name], cpu["ceiling"], strict=True)],
        }
        if options.memory:
            memory = run(remember, size, [name], options)
            figures[name]["memory"] = statistics.fmean(each[0] for each in memory)
            figures[name]["state"] = statistics.fmean(each[1] for each in memory)
    return figures


def ratios(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def show(size: int, figures: dict[str, dict[str, Any]], load: tuple[float, float]) -> bool:
    print(f"{size} ranks; load {load[0]:.1f} before, {load[1]:.1f} after")
    heads = f"{'wall s':>8}{'CPU s':>8}{'x wall':>22}{'x CPU':>22}{'memory MB':>11}{'state MB':>10}{'difference':>12}"
    print(f"{'':14}{heads}{'tolerance':>11}")
    good = True
    for name, each in figures.items():
        right = each["difference"] <= each["tolerance"]
        good = good and right
        wall, cpu = statistics.median(each["wall"]), statistics.median(each["cpu"])
        memory, state = (f"{each[what] / 1e6:.1f}" if what in each else "" for what in ("memory", "state"))
        print(
            f"{name:14}{wall:>8.3f}{cpu:>8.3f}{ratios(each['x wall']):>22}{ratios(each['x cpu']):>22}{memory:>11}"
            f"{state:>10}{each['difference']:>12.1e}{each['tolerance']:>11.0e}{'' if right else '  LOSSES DIFFER'}"
        )
    print()
    return good


def chosen(options: argparse.Namespace) -> list[str]:
    """The ceiling and DDP are always there, to compare with."""
    return [name for name in KINDS if name in ("ceiling", "ddp") or options.only in name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=704, help="of the SwiGLU")
    parser.add_argument("--words", type=int, default=4096, help="of the vocabulary")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of a contender in a round")
    parser.add_argument("--only", default="", help="contenders whose name holds this, besides ceiling and ddp")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave memory out")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for the processes of one measurement")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["__main__", "torch._dynamo", "torch.distributed.fsdp"]
    )
    count = sum(parameter.numel() for parameter in built(options).parameters())
    found, good = [], True
    if not options.json:
        print(f"{len(os.sched_getaffinity(0))} CPUs, torch {torch.__version__}, tessera {tessera.__version__}")
        tokens = f"{options.batch} x {options.tokens}"
        print(f"{count / 1e6:.1f} M parameters, {tokens} tokens a rank, {options.rounds} rounds\n")
    for size in options.ranks:
        before = os.getloadavg()[0]
        figures = measured(size, chosen(options), options)
        load = before, os.getloadavg()[0]
        found.append({"ranks": size, "load": load, "contenders": figures})
        if not options.json:
            good = show(size, figures, load) and good
    if options.json:
        good = all(each["difference"] <= each["tolerance"] for one in found for each in one["contenders"].values())
        print(json.dumps({"options": vars(options), "parameters": count, "runs": found}, indent=1))
    if not good:
        print("losses differ by more than the tolerance: the figures mean nothing", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tessera-", dir="/dev/shm") as folder:
        os.environ["TESSERA_RUNTIME_DIR"] = folder
        raise SystemExit(main())
