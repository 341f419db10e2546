"""The training job: 4 ranks, 2 that share every weight (ETP) times 2 that train on other tokens (data parallelism).

    torchrun --standalone --nproc-per-node 4 examples/rl_loop/train.py

It learns a text, and imitates the better ones of the samples that the other job sends back for its newest version.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

import digests
import tessera
import torch
import torch.distributed as dist
from model import MATRICES, Model, untrained
from task import LENGTH, SAMPLES, encode, text
from tessera import etp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

ROWS = 4  # windows of the text, for each rank and step
LEARNING_RATE = 5e-3
WARM_UP = 10  # steps
PATIENCE = 600  # seconds


class Samples:
    """What has come back: this rank's share of the samples, and all scores."""

    def __init__(self, bus: tessera.Bus) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        rows = tessera.Layout(f"{self._world}:S0")
        self.tokens = torch.zeros(SAMPLES // self._world, LENGTH, dtype=torch.int64)
        self.scores = torch.zeros(SAMPLES)
        self._batch = bus.register({"tokens": (self.tokens, rows), "scores": self.scores}, batch="samples")

    def receive(self, version: int) -> None:
        """Those of that version."""
        self._batch.recv(version, timeout=PATIENCE)

    def weights(self) -> torch.Tensor:
        """Of this rank's samples: by how much their scores are above the mean. Averaged over the ranks, they add up to
        1; or to 0 if no score is."""
        above = (self.scores - self.scores.mean()).clamp(min=0)
        return self._world * above.chunk(self._world)[self._rank] / above.sum().clamp(min=1e-6)


def losses(model: Model, rows: torch.Tensor) -> torch.Tensor:
    """Of each row, in nats a token."""
    logits = model(rows[:, :-1])
    return cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(1)


def train(model: Model, bus: tessera.Bus, options: argparse.Namespace) -> dict[str, Any]:
    """What run.py wants to know."""
    rank = dist.get_rank()
    steps = options.steps * options.versions
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1.0, 0.1 + (steps - step) / steps)
    )
    weights = bus.register(model, batch="weights", wire={MATRICES: options.wire} if options.wire else None)
    samples = Samples(bus)
    whole = encode(text())
    generator = torch.Generator().manual_seed(rank)
    versions, total = [], torch.zeros(())
    for step in range(1, steps + 1):
        begins = torch.randint(len(whole) - LENGTH, (ROWS, 1), generator=generator)
        found = losses(model, torch.cat([whole[begins + torch.arange(LENGTH)], samples.tokens]))
        loss = found[:ROWS].mean()
        (loss + options.reward * (samples.weights() * found[ROWS:]).sum()).backward()
        etp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total += loss.detach() / options.steps
        if step % options.steps:
            continue
        weights.send(version=step, timeout=PATIENCE)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        versions.append({"version": step, "loss": total.item(), "digests": digests.of_ranks(weights)})
        samples.receive(step)
        if rank == 0:
            score = samples.scores.mean().item()
            print(f"version {step}: loss {total.item():.3f}, mean score of its samples {score:.3f}", flush=True)
        total.zero_()
    with etp.summon(model):
        return {"versions": versions, "model": digests.of_model(model.state_dict(), options.wire)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of the optimiser, between two versions")
    parser.add_argument("--versions", type=int, default=5, help="to send")
    parser.add_argument("--reward", type=float, default=0.2, help="how much samples count; the text counts 1")
    parser.add_argument("--wire", metavar="FORMAT", help="that the matrices are quantised to on their way: nvfp4, ...")
    parser.add_argument("--json", type=pathlib.Path, help="file for losses and digests, for run.py")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "etp"))
    group = etp.init_group(mesh=mesh["etp"], timeout=PATIENCE)
    replicas = etp.init_group(mesh=mesh["dp"], name="dp", timeout=PATIENCE)
    model = etp.shard_module_(untrained(), group, formats={MATRICES: "nvfp4"}, dp=replicas)
    try:
        with tessera.connect("loop", role="trainer", peer="inference", timeout=PATIENCE) as bus:
            seen = train(model, bus, options)
    except tessera.Error as error:
        sys.exit(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
