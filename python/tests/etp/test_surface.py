"""Sharding by names, names of parts, and chains."""

from __future__ import annotations

from typing import Any

import pytest
import tessera
import torch
from etp_models import batch
from tessera import etp
from torch_ranks import launch


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(32, 32)
        self.k = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) + self.k(x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(203, 32)
        self.layer = torch.nn.ModuleDict({"self_attention": Attention()})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer["self_attention"](self.emb(ids))


def _by_names(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        torch.manual_seed(1)
        model = Model()
        attention = model.layer["self_attention"]
        with pytest.raises(tessera.InvalidArgumentError) as caught:
            etp.wrap_module_params_etp(attention, ["q.weight", "v.weight"], group)
        found["unknown"] = str(caught.value)
        assert etp.wrap_module_params_etp(attention, ["q.weight"], group) is attention
        sharded = [name for name, each in model.named_parameters() if isinstance(each, etp.LogicalTensor)]
        found["sharded"] = sharded, attention.q.weight.etp.name
        etp.tag_etp_params_with_names(model)
        found["named"] = attention.q.weight.etp.name
        torch.manual_seed(1)
        model = etp.shard_module_(Model(), group, min_elements=256)
        weights = [model.emb.weight.etp, model.layer["self_attention"].q.weight.etp]
        etp.classify_etp_chains(model, {"attn"})
        found["chains"] = [each.chain for each in weights]
        model(batch(rank)[0]).sum().backward()
        with pytest.raises(tessera.Error) as refused:
            etp.classify_etp_chains(model)
        found["planned"] = str(refused.value)
    return found


def test_names_and_chains() -> None:
    for found in launch(_by_names, 2):
        assert found["unknown"] == "wrap_module_params_etp: Attention has no parameter v.weight"
        assert found["sharded"] == (["layer.self_attention.q.weight"], "q.weight")
        assert found["named"] == "layer.self_attention.q.weight"
        assert found["chains"] == ["UNGRAPHED", "GRAPHED"]
        assert "layer.self_attention.q.weight" in found["planned"]
