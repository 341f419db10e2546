"""Tiny models of transformers with random weights: in memory, and as they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tessera
import torch
import transformers
from safetensors.torch import load_file
from serving_engine import EngineRank
from tessera import maps

COMMON = {
    "vocab_size": 250,  # padded to 256 by the engine
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, **MOE},
    "qwen2_moe": {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1], **MOE},
}


class Model:
    """One of MODELS, with `changes` of its config."""

    def __init__(self, kind: str, folder: Path, **changes: Any) -> None:
        self.folder = folder
        self.config = transformers.AutoConfig.for_model(kind, **COMMON | MODELS[kind] | changes)
        self.memory = self.empty()
        torch.manual_seed(7)
        with torch.no_grad():
            for param in self.memory.parameters():
                param.normal_()
        self.memory.save_pretrained(folder)
        self.checkpoint: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")

    def empty(self) -> Any:
        model = transformers.AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        return model

    def empty_checkpoint(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(tensor) for name, tensor in self.checkpoint.items()}

    def engines(self, tp: int, load: bool, expert_parallel: bool = False) -> list[EngineRank]:
        """The ranks of an engine, with their slices of the checkpoint, or with zeros."""
        ranks = [EngineRank(self.config, rank, tp, expert_parallel).build(self.checkpoint) for rank in range(tp)]
        return [rank.load(self.checkpoint) for rank in ranks] if load else ranks

    @property
    def padding(self) -> int:
        """The bytes after the vocabulary in the memory of an engine's ranks."""
        tables = sum(name in self.checkpoint for name in ("model.embed_tokens.weight", "lm_head.weight"))
        return tables * (-self.config.vocab_size % 64) * self.config.hidden_size * 2


def registered(engines: list[EngineRank], ranks: list[int] | None = None) -> list[tuple[dict[str, Any], Any]]:
    """For transfer()."""
    return [
        (
            one.params,
            maps.engine(one.config, one.tp_rank, one.tp_size, ranks=ranks, expert_parallel=one.expert_parallel),
        )
        for one in engines
    ]


def bytes_of(*tensors: dict[str, torch.Tensor]) -> int:
    return sum(each.nbytes for one in tensors for each in one.values())


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """To the last bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        bits = [each.detach().contiguous().view(torch.uint8) for each in (found[name], tensor)]
        assert torch.equal(*bits), f"{name} differs"


def assert_engines_same(found: list[EngineRank], expected: list[EngineRank]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same(one.params, other.params)


def assert_no_byte_twice(figures: list[list[tessera.BatchStats]], received: int) -> None:
    """`received`: bytes that the receivers have to get, over all ranks."""
    for side in figures:
        for one in side:
            assert one.bytes_moved == one.bytes_lower_bound == received
            assert one.allocations == 0
