#!/usr/bin/env python3
"""A training step with ETP on two processes, as a picture: what is computed, what moves meanwhile, what is waited for.

    PYTHONPATH=build/cpu/python python bench/etp_step.py --svg docs/guide/etp-step.svg

Three blocks of an MLP between an embedding and a head, fp32, AdamW, one thread a process; everything is copied, and
prefetched one use ahead. Of `--steps` steps, the shortest one is drawn, which others on the machine disturbed least; a
row for each:

- compute: what torch's dispatcher runs, by phase; timed in Python, which takes some microseconds an operation;
- gather, fold: the operations of the schedule's log, as `tessera etp trace` gives them: a gather has one for each rank
  whose rows it reads, a fold adds the gradients of all ranks to this rank's rows;
- wait: calls of the runtime that took longer than 50 us: for a weight that has not arrived, at the end of the backward,
  around the optimiser's step.

A browser shows name and length of what the pointer is over.
"""

from __future__ import annotations

import argparse
import html
import json
import multiprocessing
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from tessera import etp
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 2
BLOCKS, WIDTH, WORDS, TOKENS = 3, 512, 4000, (2, 65)
LIMIT = 600.0  # seconds
SHORTEST = 50_000  # ns, of a wait
WAITS = ("acquire", "gradient_buffer", "drain", "begin_update", "end_update")
COLOURS = {
    "forward": "#1f6feb",
    "backward": "#8250df",
    "optimizer": "#57606a",
    "gather": "#2da44e",
    "fold": "#bf8700",
    "wait": "#d1242f",
}
ROWS = ("compute", "gather", "fold", "wait")


class Span(NamedTuple):
    rank: int
    row: str
    colour: str
    name: str
    begin: int  # ns of CLOCK_MONOTONIC
    end: int


class Operations(TorchDispatchMode):
    """When torch ran what, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.ran: list[tuple[str, str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.monotonic_ns()
        result = func(*args, **(kwargs or {}))
        self.ran.append((self.phase, str(func), begin, time.monotonic_ns()))
        return result


class Timed:
    """A runtime whose calls are timed."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.took: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runtime, name)
        if name not in WAITS:
            return found

        def timed(*args: Any) -> Any:
            begin = time.monotonic_ns()
            try:
                return found(*args)
            finally:
                self.took.append((name, begin, time.monotonic_ns()))

        return timed


def built() -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )
        for _ in range(BLOCKS)
    ]
    return torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), *blocks, torch.nn.Linear(WIDTH, WORDS, bias=False))


def train(group: etp.Group, steps: int) -> tuple[list[tuple[int, int]], list[Span]]:
    """Begin and end of each step, and this rank's spans but gathers and folds."""
    model = built()
    etp.shard_module_(model, group)
    optimizer = torch.optim.AdamW(model.parameters())
    sharded = next(each for each in model.parameters() if isinstance(each, etp.LogicalTensor)).etp.model
    runtime = Timed(sharded.runtime)
    sharded.runtime = runtime  # type: ignore[assignment]
    operations, times = Operations(), []
    with operations:
        for step in range(steps):
            tokens = torch.randint(WORDS, TOKENS, generator=torch.Generator().manual_seed(RANKS * step + group.rank))
            begin = time.monotonic_ns()
            operations.phase = "forward"
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            operations.phase = "backward"
            loss.backward()
            operations.phase = "optimizer"
            optimizer.step()
            optimizer.zero_grad()
            times.append((begin, time.monotonic_ns()))
    computed = [Span(group.rank, "compute", phase, name, begin, end) for phase, name, begin, end in operations.ran]
    waited = [
        Span(group.rank, "wait", "wait", name, begin, end)
        for name, begin, end in runtime.took
        if end - begin > SHORTEST
    ]
    etp.unshard_(model)  # its log is complete
    return times, computed + waited


def work(rank: int, steps: int, log: str, results: Any) -> None:
    torch.set_num_threads(1)
    etp.update_config(prefetch="on", schedule_log=log, map_weights=False)
    with etp.init_group(store="auto", rank=rank, size=RANKS) as group:
        results.put(train(group, steps))


