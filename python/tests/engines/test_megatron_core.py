"""Megatron-Core's own resharding, with our service: runs where the package `megatron-core` is installed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch_ranks import launch

pytest.importorskip("megatron.core.resharding", reason="megatron-core is not installed")

HIDDEN, MIDDLE, LAYERS = 8, 16, 4
F32, BF16 = torch.float32, torch.bfloat16
# name in a layer, whole shape, dim that tensor parallelism cuts, stride (2: gate and up, each cut), dtype
PARAMETERS: list[tuple[str, tuple[int, ...], int | None, int, torch.dtype]] = [
    ("qkv", (3 * HIDDEN, HIDDEN), 0, 1, BF16),
    ("proj", (HIDDEN, HIDDEN), 1, 1, BF16),
    ("fc1", (2 * MIDDLE, HIDDEN), 0, 2, F32),
    ("fc2", (HIDDEN, MIDDLE), 1, 1, F32),
    ("norm", (HIDDEN,), None, 1, F32),
]


def whole(layer: int, number: int, version: int) -> torch.Tensor:
    _, shape, _, _, dtype = PARAMETERS[number]
    random = torch.Generator().manual_seed(10_000 * version + 100 * layer + number)
    return torch.randn(shape, generator=random).to(dtype)


def part(tensor: torch.Tensor, dim: int | None, stride: int, rank: int, size: int) -> torch.Tensor:
    if dim is None:
        return tensor
    return torch.cat([each.chunk(size, dim)[rank] for each in tensor.chunk(stride, dim)], dim)


class Parts(torch.nn.Module):
    """One rank's parameters of a model that is cut over `tp` x `pp` ranks, one data-parallel replica after another."""

    def __init__(self, tp: int, pp: int, version: int | None) -> None:
        super().__init__()
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.at = rank // tp % pp, rank % tp
        self.tp, self.pp = tp, pp
        self.config = SimpleNamespace(num_moe_experts=None)
        self.pg_collection = groups(rank, size, tp, pp)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList()
        for layer in range(LAYERS // pp * self.at[0], LAYERS // pp * (self.at[0] + 1)):
            module = torch.nn.Module()
            module.layer_number = layer + 1
            for number, (name, _, dim, stride, _) in enumerate(PARAMETERS):
                mine = self.expected(layer, number, version or 0)
                parameter = torch.nn.Parameter(mine if version is not None else mine * 0, requires_grad=False)
                parameter.tensor_model_parallel = dim is not None
                parameter.partition_dim = -1 if dim is None else dim
                parameter.partition_stride = stride
                module.register_parameter(name, parameter)
            self.decoder.layers.append(module)

    def expected(self, layer: int, number: int, version: int) -> torch.Tensor:
        _, _, dim, stride, _ = PARAMETERS[number]
        return part(whole(layer, number, version), dim, stride, self.at[1], self.tp).clone()

    def fill(self, version: int) -> None:
        for parameter, expected in self.pairs(version):
            parameter.data.copy_(expected)

    def is_version(self, version: int) -> bool:
        return all(torch.equal(parameter, expected) for parameter, expected in self.pairs(version))

    def pairs(self, version: int) -> Any:
        for module in self.decoder.layers:
            for number, (name, *_) in enumerate(PARAMETERS):
                yield getattr(module, name), self.expected(module.layer_number - 1, number, version)


def groups(rank: int, size: int, tp: int, pp: int) -> Any:
    """Those of Megatron's order tp, pp, dp (from the fastest)."""

    def mine(key: Callable[[int], Any]) -> Any:
        sets: dict[Any, list[int]] = {}
        for each in range(size):
            sets.setdefault(key(each), []).append(each)
        made = [(ranks, torch.distributed.new_group(ranks)) for ranks in sets.values()]
        return next(group for ranks, group in made if rank in ranks)

    alone = mine(lambda each: each)
    along_tp = mine(lambda each: each // tp)
    along_dp = mine(lambda each: each % (tp * pp))
    along_pp = mine(lambda each: (each // (tp * pp), each % tp))
    return SimpleNamespace(
        tp=along_tp, pp=along_pp, dp=along_dp, ep=alone, cp=alone, expt_tp=along_tp, expt_dp=along_dp
    )


LAYOUTS = {2: [(1, 1), (2, 1), (1, 2)], 4: [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)]}  # (tp, pp), of so many ranks


def resharded(rank: int) -> dict[str, list[bool]]:
    """Two versions, from every layout to every other, by one service."""
    from megatron.core.resharding import swap_model_weights
    from tessera.engines.megatron import CopyService

    found = {}
    with pytest.MonkeyPatch.context() as patch, CopyService(timeout=300) as service:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "synchronize", lambda *_: None)  # 0.19 asks for it on a CPU, too
            patch.setattr(torch.cuda, "empty_cache", lambda: None)
        for one, other in itertools.permutations(LAYOUTS[torch.distributed.get_world_size()], 2):
            source, target = Parts(*one, version=1), Parts(*other, version=None)
            right = [not target.is_version(1)]
            for version in (1, 2):
                source.fill(version)
                swap_model_weights(source, target, service)
                right += [target.is_version(version), source.is_version(version)]
            found[f"{one} to {other}"] = right
    return found


@pytest.mark.parametrize("size", LAYOUTS)
def test_a_model_is_resharded(size: int) -> None:
    for found in launch(resharded, size):
        assert len(found) == len(LAYOUTS[size]) * (len(LAYOUTS[size]) - 1)
        assert all(right == [True] * 5 for right in found.values()), found
