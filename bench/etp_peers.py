#!/usr/bin/env python3
"""Training steps with ETP compared with DDP, FSDP2, and what is possible: one model, on processes that share a machine.

    PYTHONPATH=build/cpu/python python bench/etp_peers.py                # 33 M parameters: half an hour
    PYTHONPATH=build/cpu/python python bench/etp_peers.py --quick        # 5 M parameters, some minutes
    PYTHONPATH=build/cpu/python python bench/etp_peers.py --ranks 2 --parts formats movement

A Llama-like model in fp32 and AdamW, one thread a process. Contenders (bench/training/contenders.py) have the same
weights at first, and the same tokens, which differ between ranks:

- ddp: DistributedDataParallel over gloo: a whole model on every rank;
- fsdp2-block: fully_shard(), a unit a block; fsdp2-weight: a unit a weight, as ETP has it; fsdp2-mixed: a unit a block,
  in bf16; over gloo;
- etp: shard_module_(); etp-copied: with map_weights=False; etp-bf16, etp-mxfp8, etp-nvfp4: the blocks' weights travel
  in that format, and are computed with in fp32; etp-mixed: all travel as bf16, and are computed with in bf16;
  etp-checkpoint: blocks are recomputed;
- ceiling: whole weights that nobody else writes, nothing sent, the optimiser on 1/N of the rows of each weight.

Parts: `small` and `large` are 1 and 4 sequences of 128 tokens a rank; `formats` compares what travels; in `movement`
streams are paced to 0.1 GB/s; in `prefetch` so that gathers take half of a step's time, with prefetch and without;
`clip` is of the norm of gradients. Paced gathers copy.

Contenders take turns in the same processes: a round is `--steps` steps of each, between two barriers, in an order that
is turned by one from round to round. `wall` is a step's time, `CPU` that of all threads of all ranks together,
`exposed` how long the rank that waited most waited for gathers. Ratios are medians of those of the same round, with the
least and the most; of the two kinds of FSDP2, targets count the better one. Where there are fewer CPUs than ranks, or
others use them, CPU time says more.

Before, the losses of the first steps, averaged over ranks, are compared with ddp's: the greatest relative difference is
shown, and where it is above the tolerance the figures mean nothing and the exit status is 1. A target that is missed is
marked, and changes no exit status.

`memory` is the most that all ranks take beyond what their processes had before the model was built, in steps after the
first: Pss of private and shared memory, sampled every 5 ms, of processes that run this contender only.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from typing import Any

import tessera
import torch
from training import targets
from training.figures import Figures, Memory, as_json, measured, remembered, table
from training.llama import built
from training.ranks import Entry, clip, run

PEERS = ["ceiling", "ddp", "fsdp2-block", "fsdp2-weight", "etp", "etp-copied"]
FORMATS = ["ddp", "fsdp2-mixed", "etp-mixed", "etp-bf16", "etp-mxfp8", "etp-nvfp4"]
PARTS = ["small", "large", "formats", "movement", "prefetch", "clip"]
SLOW = 1e8  # bytes a second: movement decides
QUICK = {"layers": 4, "width": 256, "hidden": 704, "words": 4096}


class Report:
    """What is printed, and what --json writes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.runs: list[dict[str, Any]] = []
        self.good = True
        self.missed = 0

    def say(self, line: str) -> None:
        if not self.options.json:
            print(line, flush=True)

    def add(
        self,
        size: int,
        part: str,
        figures: dict[str, Figures],
        memory: dict[str, Memory],
        verdicts: list[targets.Verdict],
    ) -> None:
        load = os.getloadavg()[0]
        self.say(f"{part}, {size} ranks; load {load:.1f}")
        for line in table(figures, memory) if figures else ():
            self.say(line)
        self.missed += targets.missed(verdicts, self.say)
        self.good = self.good and all(each.right for each in figures.values())
        found = [each._asdict() | {"reached": each.reached} for each in verdicts]
        shown = as_json(figures, memory)
        self.runs.append({"part": part, "ranks": size, "load": load, "contenders": shown, "targets": found})
        self.say("")


def entries(names: list[str], pace: float | None = None) -> list[Entry]:
    return [Entry(name, pace) for name in names]


def compare(size: int, options: argparse.Namespace, report: Report) -> None:
    """All parts that are asked for, with so many ranks."""
    one, four = copy.copy(options), copy.copy(options)
    one.batch, four.batch = 1, 4
    losses: list[float] | None = None
    if "small" in options.parts:
        figures = measured(size, entries(PEERS), one)
        memory = {name: remembered(size, name, one) for name in PEERS} if options.memory else {}
        verdicts = targets.against_peers(figures, small=True)
        report.add(size, "small", figures, memory, verdicts + (targets.of_memory(memory, size) if memory else []))
    if "large" in options.parts:
        names = [*PEERS, "etp-checkpoint"]
        figures = measured(size, entries(names), four)
        memory = {name: remembered(size, name, four) for name in ("etp", "etp-checkpoint")} if options.memory else {}
        verdicts = targets.against_peers(figures, small=False)
        verdicts += targets.of_checkpoints(figures, memory) if memory else []
        report.add(size, "large", figures, memory, verdicts)
    if "formats" in options.parts:
        figures = measured(size, entries(FORMATS), one)
        report.add(size, "formats", figures, {}, targets.of_formats(figures))
    if {"movement", "prefetch"} & set(options.parts):
        figures = measured(size, entries(["ddp", "etp-copied"]), one)
        losses = figures["ddp"].losses
        etp = figures["etp-copied"]
    if "movement" in options.parts:
        paced = measured(size, entries(["bf16", "nvfp4", "mixed", "mixed-nvfp4"], SLOW), one, losses)
        report.add(size, "movement", paced, {}, targets.of_movement(paced))
    if "prefetch" in options.parts:
        pace = etp.gathered / (statistics.median(etp.wall) / 2)
        paced = measured(size, entries(["ahead", "on-demand"], pace), one, losses)
        report.add(size, "prefetch", paced, {}, targets.of_prefetch(paced))
    if "clip" in options.parts:
        report.add(size, "clip", {}, {}, targets.of_clipping(run(clip, size, [], options)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help=f"a small model: {QUICK}")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1344, help="of the SwiGLU")
    parser.add_argument("--words", type=int, default=8000, help="of the vocabulary")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a contender in a round")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave memory out")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for the processes of one measurement")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    return options


def main() -> int:
    options = arguments()
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["training.ranks", "torch._dynamo", "torch.distributed.fsdp"]
    )
    count = sum(parameter.numel() for parameter in built(options).parameters())
    report = Report(options)
    report.say(f"{len(os.sched_getaffinity(0))} CPUs, torch {torch.__version__}, tessera {tessera.__version__}")
    report.say(f"{count / 1e6:.1f} M parameters, {options.rounds} rounds of {options.steps} steps of each\n")
    for size in options.ranks:
        compare(size, options, report)
    total = sum(len(each["targets"]) for each in report.runs)
    report.say(f"{total - report.missed} targets reached, {report.missed} missed")
    if options.json:
        print(json.dumps({"options": vars(options), "parameters": count, "runs": report.runs}, indent=1))
    if not report.good:
        print("losses differ by more than the tolerance: the figures mean nothing", file=sys.stderr)
    return 0 if report.good else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tessera-", dir="/dev/shm") as folder:
        os.environ["TESSERA_RUNTIME_DIR"] = folder
        raise SystemExit(main())
