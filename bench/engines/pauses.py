#!/usr/bin/env python3
"""How long a client of a real vLLM server waits for its next token while a version is installed.

    python bench/engines/pauses.py                    # a Llama of 381 MB on one rank, 10 updates
    python bench/engines/pauses.py --ranks 2
    python bench/engines/pauses.py --keep-caches      # requests that go on are not computed again

A client streams one answer after another. `usual` is the median time between two tokens before the first update, and
`gaps` are the longest ones in each update's pause, less that; `receiving` is the same for the time before, when the
version is received and requests run. They are compared with one copy of the bytes that a rank holds, in this process
and by one thread. vLLM keeps a CPU for each worker and one for its engine: if there are no more, whatever else takes
one delays tokens, and then several come at once.

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
import threading
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python/tests/engines/with_vllm"))

import torch
import vllm_configs as configs
import vllm_models as models
from install import configuration
from tessera.engines.vllm import Trainer
from vllm_server import Server

LENGTH = 400  # tokens of an answer
USUAL = 100  # before the first update


class Client:
    """Streams until stop()."""

    def __init__(self, server: Server) -> None:
        self.times: list[float] = []
        self._server = server
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._stream)
        self._thread.start()

    def _stream(self) -> None:
        for seed in itertools.count(5):
            for tokens in self._server.stream([seed % 100 + 3, 7, 9], LENGTH):
                if tokens:
                    self.times.append(time.monotonic())
                if self._stopping.is_set():
                    return

    def await_tokens(self, more: int) -> None:
        wanted = len(self.times) + more
        while len(self.times) < wanted:
            if not self._thread.is_alive():
                raise RuntimeError("the client has ended")
            time.sleep(0.01)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def longest(self, begin: float, end: float) -> float:
        """The longest time between two tokens of which a part lies within."""
        gaps = [after - before for before, after in itertools.pairwise(self.times) if after > begin and before < end]
        return max(gaps, default=0.0)


def measure(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    made = configuration(options.layers) | {"eos_token_id": None}
    configs.save_configuration(made, folder)
    torch.manual_seed(0)
    model: Any = models.hf_model(folder)
    model.save_pretrained(folder)
    weights = models.checkpoint_of(model)
    del model
    updates, spans = [], []
    with Server(folder, options.ranks, in_place=not options.packed) as server:
        client = Client(server)
        try:
            client.await_tokens(USUAL)
            usual = statistics.median(after - before for before, after in itertools.pairwise(client.times))
            with Trainer(
                weights, {"server": server.url}, rank=0, world=1, timeout=600, clear_cache=not options.keep_caches
            ) as trainer:
                for _ in range(options.updates + 1):
                    client.await_tokens(20)
                    for each in weights.values():
                        each.mul_(1.001)
                    begin = time.monotonic()
                    update = trainer.send()["server"]
                    end = time.monotonic()
                    if not update.ok:
                        raise RuntimeError(update.error)
                    client.await_tokens(3)
                    updates.append(update)
                    spans.append((begin, end))
        finally:
            client.stop()
    return judge(options, client, usual, weights, updates[1:], spans[1:])  # the first one proves each layer


def judge(
    options: argparse.Namespace,
    client: Client,
    usual: float,
    weights: dict[str, torch.Tensor],
    updates: list[Any],
    spans: list[tuple[float, float]],
) -> dict[str, Any]:
    gaps, receiving = [], []
    for update, (begin, end) in zip(updates, spans, strict=True):
        gaps.append(client.longest(end - update.pause, end) - usual)
        receiving.append(client.longest(begin, end - update.pause) - usual)
    size = sum(each.nbytes for each in weights.values())
    copies = copy_seconds(size // options.ranks)
    return {
        "megabytes": size / 1e6,
        "ranks": options.ranks,
        "usual": usual * 1e3,
        "gaps": [each * 1e3 for each in gaps],
        "receiving": [each * 1e3 for each in receiving],
        "pauses": [each.pause * 1e3 for each in updates],
        "commits": [max(rank.verdict.seconds for rank in each.ranks if rank.verdict) * 1e3 for each in updates],
        "copy": copies * 1e3,
        "load": os.getloadavg()[0],
    }


def copy_seconds(size: int) -> float:
    torch.set_num_threads(1)
    there, here = torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        there.copy_(here)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def show(result: dict[str, Any]) -> None:
    updates, load = len(result["gaps"]), result["load"]
    print(f"Llama of {result['megabytes']:.0f} MB, {result['ranks']} ranks, {updates} updates; load {load:.1f}")
    for name in ("gaps", "receiving", "pauses", "commits"):
        found = result[name]
        print(f"{name:<10} median {statistics.median(found):>7.1f} ms, longest {max(found):>7.1f}")
    share = statistics.median(result["gaps"]) / result["copy"]
    print(f"usual {result['usual']:.1f} ms; one copy {result['copy']:.1f} ms: the median gap is {share:.1f} of them")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--keep-caches", action="store_true", help="vLLM keeps what it has computed of requests")
    parser.add_argument("--packed", action="store_true", help="linears packed for oneDNN, as vLLM does on CPUs")
    parser.add_argument("--json", type=pathlib.Path, help="file to add the figures to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder, tempfile.TemporaryDirectory() as runtime:
        os.environ["TESSERA_RUNTIME_DIR"] = runtime
        result = measure(options, pathlib.Path(folder))
    show(result)
    if options.json:
        with options.json.open("a") as file:
            print(json.dumps(result), file=file)


if __name__ == "__main__":
    main()
