"""Fine-tunes MiniLM on any number of processes. Each keeps its share of every weight.

    torchrun --standalone --nproc-per-node 2 examples/etp_finetune/train.py

Three lines name etp. Without them this is the program for one process that keeps all of it: run.py compares both.
"""

import argparse
import pathlib

import measure
import torch
import torch.distributed as dist
from task import MICRO_BATCHES, contrastive_loss, micro_batch, pretrained
from tessera import etp

LEARNING_RATE = 2e-5
MAX_NORM = 50.0  # of a gradient; README.md says why it is so high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of the optimiser")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the weights and for what they took, for run.py")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    peak = measure.Peak()
    model = pretrained().train()
    model.activation_checkpointing_enable()
    group = etp.init_group()
    etp.shard_module_(model, group, reduction="sum")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    for step in range(options.steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for number in range(step * MICRO_BATCHES + rank, (step + 1) * MICRO_BATCHES, world):
            torch.manual_seed(number)  # dropout of a micro-batch is the same on whichever rank it runs
            with torch.autocast("cpu", torch.bfloat16):
                loss = contrastive_loss(model, micro_batch(number)) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1}: loss {total.item():.3f}, norm of the gradient {norm.item():.2f}", flush=True)

    most = peak.end()
    if options.out is not None:
        measure.write(options.out, model, optimizer, most)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
