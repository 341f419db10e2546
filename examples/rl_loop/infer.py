"""The inference job: 2 tensor-parallel ranks write samples with every version, and send them back with their scores.

    torchrun --standalone --nproc-per-node 2 examples/rl_loop/infer.py

It ends when the trainer has.
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
from model import Model, Past, untrained
from task import LENGTH, PROMPT, SAMPLES, decode, encode, score
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PATIENCE = 600  # seconds
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.query": ColwiseParallel(),
    "blocks.*.key": ColwiseParallel(),
    "blocks.*.value": ColwiseParallel(),
    "blocks.*.out": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


@torch.no_grad()
def write(model: Model, tokens: torch.Tensor, generator: torch.Generator) -> None:
    """Fills every row of `tokens` with a sample. Rank 0 draws, and the others follow."""
    prompt = encode(PROMPT)
    tokens[:, : len(prompt)] = prompt
    past: list[Past] = [[] for _ in model.blocks]
    for place in range(1, tokens.shape[1]):
        logits = model(tokens[:, place - 1 : place], past)[:, 0]
        if place >= len(prompt):
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            dist.broadcast(drawn, src=0)
            tokens[:, place : place + 1] = drawn


class Writer:
    """Samples of the newest version, with their scores; every rank has all of them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
        self.scores = torch.zeros(SAMPLES)
        self.seen: list[dict[str, Any]] = []  # for run.py
        self._generator = torch.Generator().manual_seed(0)

    def write(self, version: int, received: digests.Digests | None = None) -> None:
        write(self.model, self.tokens, self._generator)
        samples = [decode(row) for row in self.tokens]
        self.scores.copy_(torch.tensor([score(sample[len(PROMPT) :]) for sample in samples]))
        mean = self.scores.mean().item()
        self.seen.append({"version": version, "score": mean, "samples": samples, "digests": received})
        if dist.get_rank() == 0:
            best = samples[int(self.scores.argmax())]
            print(f"version {version}, score {self.scores.max():.2f}: {best!r}", flush=True)


def serve(writer: Writer, bus: tessera.Bus) -> None:
    """Until the trainer has ended."""
    state = writer.model.state_dict()
    whole = [name for name, tensor in state.items() if not isinstance(tensor, DTensor)]
    weights = bus.register(writer.model, batch="weights")
    samples = bus.register({"tokens": writer.tokens, "scores": writer.scores}, batch="samples")
    while True:
        try:
            version = weights.recv(timeout=PATIENCE)
        except tessera.PeerLostError as error:
            if bus.rank == 0:
                print(f"no further version: {error}", flush=True)
            return
        writer.write(version, digests.of_ranks(weights, whole))
        samples.send(version=version, timeout=PATIENCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="file for samples and digests, for run.py")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    writer = Writer(parallelize_module(untrained().requires_grad_(False), mesh, PLAN))
    writer.write(0)  # random weights
    try:
        with tessera.connect("loop", role="inference", peer="trainer", timeout=PATIENCE) as bus:
            serve(writer, bus)
            # The last collectives, while there is still a bus to close: Gloo's threads let go of their tensors a little
            # later, and abort a process whose interpreter ends meanwhile (pytorch/pytorch#190489).
            seen = {"versions": writer.seen, "model": digests.of_model(writer.model.state_dict())}
    except tessera.Error as error:
        sys.exit(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
