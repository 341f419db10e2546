"""A serving engine's parameters and its own loading of a checkpoint, written after vLLM's layers and weight loaders.

The expectation of the mapping tests: it shares nothing with tessera.maps.
"""

from __future__ import annotations

from typing import Any

import torch

STACKED = [
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
]
PAD_VOCABULARY_TO = 64


class EngineRank:
    """The parameters of one rank: created with zeros, then loaded."""

    def __init__(self, config: Any, tp_rank: int, tp_size: int, expert_parallel: bool = False) -> None:
        self.config = config
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.expert_parallel = expert_parallel
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_heads = config.num_attention_heads // tp_size
        if config.num_key_value_heads >= tp_size:
            self.num_kv_heads = config.num_key_value_heads // tp_size
            self.num_kv_head_replicas = 1
        else:
            self.num_kv_heads = 1
            self.num_kv_head_replicas = tp_size // config.num_key_value_heads
        padded = -(-config.vocab_size // PAD_VOCABULARY_TO) * PAD_VOCABULARY_TO
        self.vocabulary_rows = padded // tp_size
        self.params: dict[str, torch.Tensor] = {}

    def build(self, checkpoint: dict[str, torch.Tensor]) -> EngineRank:
        """Creates the parameters for a checkpoint's names."""
        tp, moe = self.tp_size, getattr(self.config, "moe_intermediate_size", self.config.intermediate_size)
        experts = self._experts()
        for name, weight in checkpoint.items():
            shape = list(weight.shape)
            if ".experts." in name:
                prefix = name[: name.index(".experts.") + len(".experts.")]
                local, width = (experts // tp, moe) if self.expert_parallel else (experts, moe // tp)
                hidden = self.config.hidden_size
                self._make(f"{prefix}w13_weight", [local, 2 * width, hidden], weight.dtype)
                self._make(f"{prefix}w2_weight", [local, hidden, width], weight.dtype)
                continue
            for fused, single, _ in STACKED:
                if f".{single}." not in name:
                    continue
                name = name.replace(single, fused)
                if fused == "qkv_proj":
                    shape[0] = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
                else:
                    shape[0] = 2 * shape[0] // tp
                break
            else:
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    shape[1] //= tp
                elif "embed_tokens" in name or "lm_head" in name:
                    shape[0] = self.vocabulary_rows
            self._make(name, shape, weight.dtype)
        return self

    def _experts(self) -> int:
        given = self.config.to_dict()
        return given.get("num_experts") or given.get("num_local_experts") or 0

    def _make(self, name: str, shape: list[int], dtype: torch.dtype) -> None:
        if name not in self.params:
            self.params[name] = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

    def load(self, checkpoint: dict[str, torch.Tensor]) -> EngineRank:
        for name, weight in checkpoint.items():
            if ".experts." in name:
                self._load_expert(name, weight)
                continue
            for fused, single, shard in STACKED:
                if f".{single}." in name:
                    param = self.params[name.replace(single, fused)].data
                    if fused == "qkv_proj":
                        self._load_qkv(param, weight, str(shard))
                    else:
                        self._load_merged(param, weight, int(shard))
                    break
            else:
                self._load_single(name, weight)
        return self

    def _load_qkv(self, param: torch.Tensor, weight: torch.Tensor, shard: str) -> None:
        offset, size = {
            "q": (0, self.num_heads * self.head_dim),
            "k": (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim),
            "v": ((self.num_heads + self.num_kv_heads) * self.head_dim, self.num_kv_heads * self.head_dim),
        }[shard]
        shard_rank = self.tp_rank if shard == "q" else self.tp_rank // self.num_kv_head_replicas
        param.narrow(0, offset, size).copy_(weight.narrow(0, shard_rank * size, size))

    def _load_merged(self, param: torch.Tensor, weight: torch.Tensor, shard: int) -> None:
        size = weight.shape[0] // self.tp_size
        param.narrow(0, shard * size, size).copy_(weight.narrow(0, self.tp_rank * size, size))

    def _load_single(self, name: str, weight: torch.Tensor) -> None:
        param = self.params[name].data
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            size = param.shape[1]
            param.copy_(weight.narrow(1, self.tp_rank * size, size))
        elif "embed_tokens" in name or "lm_head" in name:
            start = min(self.tp_rank * self.vocabulary_rows, weight.shape[0])
            end = min(start + self.vocabulary_rows, weight.shape[0])
            loaded = weight.narrow(0, start, end - start)
            param[: loaded.shape[0]].copy_(loaded)
            param[loaded.shape[0] :].fill_(0)
        else:
            param.copy_(weight)

    def _load_expert(self, name: str, weight: torch.Tensor) -> None:
        prefix, rest = name.split(".experts.")
        index, projection, _ = rest.split(".")
        expert = int(index)
        tp_rank = self.tp_rank
        if self.expert_parallel:
            local = self._experts() // self.tp_size
            if expert // local != self.tp_rank:
                return
            expert, tp_rank = expert % local, 0
        if projection in ("down_proj", "w2"):
            data = self.params[f"{prefix}.experts.w2_weight"].data[expert]
            size = data.shape[1]
            data.copy_(weight.narrow(1, size * tp_rank, size))
            return
        data = self.params[f"{prefix}.experts.w13_weight"].data[expert]
        size = data.shape[0] // 2
        loaded = weight.narrow(0, size * tp_rank, size)
        data.narrow(0, 0 if projection in ("gate_proj", "w1") else size, size).copy_(loaded)