def run(steps: int, folder: pathlib.Path) -> list[tuple[list[tuple[int, int]], list[Span]]]:
    """Of each rank."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    log = str(folder / "{rank}.etplog")
    workers = [context.Process(target=work, args=(rank, steps, log, results)) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    try:
        return [results.get(timeout=LIMIT) for _ in range(RANKS)]
    except queue.Empty:
        sys.exit(f"etp_step.py: no result in {LIMIT:.0f} s")
    finally:
        for worker in workers:
            worker.join(10)
            worker.terminate()


def moved(folder: pathlib.Path) -> list[Span]:
    """Gathers and folds of all ranks, from the logs in a folder."""
    trace = folder / "trace.json"
    logs = [str(folder / f"{rank}.etplog") for rank in range(RANKS)]
    command = [sys.executable, "-m", "tessera", "etp", "trace", *logs, "-o", str(trace)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    drawn = json.loads(trace.read_text())
    zero = int(drawn["otherData"]["zero_ns"])
    spans = []
    for event in drawn["traceEvents"]:
        if event["ph"] == "X" and event["name"] in ("gather", "fold"):
            begin = zero + round(event["ts"] * 1000)
            end = begin + round(event["dur"] * 1000)
            spans.append(Span(event["pid"], event["name"], event["name"], event["args"]["subject"], begin, end))
    return spans


def merged(spans: Iterable[Span], gap: int) -> list[Span]:
    """Neighbours of a row and colour with less than `gap` ns between them as one, so that the picture stays small."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.rank, span.row, span.begin)):
        last = found[-1] if found else None
        if last and last[:3] == span[:3] and span.begin - last.end < gap:
            name = last.name if span.name in last.name else f"{last.name}, {span.name}"
            found[-1] = last._replace(end=max(last.end, span.end), name=name)
        else:
            found.append(span)
    return found


def picture(spans: list[Span], begin: int, end: int) -> str:
    """As SVG: four rows for each rank."""
    width, left, height, gap, top = 1000, 110, 18, 5, 46
    scale = (width - left - 15) / (end - begin)

    def y(rank: int, row: str) -> int:
        return top + rank * (len(ROWS) * (height + gap) + 22) + ROWS.index(row) * (height + gap)

    bottom = y(RANKS - 1, ROWS[-1]) + height + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 36}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{bottom + 36}" fill="#ffffff"/>'
    ]
    at = left
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{at}" y="12" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{at + 17}" y="22">{name}</text>')
        at += 105
    milliseconds = (end - begin) / 1e6
    tick = next(each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000) if milliseconds / each <= 12)
    for each in range(0, int(milliseconds) + 1, tick):
        x = left + each * 1e6 * scale
        parts.append(f'<path d="M{x:.1f} {top - 6}V{bottom}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{each}</text>')
    parts.append(f'<text x="{(width + left) / 2}" y="{bottom + 32}" text-anchor="middle">ms</text>')
    for rank in range(RANKS):
        for row in ROWS:
            label = f"rank {rank}  {row}" if row == ROWS[0] else row
            parts.append(f'<text x="{left - 8}" y="{y(rank, row) + 13}" text-anchor="end">{label}</text>')
    for span in spans:
        from_, to = max(span.begin, begin), min(span.end, end)
        if to <= from_:
            continue
        name = span.name if len(span.name) <= 60 else span.name[:60] + " ..."
        title = f"{span.colour}: {name}: {(span.end - span.begin) / 1000:.0f} us"
        parts.append(
            f'<rect x="{left + (from_ - begin) * scale:.2f}" y="{y(span.rank, span.row)}" '
            f'width="{max((to - from_) * scale, 0.3):.2f}" height="{height}" fill="{COLOURS[span.colour]}">'
            f"<title>{html.escape(title)}</title></rect>"
        )
    return "\n".join([*parts, "</svg>", ""])


def summary(spans: list[Span], begin: int, end: int) -> str:
    """As Markdown: the time of each row within the step, in ms."""
    lines = ["| rank | " + " | ".join(ROWS) + " | step |", "|---|" + "---|" * (len(ROWS) + 1)]
    for rank in range(RANKS):
        sums = [
            sum(max(0, min(each.end, end) - max(each.begin, begin)) for each in spans if (each.rank, each.row) == key)
            for key in ((rank, row) for row in ROWS)
        ]
        cells = " | ".join(f"{each / 1e6:.1f}" for each in (*sums, end - begin))
        lines.append(f"| {rank} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="of the training; the first five are not drawn")
    parser.add_argument("--svg", type=pathlib.Path, help="file for the picture")
    options = parser.parse_args()
    if options.steps < 6:
        parser.error(f"--steps {options.steps}: at least 6 are needed")
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as name:
        folder = pathlib.Path(name)
        os.environ |= {"TESSERA_RUNTIME_DIR": name, "TESSERA_NAMESPACE": "bench"}
        found = run(options.steps, folder)
        spans = [span for _, others in found for span in others] + moved(folder)
    steps = [
        (min(begin for begin, _ in each), max(end for _, end in each))
        for each in zip(*(times for times, _ in found), strict=True)
    ][5:]
    begin, end = min(steps, key=lambda step: step[1] - step[0])
    within = [each for each in spans if each.end > begin and each.begin < end]
    print(summary(within, begin, end))
    if options.svg:
        options.svg.write_text(picture(merged(within, (end - begin) // 1500), begin, end))


if __name__ == "__main__":
    main()
