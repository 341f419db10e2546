#!/usr/bin/env python3
"""Many updates of real vLLM servers: after each one, tokens are those of transformers, and memory stays as it is.

    python bench/engines/updates.py                                  # five architectures, on 1 and 2 ranks, 100 each
    python bench/engines/updates.py --models llama --ranks 2 --updates 20

Every version has other random weights. It is compared by greedy answers whose tokens are certain: transformers gives
the same in bf16, in fp32, and with weights that are a little off, and the likeliest token is 3 % ahead of the next.
`MB` is the memory of all workers (PSS) after a quarter of the updates, when all buffers are there, and at the end;
`bytes` the share of the checkpoint that each rank receives.

Needs vLLM for CPU; scripts/engines.sh has an environment with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python/tests/engines/with_vllm"))

import torch
import vllm_configs as configs
from tessera.engines.vllm import Trainer
from vllm_server import Reference, Server

MODELS = ("llama", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2")
# vLLM's kernel of rotary embeddings for CPUs takes the distance of heads for that of tokens, in the queries of latent
# attention. With its own PyTorch code in place of the kernel its tokens are those of transformers.
SERVED = {"deepseek_v2": ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}')}
LENGTH = 6  # tokens of an answer
ASKED = 2  # answers of each version


def configuration(name: str) -> configs.Configuration:
    """Large enough that most matrices of dense ones have 1 MiB on each of 2 ranks."""
    dense = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    # Of DeepSeek's own rank: vLLM's latent attention on CPUs knows no other one.
    latent = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    further = latent if name == "deepseek_v2" else heads | (dense if name in ("llama", "qwen3") else {})
    made = configs.configuration(name, 1, **further)
    return made if name in ("llama", "qwen3", "deepseek_v2") else made | {"hidden_size": 4 * made["head_dim"]}


def ask(server: Server, reference: Reference, version: int) -> tuple[int, list[str]]:
    """How many tokens were compared, and which answers differ."""
    differing, compared = [], 0
    for prompt, expected in reference.certain(version, LENGTH)[:ASKED]:
        compared += len(expected)
        found = server.tokens(prompt, LENGTH)
        if found != expected:
            differing.append(f"version {version}: {prompt} gives {found}, and {expected} with transformers")
    return compared, differing


def megabytes(server: Server) -> float:
    return sum(each["Pss"] for each in server.counts()) / 1e6


def updates(name: str, ranks: int, options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    made = configuration(name)
    configs.save_configuration(made, folder)
    torch.manual_seed(0)
    reference = Reference(folder)
    reference.model.save_pretrained(folder)
    weights = reference.fill(0)
    pauses: list[float] = []
    commits: list[float] = []
    wrong: list[str] = []
    memory: dict[int, float] = {}
    tokens = 0
    with (
        Server(folder, ranks, in_place=not options.packed, options=SERVED.get(name, ())) as server,
        Trainer(weights, {"server": server.url}, rank=0, world=1, timeout=600) as trainer,
    ):
        pids = [each["pid"] for each in server.counts()]
        begin = time.monotonic()
        for version in range(1, options.updates + 1):
            for key, each in reference.fill(version).items():
                weights[key].copy_(each)
            update = trainer.send(version)["server"]
            if not update.ok:
                wrong.append(f"version {version}: {update.error}")
                continue
            pauses.append(update.pause)
            commits.append(max(each.verdict.seconds for each in update.ranks if each.verdict))
            compared, differing = ask(server, reference, version)
            tokens += compared
            wrong += differing
            if version in (max(2, options.updates // 4), options.updates):
                memory[version] = megabytes(server)
        counts = server.counts()
        if [each["pid"] for each in counts] != pids:
            wrong.append("a worker was started again")
        seconds = time.monotonic() - begin
    whole = sum(each.nbytes for each in weights.values())
    return {
        "model": name,
        "ranks": ranks,
        "packed": options.packed,
        "updates": options.updates,
        "tokens": tokens,
        "wrong": wrong,
        "memory": list(memory.values()),
        "shares": [each["received"] / whole for each in counts],
        "planned": all(each["received"] == each["share"] for each in counts),
        "pause": statistics.median(pauses) * 1e3 if pauses else None,
        "commit": statistics.median(commits) * 1e3 if commits else None,
        "how": {each: getattr(update.ranks[0], each) for each in ("in_place", "exchanged", "rebuilt")},
        "seconds": seconds,
        "load": os.getloadavg()[0],
    }


def show(result: dict[str, Any]) -> None:
    shares = ", ".join(f"{each:.3f}" for each in result["shares"])
    memory = " to ".join(f"{each:.1f}" for each in result["memory"])
    planned = "" if result["planned"] else ", which is not its share"
    print(
        f"{result['model']}, {result['ranks']} ranks: {result['updates']} updates in {result['seconds']:.0f} s, "
        f"{result['tokens']} tokens, {len(result['wrong'])} wrong; {memory} MB; a rank receives {shares} of the "
        f"checkpoint{planned}; median pause {result['pause']:.0f} ms, {result['commit']:.1f} of it to install "
        f"{result['how']}; load {result['load']:.1f}",
        flush=True,
    )
    for each in result["wrong"][:5]:
        print(f"  {each}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--packed", action="store_true", help="linears packed for oneDNN, as vLLM does on CPUs")
    parser.add_argument("--json", type=pathlib.Path, help="file to add the figures to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    with tempfile.TemporaryDirectory(prefix="tessera-") as runtime:
        os.environ["TESSERA_RUNTIME_DIR"] = runtime  # read once
        for name, ranks in itertools.product(options.models, options.ranks):
            with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
                result = updates(name, ranks, options, pathlib.Path(folder))
            show(result)
            failed = failed or bool(result["wrong"]) or not result["tokens"]
            if options.json:
                with options.json.open("a") as file:
                    print(json.dumps(result), file=file)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
