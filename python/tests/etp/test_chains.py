"""Chains of weights, their streams, and waiting for what moves on them."""

from __future__ import annotations

from typing import Any

import pytest
import tessera
import torch
from etp_models import batch
from tessera import etp
from test_surface import Model
from torch_ranks import launch


def _built() -> Any:
    torch.manual_seed(1)
    return Model()


def _step(model: Any, rank: int) -> None:
    model(batch(rank)[0]).sum().backward()
    with etp.update(model):
        pass


def _chains(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30, name="chained") as group:
        etp.set_cuda_graph_scope({"attn"})
        scoped = etp.shard_module_(_built(), group, min_elements=256)
        etp.set_cuda_graph_scope()
        model = etp.shard_module_(_built(), group, min_elements=256)
        attention = [each.layer["self_attention"].q.weight.etp for each in (scoped, model)]
        found["chains"] = [scoped.emb.weight.etp.chain, *(each.chain for each in attention)]
        found["none yet"] = etp.streams()
        etp.set_cuda_graph_scope(["moe", "attn"], moe_shared_expert_overlap=True)
        etp.classify_etp_chains(model)
        etp.set_cuda_graph_scope()
        found["classified"] = attention[1].chain
        for _ in range(2):
            _step(model, rank)
            _step(scoped, rank)
        # Gathers are waited for by any rank; gradients, by all of them.
        if rank == 0:
            etp.wait_async_comms("GRAPHED", reductions=False)
            etp.wait_async_comms(reductions=False)
        streams = etp.streams("GRAPHED")
        found["streams"] = {(each.chain, each.group, each.kind) for each in streams}
        found["both"] = {each.chain for each in etp.streams()}
        for each in streams:
            each.synchronize()
        found["idle"] = all(each.idle for each in streams)
        del scoped  # only models that somebody has are waited for
        loss = model(batch(rank)[0]).sum()
        if rank == 1:
            loss.backward()
        else:
            etp.wait_async_comms("UNGRAPHED")
        found["gradients"] = all(each.grad is not None for each in model.parameters() if each.numel())
    return found


def test_chains_and_streams() -> None:
    for found in launch(_chains, 2):
        assert found["chains"] == ["UNGRAPHED", "GRAPHED", "UNGRAPHED"]
        assert found["classified"] == "GRAPHED"
        assert found["none yet"] == []
        assert ("GRAPHED", "chained", "reduce") in found["streams"]
        assert {each[:2] for each in found["streams"]} == {("GRAPHED", "chained")}
        assert found["both"] == {"GRAPHED", "UNGRAPHED"}
        assert found["idle"] and found["gradients"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: etp.set_cuda_graph_scope({"atn"}), 'unknown CUDA graph scope "atn".*attn'),
        (lambda: etp.set_cuda_graph_scope("attn"), "scope 'attn': give a set of names"),
        (lambda: etp.set_cuda_graph_scope(moe_shared_expert_overlap=1), "moe_shared_expert_overlap 1: give True"),
        (lambda: etp.streams("graphed"), "chain 'graphed': 'GRAPHED' and 'UNGRAPHED' are possible"),
        (lambda: etp.wait_async_comms("all"), "chain 'all': 'GRAPHED' and 'UNGRAPHED' are possible"),
        (lambda: etp.wait_async_comms(reductions=0), "reductions 0: give True or False"),
    ],
)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=message):
        call()
