"""Memory at its peak: activation checkpointing saves what it saves unsharded, in known modules and in others."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tessera import etp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch_ranks import launch

LAYERS, WIDTH, ROWS = 8, 64, 1024
ACTIVATION = ROWS * WIDTH * 4


class Peak(TorchDispatchMode):
    """Bytes of the storages that operations make, while somebody has them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if _is_plain(each)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if _is_plain(each):
                storage = each.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self._seen:
                    self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata

        def gone(_: Any) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def _is_plain(value: Any) -> bool:
    """Tell whether a value has memory of its own that counts."""
    return isinstance(value, torch.Tensor) and not isinstance(value, etp.LogicalTensor)


class Layers(torch.nn.Module):
    """Known modules, or products by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def block(self, i: int, x: torch.Tensor) -> torch.Tensor:
        layer = self.layers[i]
        if self.by_hand:
            x = F.gelu(x @ layer.weight.t() + layer.bias)
            return F.gelu(x @ layer.weight + layer.bias)
        return F.gelu(layer(F.gelu(layer(x))))

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        if way == "whole":
            return checkpoint(self._all, x, use_reentrant=False)
        for i in range(LAYERS):
            block = functools.partial(self.block, i)
            x = block(x) if way == "kept" else checkpoint(block, x, use_reentrant=way == "reentrant")
        return x

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(LAYERS):
            x = self.block(i, x)
        return x


WAYS = ("kept", "by block", "reentrant", "whole")


def _peaks(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Activations after the forward, and at the peak of forward and backward, in whole activations."""
    found = {}
    for way in WAYS:
        for _ in range(2):  # pools have grown
            x = torch.ones(ROWS, WIDTH, requires_grad=True)
            with Peak() as peak:
                out = model(x, way).sum()
                after = peak.now
                out.backward()
            model.zero_grad()
            del out
        found[way] = after // ACTIVATION, peak.most // ACTIVATION
    return found


def _sharded_peaks(rank: int) -> dict[str, Any]:
    with etp.init_group() as group:
        return {
            str(by_hand): _peaks(etp.shard_module_(Layers(by_hand), group, min_elements=256))
            for by_hand in (False, True)
        }


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, Any]]:
    return launch(_sharded_peaks, 2)


@pytest.mark.parametrize("by_hand", [False, True])
def test_checkpoints_save_activations(sharded: list[dict[str, Any]], by_hand: bool) -> None:
    plain = _peaks(Layers(by_hand))
    assert plain["kept"][0] > 2 * plain["by block"][0]  # the measure tells
    for rank in sharded:
        found = rank[str(by_hand)]
        for way in WAYS:
            assert found[way][0] <= plain[way][0] + 1, (way, found, plain)
            assert found[way][1] <= plain[way][1] + 2, (way, found, plain)
