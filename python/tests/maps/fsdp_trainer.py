"""One rank of a trainer with FSDP2: sends its model, forgets it, takes it back and compares (test_mapped_jobs.py)."""

from __future__ import annotations

import os
import sys

import tessera
import torch
from tessera import maps
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

TIMEOUT = 300


def main(folder: str, namespace: str, store: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = {name: tensor.to_local().clone() for name, tensor in model.state_dict().items()}
    assert all(isinstance(param, DTensor) for param in model.parameters())
    names = maps.transformers(model.config)
    with tessera.connect("weights", role="trainer", peer="engine", namespace=namespace, timeout=TIMEOUT) as bus:
        bus.register(model, "there", map=names).send(timeout=TIMEOUT)
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().zero_()
        batch = bus.register(model, "back", map=names)
        batch.recv(timeout=TIMEOUT)
        assert batch.stats.bytes_moved == batch.stats.bytes_lower_bound
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.to_local().view(torch.int16), before[name].view(torch.int16)), name
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
