"""The training job: a small language model on 2 ranks with FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/generate/train.py

It sends its weights after every few steps, in place: a send ends once the receiver has them.
"""

import argparse

import tessera
import torch
import torch.distributed as dist
from model import WINDOW, text, untrained
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROWS = 4  # windows of text, for each rank and step
LEARNING_RATE = 6e-3
WARM_UP = 10  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of the optimiser, between two versions")
    parser.add_argument("--versions", type=int, default=4, help="to send")
    options = parser.parse_args()
    steps = options.steps * options.versions

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = untrained()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1.0, (steps - step) / steps)
    )
    whole = text()
    generator = torch.Generator().manual_seed(rank)

    with tessera.connect("weights", role="trainer", peer="inference", timeout=600) as bus:
        batch = bus.register(model, direction="send")
        for step in range(1, steps + 1):
            begins = torch.randint(len(whole) - WINDOW, (ROWS, 1), generator=generator)
            rows = whole[begins + torch.arange(WINDOW)]
            model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % options.steps == 0:
                batch.send(version=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
