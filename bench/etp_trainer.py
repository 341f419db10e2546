#!/usr/bin/env python3
"""Hugging Face's Trainer with ETP, compared with DDP, FSDP2 and one process: tokens a second, memory, and losses.

    scripts/ecosystem.sh python bench/etp_trainer.py              # 21 M parameters on 2 ranks: five minutes on 2 cores
    scripts/ecosystem.sh python bench/etp_trainer.py --ranks 2 3 --rounds 5

A Llama of transformers in fp32, AdamW, gradients clipped, one thread a process; `Trainer` as it is released. A step has
the same samples on any number of ranks. Contenders:

- one: a process with all samples of a step;
- ddp: what Trainer does by itself, over gloo;
- fsdp2: TrainingArguments(fsdp="full_shard", fsdp_config={"version": 2}), a unit a layer, over gloo;
- etp: Trainer(model=etp.shard_module_(model, etp.init_group())).

They run one after another in processes of their own, in an order that is turned by one from round to round. `tokens/s`
is of the median step behind the first ones, over all ranks. `CPU` is what all threads of all ranks take for a step; it
says more where others use the machine. `memory` is the most that all ranks take together beyond what their processes
had before the model was built, so with what torch and transformers allocate at first: Pss of private and shared memory,
sampled every 5 ms. `losses` is the greatest difference from those of one process, over all steps. Ratios are medians of
those of the same round. Exit status 1: ETP's losses are not those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

CONTENDERS = ("one", "ddp", "fsdp2", "etp")
WARM = 3  # steps that are not measured
BOUND = 2e-6  # two of the last bits of a loss of 9, in float32
INTERVAL = 0.005  # seconds
LIMIT = 900.0  # seconds
LENGTH = 128  # tokens of a sample


def _memory() -> int:
    found = re.findall(r"^Pss_(?:Anon|Shmem): *(\d+) kB$", pathlib.Path("/proc/self/smaps_rollup").read_text(), re.M)
    return sum(map(int, found)) * 1024


class Peak:
    """The most memory that this process takes from now on, in bytes."""

    def __init__(self) -> None:
        self.before = self.most = _memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self.most = max(self.most, _memory())

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most - self.before


def train(contender: str, folder: pathlib.Path, options: argparse.Namespace) -> None:
    """Train as one rank, and write its figures."""
    import torch
    import transformers

    torch.set_num_threads(1)

    class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(options.words, (LENGTH,), generator=torch.Generator().manual_seed(number))
            return {"input_ids": tokens, "labels": tokens}

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.used: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())
            self.used.append(time.process_time())

        on_train_end = on_step_begin

    world = int(os.environ.get("WORLD_SIZE", "1"))
    chosen: dict[str, Any] = {}
    if contender == "fsdp2":
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        chosen = {"fsdp": "full_shard", "fsdp_config": {"version": 2, **layers}}
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=options.samples // world,
        max_steps=options.steps,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=3e-4,
        **chosen,
    )
    peak = Peak()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.words,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if contender == "etp":
        from tessera import etp

        model = etp.shard_module_(model, etp.init_group())
    clock = Clock()
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Samples(), callbacks=[clock])
    trainer.train()
    figures = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "step": statistics.median(
            end - begin for begin, end in zip(clock.times[WARM:], clock.times[WARM + 1 :], strict=False)
        ),
        "cpu": (clock.used[-1] - clock.used[WARM]) / (len(clock.used) - 1 - WARM),
        "memory": peak.end(),
    }
    (folder / f"{arguments.process_index}.json").write_text(json.dumps(figures))


def run(contender: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a contender, in processes of its own."""
    ranks = 1 if contender == "one" else ranks
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    sizes = ("steps", "samples", "layers", "width", "words")
    given = [f"--{name}={getattr(options, name)}" for name in sizes]
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
        command = [*launcher, __file__, *given, "--contender", contender, "--folder", folder]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TESSERA_RUNTIME_DIR": f"{folder}/run",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode != 0:
            sys.exit(f"{contender} failed:\n{done.stdout}\n{done.stderr}")
        found = [json.loads((pathlib.Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "parameters": found[0]["parameters"],
        "tokens": options.samples * LENGTH / max(each["step"] for each in found),
        "cpu": sum(each["cpu"] for each in found),
        "memory": sum(each["memory"] for each in found),
        "losses": found[0]["losses"],
    }


def compare(ranks: int, options: argparse.Namespace) -> bool:
    """Print the table of so many ranks; tell whether ETP's losses are those of one process."""
    rounds: list[dict[str, dict[str, Any]]] = []
    for turn in range(options.rounds):
        order = CONTENDERS[turn % 4 :] + CONTENDERS[: turn % 4]
        rounds.append({contender: run(contender, ranks, options) for contender in order})
    expected = rounds[0]["one"]["losses"]
    print(f"{rounds[0]['one']['parameters'] / 1e6:.1f} M parameters, {ranks} ranks; load {os.getloadavg()[0]:.1f}")
    print(f"{'':8}{'tokens/s':>10}{'to ddp':>8}{'least':>8}{'most':>8}", end="")
    print(f"{'CPU, s':>10}{'to ddp':>8}{'memory, MB':>12}{'to ddp':>8}{'losses':>10}")
    right = True
    for name in CONTENDERS:
        speeds, used, kept = (
            [each[name][what] / each["ddp"][what] for each in rounds] for what in ("tokens", "cpu", "memory")
        )
        cpu, memory = (statistics.median(each[name][what] for each in rounds) for what in ("cpu", "memory"))
        apart = max(abs(a - b) for each in rounds for a, b in zip(each[name]["losses"], expected, strict=True))
        right = right and (name != "etp" or apart <= BOUND)
        tokens = statistics.median(each[name]["tokens"] for each in rounds)
        ratios = f"{statistics.median(speeds):8.2f}{min(speeds):8.2f}{max(speeds):8.2f}"
        print(f"{name:8}{tokens:10.0f}{ratios}{cpu:10.2f}{statistics.median(used):8.2f}", end="")
        print(f"{memory / 1e6:12.0f}{statistics.median(kept):8.2f}{apart:10.1e}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=6, help="of a step, over all ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--words", type=int, default=8192)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender is not None:
        train(options.contender, options.folder, options)
        return 0
    right = [compare(ranks, options) for ranks in options.ranks]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
