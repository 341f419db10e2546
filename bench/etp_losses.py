#!/usr/bin/env python3
"""The same training with weights that travel as they are and quantised: loss curves, as a table and a picture.

    PYTHONPATH=build/cpu/python python bench/etp_losses.py --svg docs/guide/etp-losses.svg

The small Qwen of examples/generate (tied embeddings, tokens are bytes) learns the Zen of Python on 2 processes by
AdamW in fp32. Seeds, windows of text and their order are the same for every format. A loss is that of a step, in nats a
byte, over the windows of both ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import queue
import statistics
import sys
import tempfile
from typing import Any

import torch
from tessera import etp

FORMATS = ("fp32", "mxfp8", "nvfp4")  # fp32: as they are
COLOURS = ("#1f6feb", "#d1242f", "#2da44e")
RANKS = 2
ROWS = 4  # windows of text, for each rank and step
LEARNING_RATE = 3e-3
LIMIT = 1800.0  # seconds
AVERAGED = 10  # steps, in the table and in the picture
Curves = dict[str, list[float]]  # by format: the loss of every step


def train(group: etp.Group, format: str, steps: int) -> list[float]:
    """This rank's loss of every step."""
    from model import WINDOW, text, untrained

    model = untrained()
    formats = None if format == "fp32" else {r".*": format}
    etp.shard_module_(model, group, formats=formats)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    whole = text()
    generator = torch.Generator().manual_seed(group.rank)
    losses = []
    for _ in range(steps):
        begins = torch.randint(len(whole) - WINDOW, (ROWS, 1), generator=generator)
        rows = whole[begins + torch.arange(WINDOW)]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        etp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def work(rank: int, steps: int, results: Any) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples" / "generate"))
    with etp.init_group(store="auto", rank=rank, size=RANKS) as group:
        for format in FORMATS:
            results.put((format, train(group, format, steps)))


def run(steps: int) -> Curves:
    """By format: means over the ranks."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=work, args=(rank, steps, results)) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    found: dict[str, list[list[float]]] = {format: [] for format in FORMATS}
    try:
        for _ in range(RANKS * len(FORMATS)):
            format, losses = results.get(timeout=LIMIT)
            found[format].append(losses)
    except queue.Empty:
        sys.exit(f"etp_losses.py: no result in {LIMIT:.0f} s")
    finally:
        for worker in workers:
            worker.join(10)
            worker.terminate()
    return {format: [statistics.mean(each) for each in zip(*ranks, strict=True)] for format, ranks in found.items()}


def averaged(curve: list[float]) -> list[float]:
    """Of each AVERAGED steps."""
    return [statistics.mean(curve[at : at + AVERAGED]) for at in range(0, len(curve), AVERAGED)]


def table(curves: Curves) -> str:
    """As Markdown; a row for every sixth of the training."""
    steps = len(curves[FORMATS[0]])
    rows = sorted({max(1, round(steps / AVERAGED * part / 6)) for part in range(1, 7)})
    lines = ["| steps | " + " | ".join(FORMATS) + " |", "|---|" + "---|" * len(FORMATS)]
    for row in rows:
        cells = [f"{averaged(curves[format])[row - 1]:.3f}" for format in FORMATS]
        lines.append(f"| {(row - 1) * AVERAGED + 1} to {row * AVERAGED} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(curves: Curves) -> str:
    """As SVG: a line for each format."""
    width, height, left, bottom = 640, 320, 50, 40
    lines = {format: averaged(curves[format]) for format in FORMATS}
    top = max(max(line) for line in lines.values())
    count = len(lines[FORMATS[0]])

    def x(at: float) -> float:
        return left + (width - left - 20) * at / max(count - 1, 1)

    def y(loss: float) -> float:
        return height - bottom - (height - bottom - 20) * loss / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="#ffffff"/>'
    ]
    for loss in range(int(top) + 1):
        parts.append(f'<path d="M{left} {y(loss):.1f}H{width - 20}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for at in range(0, count, max(1, count // 6)):
        parts.append(f'<text x="{x(at):.1f}" y="{height - 22}" text-anchor="middle">{(at + 1) * AVERAGED}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 5}" text-anchor="middle">steps; loss in nats a byte</text>')
    for number, (format, line) in enumerate(lines.items()):
        points = " ".join(f"{x(at):.1f},{y(loss):.1f}" for at, loss in enumerate(line))
        colour = COLOURS[number]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{width - 90}" y="{36 + 18 * number}" fill="{colour}">{format}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help=f"of each training; a multiple of {AVERAGED}")
    parser.add_argument("--svg", type=pathlib.Path, help="file for the picture")
    parser.add_argument("--json", type=pathlib.Path, help="file for all losses")
    options = parser.parse_args()
    if options.steps < AVERAGED or options.steps % AVERAGED:
        parser.error(f"--steps {options.steps} is not a multiple of {AVERAGED}")
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as folder:
        os.environ |= {"TESSERA_RUNTIME_DIR": folder, "TESSERA_NAMESPACE": "bench"}
        curves = run(options.steps)
    print(table(curves))
    if options.svg:
        options.svg.write_text(picture(curves))
    if options.json:
        options.json.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
