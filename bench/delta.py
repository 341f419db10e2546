#!/usr/bin/env python3
"""The benefit of deltas: bytes and time of real fine-tuning steps in bf16, and of matrices that change at random.

    PYTHONPATH=build/cpu/python python bench/delta.py
    PYTHONPATH=build/cpu/python python bench/delta.py --random 256 --share 1e-4 1e-3 1e-2 1e-1

One process sends to another, in place, as a batch with deltas and as one without. MiniLM (of examples/weight_sync) is
fine-tuned with AdamW on fp32 weights, which are cast to bf16 for each version. `changed` is the share of elements whose
bits differ from the version before, `bytes` the share of bytes that are read, as deltas and in full. Times are those of
a send() and its recv(), the median over the steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import tessera
import torch

LIMIT = 120.0
BATCHES = {"delta": True, "full": False}
State = dict[str, torch.Tensor]


def register(bus: tessera.Bus, states: dict[str, State], direction: tessera.Direction) -> dict[str, tessera.Batch]:
    return {name: bus.register(states[name], name, delta=delta, direction=direction) for name, delta in BATCHES.items()}


def connect(role: str, peer: str, digest: bool) -> tessera.Bus:
    return tessera.connect(
        "delta",
        role=role,
        peer=peer,
        rank=0,
        world=1,
        namespace="bench",
        agent="embedded",
        timeout=LIMIT,
        digest=digest,
    )


def receive(shapes: dict[str, tuple[int, ...]], versions: int, digest: bool) -> None:
    """Both batches must receive the same bits."""
    states = {
        name: {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()} for name in BATCHES
    }
    with connect("inference", "trainer", digest) as bus:
        batches = register(bus, states, "recv")
        for version in range(1, versions + 1):
            for batch in batches.values():
                batch.recv(min_version=version)
            for key in shapes:
                if not torch.equal(*(bits(states[name][key]) for name in BATCHES)):
                    sys.exit(f"version {version}: {key} differs")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def measure(title: str, state: State, steps: int, change: Callable[[int], None], digest: bool) -> None:
    """Sends `state` as it is and after each of `steps` changes; prints a line for each, and their medians."""
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(shapes, steps + 1, digest))
    receiver.start()
    elements = sum(tensor.numel() for tensor in state.values())
    times: dict[str, list[float]] = {name: [] for name in BATCHES}
    shares: list[tuple[float, float]] = []
    with connect("trainer", "inference", digest) as bus:
        batches = register(bus, dict.fromkeys(BATCHES, state), "send")
        for step in range(steps + 1):
            before = {key: tensor.clone() for key, tensor in state.items()}
            if step > 0:
                change(step)
            differing = sum(int((bits(before[key]) != bits(tensor)).sum()) for key, tensor in state.items())
            earlier = batches["delta"].stats
            for name, batch in batches.items():
                begin = time.perf_counter()
                batch.send(version=step + 1)
                times[name].append(time.perf_counter() - begin)
            if step == 0:
                continue  # all of it, either way
            now = batches["delta"].stats
            saved = (now.delta_full_bytes - earlier.delta_full_bytes) - (now.delta_bytes - earlier.delta_bytes)
            shares.append((differing / elements, 1 - saved / (2 * elements)))
            print(f"  step {step}: {shares[-1][0]:.5f} changed, {shares[-1][1]:.4f} of the bytes", flush=True)
    receiver.join(LIMIT)
    if receiver.exitcode != 0:
        sys.exit("the receiver has failed")
    delta, full = (1e3 * statistics.median(times[name][1:]) for name in BATCHES)
    changed, share = (statistics.median(column) for column in zip(*shares, strict=True))
    print(
        f"{title}: {changed:.5f} changed, {share:.4f} of {2 * elements / 1e6:.0f} MB; "
        f"{delta:.1f} ms with deltas, {full:.1f} ms without"
    )


# --- fine-tuning


def fine_tuning(rate: float) -> tuple[State, Callable[[int], None]]:
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples" / "weight_sync"))
    from loss import contrastive_loss
    from model import pretrained
    from text import pairs
    from train import PAIRS

    torch.manual_seed(0)
    model = pretrained().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    text = pairs()
    order: Iterator[int] = iter(torch.randperm(len(text)).tolist() * 100)
    state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.named_parameters()}

    def change(_step: int) -> None:
        contrastive_loss(model, [text[next(order)] for _ in range(4 * PAIRS)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, tensor in model.named_parameters():
            state[name].copy_(tensor.detach())

    return state, change


# --- matrices that change at random


def random_changes(megabytes: int, share: float) -> tuple[State, Callable[[int], None]]:
    generator = torch.Generator().manual_seed(0)
    rows = max(megabytes * 1_000_000 // (2 * 4096 * 4), 1)
    state = {f"w{i}": torch.randn(rows, 4096, generator=generator).to(torch.bfloat16) for i in range(4)}

    def change(_step: int) -> None:
        for tensor in state.values():
            flipped = torch.rand(tensor.shape, generator=generator) < share
            bits(tensor).bitwise_xor_(flipped.to(torch.int16))

    return state, change


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rate", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4], help="learning rates")
    parser.add_argument("--random", type=int, metavar="MB", help="no fine-tuning: matrices of so many megabytes")
    parser.add_argument(
        "--share", type=float, nargs="+", default=[0, 1e-4, 1e-2, 0.1, 0.5], help="that changes of them"
    )
    parser.add_argument("--no-digest", action="store_true", help="do not check what arrives")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as folder:
        os.environ["TESSERA_RUNTIME_DIR"] = folder
        for value in options.rate if options.random is None else options.share:
            title = f"learning rate {value:g}" if options.random is None else f"share {value:g}"
            state, change = fine_tuning(value) if options.random is None else random_changes(options.random, value)
            measure(title, state, options.steps, change, not options.no_digest)


if __name__ == "__main__":
    main()
