"""Addresses of sharded tensors: programs that look for tied weights compare them; their numbers are refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from tessera import etp
from torch_ranks import launch

SIZES = (2, 3)
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "format": lambda address: f"{address:x}",
    "alignment": lambda address: address % 16,
    "an offset": lambda address: address + 4,
    "an order": lambda address: sorted([address, address]),
    "an index": lambda address: [0][address],
    "a function of C": lambda address: ctypes.CDLL(None).abs(address),
}


def _compared(rank: int) -> dict[str, bool]:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(64, 64), "two": torch.nn.Linear(64, 64)})
    model["tied"] = torch.nn.Linear(64, 64, bias=False)
    model["tied"].weight = model["one"].weight
    with etp.init_group() as group:
        etp.shard_module_(model, group)
        one, two, tied = (model[name].weight for name in ("one", "two", "tied"))
        model["tied"](model["one"](torch.randn(4, 64))).sum().backward()
        found = {
            "tied": one.data_ptr() == tied.data_ptr() and len({one.data_ptr(), tied.data_ptr(), two.data_ptr()}) == 2,
            "another parameter of the memory": torch.nn.Parameter(one).data_ptr() == one.data_ptr(),
            "others": one.data_ptr() != two.data_ptr() and one.data_ptr() != one.grad.data_ptr(),
            "plain": one.data_ptr() != model["one"].bias.data_ptr() and one.data_ptr() != 0,
            "is one": bool(one.data_ptr()),
        }
        for name, ask in NUMBERS.items():
            errors = (tessera.InvalidArgumentError, ctypes.ArgumentError)
            with pytest.raises(errors, match=r"data_ptr\(\) of sharded tensor one.weight, whose"):
                ask(one.data_ptr())
            found[name] = True
        return found


@pytest.mark.parametrize("size", SIZES)
def test_addresses_can_be_compared_only(size: int) -> None:
    for found in launch(_compared, size):
        assert [name for name, right in found.items() if not right] == []
