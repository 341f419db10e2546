"""Models on the meta device: parameters and buffers of every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import tessera
import torch
from tessera import etp
from torch_ranks import launch

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.int8, torch.uint8, torch.int64, torch.bool),
]


class Net(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, own: int | None = None) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)
        self.dtype, self.own = dtype, own
        self.register_buffer("table", torch.empty(8, dtype=dtype))
        self.packed = torch.nn.Parameter(torch.empty(8, dtype=dtype), requires_grad=False)

    def reset_parameters(self) -> None:
        values = torch.arange(8).to(self.dtype)
        self.table.copy_(values if self.own is None else values * 0 + self.own)
        self.packed.copy_(values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def _made(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        for dtype in DTYPES:
            with torch.device("meta"):
                model = Net(dtype)
            etp.shard_module_(model, group)
            model(torch.randn(4, 64)).square().mean().backward()
            wanted = torch.arange(8).to(dtype)
            same = [
                torch.equal(each.view(torch.uint8), wanted.view(torch.uint8)) for each in (model.table, model.packed)
            ]
            found[str(dtype)] = all(same), model.norm.running_mean.tolist()
        with torch.device("meta"):
            model = Net(torch.int64, rank)
        with pytest.raises(tessera.Error) as caught:
            etp.shard_module_(model, group)
        found["different"] = str(caught.value)
    return found


def test_parameters_and_buffers_of_every_dtype_are_made() -> None:
    first, second = launch(_made, 2)
    for dtype in map(str, DTYPES):
        assert first[dtype][0] and second[dtype][0] and first[dtype] == second[dtype]
    assert "buffer table differs between ranks 0 and 1" in first["different"]
    assert first["different"] == second["different"]
