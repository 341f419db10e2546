#!/usr/bin/env python3
"""Maps that are learned from vLLM's loaders: how long it takes, and whether they write what the loader writes.

    python bench/engines/maps.py                          # random configurations of 14 architectures, 1 and 2 ranks
    python bench/engines/maps.py --seeds 1 2 3 --ranks 2

Every rank is a process. The status is 1 if one bit differs.

Needs vLLM for CPU; scripts/engines.sh has an environment with it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python/tests/engines/with_vllm"))

import vllm_configs as configs
import vllm_maps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=configs.ARCHITECTURES, default=list(configs.ARCHITECTURES))
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--seeds", nargs="+", type=int, default=(1,))
    options = parser.parse_args()
    failed = False
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"{'model':<12} seed ranks tensors pieces {'ms':>6}  shares, what is computed, what differs")
    for ranks in options.ranks:
        for seed in options.seeds:
            found = vllm_maps.compare_all(options.models, seed, ranks)
            failed = failed or any(each["differing"] for each in found) or len(found) < ranks * len(options.models)
            for first in found[: len(options.models)]:
                same = [each for each in found if each["model"] == first["model"]]
                slowest = max(each["milliseconds"] for each in same)
                shares = ", ".join(f"{each['share']:.3f}" for each in same)
                counts = f"{seed:>4} {ranks:>5} {first['tensors']:>7} {first['pieces']:>6} {slowest:>6.0f}"
                differing = [each["differing"] for each in same]
                computed = first["computed"] or "nothing"
                print(f"{first['model']:<12} {counts}  {shares}; {computed}; {differing}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
