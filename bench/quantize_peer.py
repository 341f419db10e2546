#!/usr/bin/env python3
"""tessera.quantize() compared with torchao's code for the same format, on one thread of one CPU.

    PYTHONPATH=build/cpu/python .venv/bin/python bench/quantize_peer.py [--rows 2048] [--columns 4096] [--repeat 5]

The process binds itself to that CPU. GB/s count the bf16 input. torchao runs eagerly; its scales are rounded up (RCEIL)
if it offers that, as Tessera's are. Both sides compute the amax of NVFP4 outside the measured time. Median of REPEAT
runs, in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import tessera
import torch

sys.path.append(f"{sys.prefix}/peers")  # where scripts/lib.sh puts torchao


def seconds(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def compare(name: str, x: torch.Tensor, ours: Callable[[], Any], theirs: Callable[[], Any], repeat: int) -> None:
    ours()
    theirs()
    runs = [(seconds(ours), seconds(theirs)) for _ in range(repeat)]
    fast, slow = (statistics.median(column) for column in zip(*runs, strict=True))
    size = x.numel() * x.element_size() * 1e-9
    print(f"{name:24} tessera {size / fast:6.2f} GB/s   torchao {size / slow:6.3f} GB/s   {slow / fast:6.1f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    except ImportError as error:
        sys.exit(f"torchao is not there ({error}): scripts/test.sh installs it, or: pip install --no-deps torchao")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    x = torch.randn(args.rows, args.columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    amax = tessera.amax(x)
    scale = per_tensor_amax_to_scale(torch.tensor(amax))

    def quantize(format: str, **options: Any) -> Callable[[], Any]:
        return lambda: tessera.quantize(x, format, planes="row", **options)

    mode = ScaleCalculationMode.RCEIL
    compare("mxfp8, row plane", x, quantize("mxfp8"), lambda: to_mx(x, torch.float8_e4m3fn, 32, mode), args.repeat)
    compare(
        "nvfp4 1x16, row plane",
        x,
        quantize("nvfp4", scaling="1x16", amax=amax),
        lambda: nvfp4_quantize(x, 16, scale),
        args.repeat,
    )


if __name__ == "__main__":
    main()
