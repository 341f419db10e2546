"""The training job: fine-tunes MiniLM on 4 ranks with FSDP2 and sends its weights after every few steps.

torchrun --standalone --nproc-per-node 4 examples/weight_sync/train.py
"""

import argparse
import pathlib
import time

import check
import tessera
import torch
import torch.distributed as dist
from loss import contrastive_loss
from model import MATRICES, pretrained
from text import pairs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PAIRS = 8  # of adjacent sentences, for each rank and step
LEARNING_RATE = 2e-4


def sharded_model() -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model = pretrained()
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="of the optimiser, between two versions")
    parser.add_argument("--versions", type=int, default=3, help="to send")
    parser.add_argument(
        "--wire", metavar="FORMAT", help="that the encoder's matrices are quantised to on their way: nvfp4, mxfp8, ..."
    )
    parser.add_argument("--check", type=pathlib.Path, help="folder to write each version to, for run.py")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # of dropout
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = pairs()
    generator = torch.Generator().manual_seed(0)  # all ranks shuffle alike, and each takes its share

    with tessera.connect("weights", role="trainer", peer="inference", timeout=600) as bus:
        wire = {MATRICES: options.wire} if options.wire else None
        batch = bus.register(model, direction="send", wire=wire)
        check.await_verdict(options.check, 0)
        for step in range(1, options.steps * options.versions + 1):
            chosen = torch.randperm(len(text), generator=generator)[rank::world][:PAIRS].tolist()
            loss = contrastive_loss(model, [text[index] for index in chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step % options.steps:
                continue
            check.write(options.check, model, step, options.wire)
            begin = time.perf_counter()
            batch.send(version=step)
            if rank == 0:
                milliseconds = (time.perf_counter() - begin) * 1e3
                print(f"sent version {step} to {bus.peer_world} ranks in {milliseconds:.0f} ms", flush=True)
            check.await_verdict(options.check, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
