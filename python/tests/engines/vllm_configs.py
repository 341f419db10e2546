"""Small models of vLLM, by config.json alone; for tests that need vLLM itself."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "vocab_size": 1001,
}
_EXPERTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: {**_COMMON, **given, "architectures": [architecture]}
    for name, architecture, given in (
        ("llama", "LlamaForCausalLM", {"model_type": "llama"}),
        ("llama, 1 kv head", "LlamaForCausalLM", {"model_type": "llama", "num_key_value_heads": 1}),
        ("mistral", "MistralForCausalLM", {"model_type": "mistral", "head_dim": 64}),
        ("qwen2", "Qwen2ForCausalLM", {"model_type": "qwen2"}),
        ("qwen3", "Qwen3ForCausalLM", {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}),
        (
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 96, **_EXPERTS},
        ),
        ("qwen3_moe", "Qwen3MoeForCausalLM", {"model_type": "qwen3_moe", "head_dim": 32, **_EXPERTS}),
        (
            "mixtral",
            "MixtralForCausalLM",
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
    )
}


def save_config(name: str, folder: Path) -> Path:
    """Returns the folder, which then has config.json."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder
