"""torch's own types from one job's processes into another's: FSDP2 into tensor parallelism, state_dicts, all dtypes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from jobs import Jobs, Rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_ranks import join_group

WAIT = 300  # seconds; six processes share the machine


class Model(nn.Module):
    """Tied weights, a scalar, a buffer, and sizes that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embedding(tokens)).relu())) / self.temperature


TOKENS = torch.tensor([[1, 2, 3, 12]])
STEPS = 3


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def train(rank: Rank) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor], set[str]]:
    """FSDP2 over two ranks: what was sent after each step, a moment of the optimiser, and what was skipped."""
    join_group(rank)
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (rank.world,), mesh_dim_names=("dp",))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimiser.zero_grad()
        model(TOKENS).square().mean().backward()
        optimiser.step()
        model.temperature += 0.25  # type: ignore[operator]

    step()
    sent = []
    with rank.connect("weights", peer="inference") as bus:
        batch = bus.register(model)
        for _ in range(STEPS):
            batch.send(timeout=WAIT)
            sent.append(wholes(model))
            step()
        state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "note": "of a checkpoint"}
        checkpoint = bus.register(state, "checkpoint")
        checkpoint.send(timeout=WAIT)
        moments = {"exp_avg": whole(state["optimiser"]["state"][0]["exp_avg"]), "step": torch.tensor(float(STEPS + 1))}  # type: ignore[index]
        return sent, {**wholes(model), **moments}, set(checkpoint.skipped)


def serve(rank: Rank) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Tensor parallelism over two ranks: what arrived, what the model then says, and a checkpoint in plain tensors."""
    join_group(rank)
    model = Model()
    model.head.weight = nn.Parameter(torch.zeros(13, 6))
    mesh = init_device_mesh("cpu", (rank.world,), mesh_dim_names=("tp",))
    parallelize_module(
        model,
        mesh,
        {"embedding": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()},
    )
    received, logits = [], []
    with rank.connect("weights", peer="trainer") as bus:
        batch = bus.register(model)
        for _ in range(STEPS):
            batch.recv(timeout=WAIT)
            received.append(wholes(model))
            with torch.no_grad():
                logits.append(model(TOKENS))
        taken = {name: torch.zeros_like(tensor) for name, tensor in wholes(model).items()}
        moments = {"exp_avg": torch.zeros(13, 6), "step": torch.tensor(0.0)}
        bus.register({"model": taken, "optimiser": {"state": {0: moments}}}, "checkpoint").recv(timeout=WAIT)
        return received, logits, {**taken, **moments}


def test_fsdp2_into_tensor_parallelism(forked_jobs: Jobs) -> None:
    forked_jobs.start("trainer", train, world=2)
    forked_jobs.start("inference", serve, world=2)
    results = forked_jobs.results()
    sent, state, skipped = results["trainer"][0]
    for received, logits, checkpoint in results["inference"]:
        for version in range(STEPS):
            for name, tensor in sent[version].items():
                assert torch.equal(received[version][name], tensor), (version, name)
            torch.testing.assert_close(logits[version], expected_logits(sent[version]))
        assert not torch.equal(received[0]["up.weight"], received[1]["up.weight"])
        for name, tensor in state.items():
            assert torch.equal(checkpoint[name], tensor), name
    assert {"note", "optimiser.param_groups"} <= skipped


def expected_logits(state: dict[str, torch.Tensor]) -> torch.Tensor:
    model = Model()
    model.load_state_dict(state)
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS)
    return logits


# --- everything at once, through the memory of two processes

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
]
SHAPES = [(), (1,), (0, 3), (5, 8), (2, 1, 3, 2)]


def zoo(filled: bool) -> dict[str, Any]:
    """A tensor of every dtype and shape; the receiver's lie otherwise in memory."""

    def bits(count: int, limit: int) -> torch.Tensor:
        return ((torch.arange(count) * 7 + 1) % limit if filled else torch.zeros(count)).to(torch.uint8)

    tensors: dict[str, Any] = {}
    for dtype in DTYPES:
        limit = 2 if dtype == torch.bool else 251
        for shape in SHAPES:
            if dtype == torch.float4_e2m1fn_x2 and not shape:
                continue
            made = bits(torch.Size(shape).numel() * dtype.itemsize, limit).view(dtype).reshape(shape)
            tensors[f"{dtype} {shape}"] = made
    tensors["strided"] = {
        "rows": (bits(40, 251).reshape(5, 8) if filled else torch.zeros(8, 5, dtype=torch.uint8).t()),
        "window": (bits(120, 251).reshape(10, 12)[2:7, 1:9] if filled else torch.zeros(5, 8, dtype=torch.uint8)),
        "every second": bits(160, 251).reshape(10, 16)[::2, ::2],
    }
    return tensors


def send_zoo(rank: Rank) -> None:
    tensors = zoo(filled=True)
    with rank.connect("zoo", peer="inference") as bus:
        bus.register(tensors).send(timeout=WAIT)


def take_zoo(rank: Rank) -> dict[str, bytes]:
    tensors = zoo(filled=False)
    with rank.connect("zoo", peer="trainer") as bus:
        bus.register(tensors).recv(timeout=WAIT)
    return {name: raw(tensor) for name, tensor in flat(tensors).items()}


def flat(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {**{name: each for name, each in tensors.items() if name != "strided"}, **tensors["strided"]}


def raw(tensor: torch.Tensor) -> bytes:
    elements = tensor.contiguous().flatten().view(torch.uint8)
    return bytes(elements.numpy()) if elements.numel() else b""


def test_every_dtype_and_shape_between_processes(jobs: Jobs) -> None:
    jobs.start("trainer", send_zoo)
    jobs.start("inference", take_zoo)
    (received,) = jobs.results()["inference"]
    expected = {name: raw(tensor) for name, tensor in flat(zoo(filled=True)).items()}
    assert received == expected
