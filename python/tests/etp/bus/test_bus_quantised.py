"""Sharded weights whose published planes are in the format that they travel in: they are sent as they are."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tessera
import torch
from jobs import Jobs, Rank
from tessera import etp
from torch import nn
from torch_ranks import join_group

WAIT = 300
FORMATS = ["nvfp4", "mxfp8", "fp8_e4m3", "fp8_block_128x128"]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 256, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(2, -1, -1), self.up.mT).square().mean()


class Model(nn.Module):
    """Two matrices, one of them bf16, a stack, and what is not quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 300)
        self.down = nn.Linear(300, 256, bias=False, dtype=torch.bfloat16)
        self.experts = Experts()
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down(self.up(x).bfloat16()).float().square().mean() + self.experts(x)


QUANTISED = ["up.weight", "down.weight", "experts.up"]


def built() -> Model:
    torch.manual_seed(5)
    return Model()


def counters() -> tuple[int, int]:
    """Bytes that this process has quantised for the bus, and bytes that were quantised already."""
    text = tessera._core.metrics()
    found = [
        re.search(rf"^tessera_{name}_total (\S+)$", text, re.MULTILINE)
        for name in ("quantized_source_bytes", "encoded_bytes")
    ]
    quantised, encoded = (int(float(each[1])) for each in found if each)
    return quantised, encoded


def train(rank: Rank, format: str, mode: str, asks: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Sends three versions: one before a step, one after it, and after a forward the same once more."""
    join_group(rank)
    model = built()
    etp.shard_module_(
        model, etp.init_group(), formats={"|".join(map(re.escape, QUANTISED)): format}, min_elements=0, **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grown, weights = [], []

    def forward() -> torch.Tensor:
        return model(torch.linspace(-1, 1, 4 * 64).view(4, 64) + rank.rank)

    with rank.connect("weights", peer="engine") as bus:
        wire = {"|".join(map(re.escape, QUANTISED)): format} if asks else None
        batch = bus.register(model, "b", mode=mode, wire=wire)
        for version in range(1, 4):
            before = counters()
            batch.send(timeout=WAIT)
            batch.wait_peers(version=version, timeout=WAIT)
            grown.append([now - then for now, then in zip(counters(), before, strict=True)])
            weights.append({name: etp.whole(each).detach().clone() for name, each in model.named_parameters()})
            optimizer.zero_grad()
            forward().backward()
            if version == 1:
                optimizer.step()
    torch.distributed.destroy_process_group()
    return {"grown": grown, "weights": weights}


def serve(rank: Rank, format: str, asks: bool) -> list[dict[str, Any]]:
    """Takes three versions, as floats and as planes."""
    torch.set_num_threads(1)
    shapes = {name: tuple(each.shape) for name, each in built().named_parameters()}
    floats = {name: torch.zeros(shape) for name, shape in shapes.items()}
    planes = {
        f"{name} planes": tessera.QuantizedTensor.empty(shapes[name], format, planes=("row", "column"))
        for name in QUANTISED
    }
    taken = []
    with rank.connect("weights", peer="trainer") as bus:
        wire = None if asks else {"|".join(map(re.escape, QUANTISED)): format}
        names = {f"{name} planes": tessera.Part(name) for name in QUANTISED}
        batch = bus.register({**floats, **planes}, "b", map=names, wire=wire)
        for version in range(1, 4):
            assert batch.recv(min_version=version, timeout=WAIT) == version
            found: dict[str, Any] = {name: each.clone() for name, each in floats.items()}
            for name, each in planes.items():
                for plane in ("row", "column"):
                    made = getattr(each, plane)
                    found[f"{name} {plane}"] = [bytes_of(part) for part in (made.codes, made.scales, made.amax)]
            taken.append(found)
    return taken


def bytes_of(array: Any) -> bytes:
    if array is None:
        return b""
    array = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.asarray(array))
    return bytes(array.contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_is_quantised(taken: dict[str, Any], weights: dict[str, torch.Tensor], format: str) -> None:
    for name, whole in weights.items():
        if name not in QUANTISED:
            assert torch.equal(taken[name], whole), name
            continue
        expected = tessera.quantize(whole, format)
        assert torch.equal(taken[name], expected.dequantize()), name
        for plane in ("row", "column"):
            made = getattr(expected, plane)
            assert taken[f"{name} planes {plane}"] == [bytes_of(part) for part in (made.codes, made.scales, made.amax)]


@pytest.mark.parametrize(
    ("format", "mode", "asks", "options"),
    [(format, "inplace", index % 2 == 0, {}) for index, format in enumerate(FORMATS)]
    + [("nvfp4", "staged", True, {}), ("mxfp8", "inplace", True, {"native": [r"up\.weight", r"down\.weight"]})],
)
def test_what_is_published_is_sent(
    forked_jobs: Jobs, format: str, mode: str, asks: bool, options: dict[str, Any]
) -> None:
    forked_jobs.start("trainer", train, format, mode, asks, options, world=2)
    forked_jobs.start("engine", serve, format, asks)
    results = forked_jobs.results()
    for version in range(3):
        assert_is_quantised(results["engine"][0][version], results["trainer"][0]["weights"][version], format)
    for rank in results["trainer"]:
        for quantised, encoded in rank["grown"]:
            assert quantised == 0 and encoded > 0


def test_what_is_not_published_yet_is_quantised(forked_jobs: Jobs) -> None:
    """Published at its first use: the second version is sent between the step and that use."""
    options = {"publish": "first_use"}
    forked_jobs.start("trainer", train, "nvfp4", "inplace", True, options, world=2)
    forked_jobs.start("engine", serve, "nvfp4", True)
    results = forked_jobs.results()
    for version in range(3):
        assert_is_quantised(results["engine"][0][version], results["trainer"][0]["weights"][version], "nvfp4")
    for rank in results["trainer"]:
        first, second, third = rank["grown"]
        assert first[0] == 0 < first[1], "shard_module_() publishes"
        assert second[0] > 0 == second[1]
        assert third[0] == 0 < third[1], "a forward has published"
