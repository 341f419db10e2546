"""What a learned map writes, against vLLM's own loader; on several ranks, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import vllm_configs as configs
import vllm_models as models
from tessera import engines
from tessera.engines.vllm._meta import on_meta


def compare(made: configs.Configuration, rank: int, ranks: int, port: int, seed: int = 1) -> dict[str, Any]:
    """Learns the map, and writes a random checkpoint both ways. `differing` names parameters that are not equal in
    every bit; those that the loader computes are left to it, and named."""
    checkpoint = models.random_checkpoint(made, seed)
    with models.loaded_form(made, rank, ranks, port) as (_, model):
        begin = time.perf_counter()
        learned = engines.learn_map(model, checkpoint, meta=on_meta)
        seconds = time.perf_counter() - begin
        mine = {name: torch.zeros_like(each) for name, each in models.tensors(model).items()}
        for parameter in model.parameters():
            parameter.zero_()
        model.load_weights(iter(checkpoint.items()))
        learned.install_from(mine, checkpoint)
        parameters = dict(model.named_parameters())
        return {
            "model": made["model_type"],
            "rank": rank,
            "ranks": ranks,
            "tensors": len(checkpoint),
            "parameters": len(parameters),
            "pieces": len(learned.pieces),
            "milliseconds": round(seconds * 1e3, 1),
            "share": learned.nbytes / sum(each.nbytes for each in checkpoint.values()),
            "computed": dict(learned.computed),
            "differing": [
                name
                for name, each in parameters.items()
                if name not in learned.computed and not torch.equal(mine[name], each)
            ],
            "elements": sum(each.numel() for each in parameters.values()),
        }


def compare_all(names: list[str], seed: int, ranks: int, seconds: float = 1800) -> list[dict[str, Any]]:
    """compare() of a random configuration of each architecture, on each rank, in processes of their own. Raises
    RuntimeError if one of them ends otherwise than well."""
    port = str(models.free_port())
    command = [sys.executable, __file__, str(seed), str(ranks), port]
    with tempfile.TemporaryDirectory() as folder:
        said = [pathlib.Path(folder, f"{rank}.{kind}") for rank in range(ranks) for kind in ("out", "err")]
        with contextlib.ExitStack() as files:
            opened = [files.enter_context(each.open("w")) for each in said]
            running = [
                subprocess.Popen([*command, str(rank), *names], stdout=opened[2 * rank], stderr=opened[2 * rank + 1])
                for rank in range(ranks)
            ]
        try:
            await_all(running, seconds)
        except RuntimeError as error:
            ends = "\n".join(f"{each.name}: {each.read_text()[-2000:]}" for each in said[1::2])
            raise RuntimeError(f"{command}: {error}\n{ends}") from None
        finally:
            for each in running:
                each.kill()
                each.wait()
        return [json.loads(line) for each in said[::2] for line in each.read_text().splitlines() if line[:1] == "{"]


def await_all(running: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended well. Raises RuntimeError as soon as one has not: the others would wait for it."""
    end = time.monotonic() + seconds
    while None in (statuses := [each.poll() for each in running]):
        if any(statuses) or time.monotonic() > end:
            break
        time.sleep(0.05)
    if any(status != 0 for status in statuses):
        raise RuntimeError(f"ended with {statuses} (None: not ended in {seconds:g} s, or when another had)")


def main() -> None:
    seed, ranks, port, rank = map(int, sys.argv[1:5])
    torch.set_num_threads(1)
    for name in sys.argv[5:]:
        print(json.dumps(compare(configs.configuration(name, seed), rank, ranks, port)), flush=True)


if __name__ == "__main__":
    main()
