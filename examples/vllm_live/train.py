"""The training job: a small language model on 2 ranks with FSDP2. A vLLM server takes each version of its weights.

    torchrun --standalone --nproc-per-node 2 examples/vllm_live/train.py --url http://127.0.0.1:8000

The server must have been started as run.py does.
"""

import argparse
import json
import pathlib
from typing import Any

import torch
import torch.distributed as dist
from client import probe
from model import PROMPTS, WINDOW, text, untrained
from safetensors.torch import save_file
from tessera.engines.vllm import Trainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

ROWS = 8  # windows of text, for each rank and step
LEARNING_RATE = 2e-3
WARM_UP = 10  # steps
PATIENCE = 300  # seconds


def sharded_model() -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = untrained()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def keep(model: torch.nn.Module, file: pathlib.Path) -> None:
    """Gathers the whole model into a file, for run.py's check; not part of the exchange. Collective."""
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        save_file(state, file)


def train(model: torch.nn.Module, trainer: Trainer, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What run.py wants to know, on rank 0."""
    rank, steps = dist.get_rank(), options.steps * options.versions
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1.0))
    whole = text()
    generator = torch.Generator().manual_seed(rank)
    versions = []
    for step in range(1, steps + 1):
        begins = torch.randint(len(whole) - WINDOW, (ROWS, 1), generator=generator)
        rows = whole[begins + torch.arange(WINDOW)]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % options.steps:
            continue
        updates = trainer.send(step)
        keep(model, options.keep / f"version-{step}.safetensors")
        if rank == 0:
            update = updates["server"]
            print(f"version {step}: loss {loss.item():.3f}, {update}", flush=True)
            answers = probe(options.url, PROMPTS) if update.ok else {}
            seen = {"version": step, "loss": loss.item(), "ok": update.ok, "error": update.error, "pause": update.pause}
            versions.append({**seen, "answers": answers})
        dist.barrier()  # the server keeps this version until it has answered
    return versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the server")
    parser.add_argument("--keep", type=pathlib.Path, required=True, help="folder for each version's weights")
    parser.add_argument("--steps", type=int, default=40, help="of the optimiser, between two versions")
    parser.add_argument("--versions", type=int, default=5, help="to send")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = sharded_model()
    with Trainer(model, {"server": options.url}, timeout=PATIENCE) as trainer:
        versions = train(model, trainer, options)
    if dist.get_rank() == 0:
        (options.keep / "versions.json").write_text(json.dumps(versions))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
