#!/usr/bin/env python3
"""How long a version takes to be installed in a vLLM model, against vLLM's own layer-wise reload of the same weights.

    python bench/engines/install.py                    # 381 MB: as on GPUs, and with linears packed for oneDNN
    python bench/engines/install.py --layers 4         # smaller

In one process and one run: `pages` exchanges pages with staging memory, `copies` copies, and `reload` is vLLM's
initialize_layerwise_reload(), load_weights() and finalize_layerwise_reload(). `commit` is what requests wait for. What
is staged before, while they run, is received (here a copy) and built; `whole` is both. `copy` is one torch copy of as
many bytes. The first update, which proves each layer, does not count. Memory: the most that a commit takes beyond what
is there before it, and the staging buffer. Afterwards every parameter must be what a reload leaves.

Needs vLLM for CPU; scripts/engines.sh has an environment with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python/tests/engines/with_vllm"))

import torch
import vllm_configs as configs
import vllm_models as models
from tessera import engines
from tessera.engines._pages import StagedPages
from tessera.engines.vllm._layers import plan_of
from tessera.engines.vllm._meta import on_meta

Checkpoint = Mapping[str, torch.Tensor]
MEGABYTE = 1e6


def configuration(layers: int) -> configs.Configuration:
    """A Llama of 300 MB with 14 layers."""
    return configs.configuration(
        "llama",
        0,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=16000,
    )


class Copied:
    """A batch that receives by copying."""

    def __init__(self, learned: engines.LearnedMap, staged: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
        self.learned, self.staged, self.checkpoint, self.version = learned, staged, checkpoint, 0

    def recv(self, min_version: int | None = None, *, timeout: float | None = None) -> int:
        for key, memory in self.staged.items():
            part: Any = self.learned.map(key)
            memory.copy_(self.checkpoint[part.name][part.source or ...])
        self.version += 1
        return self.version


def memory_of_this_process(what: str) -> float:
    """VmRSS or VmHWM, in MB."""
    found = re.search(rf"{what}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / MEGABYTE


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def figures(seconds: list[float]) -> dict[str, float]:
    return {"best": min(seconds) * 1e3, "median": statistics.median(seconds) * 1e3}


class Model:
    """One of vLLM's, loaded and processed as when it serves."""

    def __init__(self, config: Any, model: Any, checkpoint: Checkpoint) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        self.config, self.model = config, model
        model.load_weights(iter(checkpoint.items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))

    def reload(self, checkpoint: Checkpoint) -> None:
        from vllm.model_executor.model_loader import reload

        reload.initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(checkpoint.items()))
        reload.finalize_layerwise_reload(self.model, self.config.model_config)

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, and what packed linears compute."""
        found = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        generator = torch.Generator().manual_seed(0)
        for name, layer in self.model.named_modules():
            if hasattr(layer, "cpu_linear") and hasattr(layer, "input_size"):
                given = torch.randn(3, layer.input_size_per_partition, generator=generator).bfloat16()
                found[f"{name}()"] = layer.cpu_linear(given, layer.weight, None).clone()
        return found


def install(one: Model, first: Checkpoint, second: Checkpoint, pages: bool, repeat: int) -> dict[str, Any]:
    """Ends with `second`."""
    learned = engines.learn_map(one.model, first, meta=on_meta)
    held = StagedPages(lambda: models.tensors(one.model), learned) if pages else None
    staged = held.staged if held is not None else learned.staging()
    source = Copied(learned, staged, first)

    def plan(memory: Mapping[str, torch.Tensor]) -> engines.Plan:
        made = plan_of(one.model, learned, memory, one.config.model_config.dtype)
        return made if held is None else held.applied(made)

    live = engines.LiveWeights(lambda: models.tensors(one.model), learned, source, staged, plan=plan)
    stage, commit, extra = [], [], []
    for turn in range(2 * repeat + 2):
        source.checkpoint = second if turn % 2 else first
        verdict = live.stage()
        assert verdict.ok, verdict
        gc.collect()
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        before = memory_of_this_process("VmRSS")
        committed = live.commit()
        assert committed.ok, committed
        if turn >= 2:  # the first one proves each layer
            stage.append(verdict.seconds)
            commit.append(committed.seconds)
            extra.append(memory_of_this_process("VmHWM") - before)
    assert live.plan is not None
    return {
        "commit": figures(commit),
        "whole": figures([before + after for before, after in zip(stage, commit, strict=True)]),
        "extra": max(extra),
        "staging": sum(each.nbytes for each in staged.values()) / MEGABYTE,
        "copied": len(live.plan.pieces),
        "changes": len(live.plan.changes),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    made = configuration(options.layers)
    first, second = (models.random_checkpoint(made, seed) for seed in (1, 2))
    with models.loaded_form(made, port=models.free_port()) as (config, model):
        one = Model(config, model, first)
        result: dict[str, Any] = {
            "linears": "packed" if options.packed else "as loaded",
            "megabytes": sum(each.nbytes for each in first.values()) / MEGABYTE,
            "load": os.getloadavg()[0],
            "threads": torch.get_num_threads(),
        }
        reloads = []
        for turn in range(options.repeat + 1):
            reloads.append(timed(lambda turn=turn: one.reload(second if turn % 2 else first)))
        result["reload"] = figures(reloads[1:])
        for name, pages in (("copies", False), ("pages", True)):
            result[name] = install(one, first, second, pages, options.repeat)
            for what in ("commit", "whole"):
                result[name][f"{what} share"] = result[name][what]["median"] / result["reload"]["median"]
        mine = one.state()
        one.reload(second)
        wanted = one.state()
        result["differing"] = [name for name, each in wanted.items() if not torch.equal(each, mine[name])]
        result["compared"] = len(wanted)
    there, here = torch.empty(int(result["megabytes"] * MEGABYTE), dtype=torch.uint8), None
    here = torch.ones_like(there)
    result["copy"] = figures([timed(lambda: there.copy_(here)) for _ in range(options.repeat + 1)][1:])
    return result


def show(result: dict[str, Any]) -> None:
    print(
        f"\nLlama of {result['megabytes']:.0f} MB, linears {result['linears']}; {result['threads']} threads, "
        f"load {result['load']:.1f}"
    )
    print(f"{'ms':<16} {'best':>8} {'median':>8}  of the reload")
    for name in ("reload", "copy"):
        print(f"{name:<16} {result[name]['best']:>8.1f} {result[name]['median']:>8.1f}")
    for name in ("copies", "pages"):
        found = result[name]
        for what in ("commit", "whole"):
            times = "".join(f" {found[what][each]:>8.1f}" for each in ("best", "median"))
            print(f"{name + ', ' + what:<16}{times}  1/{1 / found[f'{what} share']:.1f}")
        print(f"{'':<16} memory beyond a staging buffer of {found['staging']:.0f} MB: {found['extra']:.0f} MB")
    print(f"{len(result['differing'])} of {result['compared']} differ from what the reload leaves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--packed", action="store_true", help="only with linears packed, as vLLM does on CPUs")
    parser.add_argument("--unpacked", action="store_true", help="only as on GPUs")
    parser.add_argument("--json", type=pathlib.Path, help="file to add the figures to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not (options.packed or options.unpacked):  # one process cannot do both
        for way in ("--unpacked", "--packed"):
            status = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, *sys.argv, way])
            if status:
                sys.exit(status)
        return
    if options.unpacked:
        from tessera.engines.vllm._register import keep_linears_unpacked

        keep_linears_unpacked()
    result = measure(options)
    show(result)
    if options.json:
        with options.json.open("a") as file:
            print(json.dumps(result), file=file)
    sys.exit(1 if result["differing"] else 0)


if __name__ == "__main__":
    main()
