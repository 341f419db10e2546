"""Small models of vLLM, by config.json alone: random ones of each architecture, and a fixed one for each layout."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

Configuration = dict[str, Any]
COMMON = {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _decoder(kind: str, model_type: str, chosen: random.Random, **further: Any) -> Configuration:
    """As in Llama and most that followed. Heads and kv heads can be cut in two, or repeated over two ranks."""
    heads = chosen.choice((2, 4, 8))
    head_dim = chosen.choice((32, 64))
    return {
        **COMMON,
        "architectures": [kind],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": heads * head_dim,
        "head_dim": head_dim,
        "intermediate_size": 32 * chosen.randint(3, 12),
        "num_hidden_layers": chosen.randint(2, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": chosen.choice([each for each in (1, 2, 4) if each <= heads]),
        "vocab_size": chosen.randint(500, 1200),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        **further,
    }


def _llama(chosen: random.Random) -> Configuration:
    return _decoder("LlamaForCausalLM", "llama", chosen)


def _mistral(chosen: random.Random) -> Configuration:
    return _decoder("MistralForCausalLM", "mistral", chosen)


def _qwen2(chosen: random.Random) -> Configuration:
    """Biases of q, k and v."""
    return _decoder("Qwen2ForCausalLM", "qwen2", chosen)


def _qwen3(chosen: random.Random) -> Configuration:
    """Norms of q and k; tied embeddings."""
    return _decoder("Qwen3ForCausalLM", "qwen3", chosen, tie_word_embeddings=True)


def _phi3(chosen: random.Random) -> Configuration:
    """Fused in the checkpoint."""
    return _decoder("Phi3ForCausalLM", "phi3", chosen)


def _olmo2(chosen: random.Random) -> Configuration:
    made = _decoder("Olmo2ForCausalLM", "olmo2", chosen)
    return made | {"num_key_value_heads": made["num_attention_heads"]}


def _granite(chosen: random.Random) -> Configuration:
    return _decoder("GraniteForCausalLM", "granite", chosen, tie_word_embeddings=True)


def _starcoder2(chosen: random.Random) -> Configuration:
    """Biases everywhere, layer norms, two matrices for an MLP."""
    further = {"use_bias": True, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    return _decoder("Starcoder2ForCausalLM", "starcoder2", chosen, **further)


def _gemma2(chosen: random.Random) -> Configuration:
    further = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    return _decoder("Gemma2ForCausalLM", "gemma2", chosen, **further)


def _qwen3_moe(chosen: random.Random) -> Configuration:
    further = {
        "moe_intermediate_size": 32 * chosen.randint(1, 4),
        "num_experts": chosen.choice((4, 8)),
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }
    return _decoder("Qwen3MoeForCausalLM", "qwen3_moe", chosen, **further)


def _qwen2_moe(chosen: random.Random) -> Configuration:
    """And a shared expert."""
    made = _qwen3_moe(chosen) | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
    return made | {"shared_expert_intermediate_size": 32 * chosen.randint(1, 4)}


def _mixtral(chosen: random.Random) -> Configuration:
    further = {"num_local_experts": chosen.choice((4, 8)), "num_experts_per_tok": 2}
    made = _decoder("MixtralForCausalLM", "mixtral", chosen, **further)
    return made | {"intermediate_size": 64 * chosen.randint(1, 4)}


def _deepseek(kind: str, model_type: str, chosen: random.Random, **further: Any) -> Configuration:
    """Latent attention, a dense layer and then routed and shared experts."""
    heads = chosen.choice((2, 4))
    return {
        **_decoder(kind, model_type, chosen),
        "hidden_size": 64 * chosen.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 16,
        "moe_intermediate_size": 32 * chosen.randint(1, 3),
        "n_routed_experts": 8,
        "n_shared_experts": chosen.randint(1, 2),
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "attention_bias": False,
        **further,
    }


def _deepseek_v2(chosen: random.Random) -> Configuration:
    further = {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    }
    return _deepseek("DeepseekV2ForCausalLM", "deepseek_v2", chosen, **further)


def _deepseek_v3(chosen: random.Random) -> Configuration:
    """And a bias of its router that is loaded as fp32."""
    further = {
        "q_lora_rank": 64,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
    }
    return _deepseek("DeepseekV3ForCausalLM", "deepseek_v3", chosen, **further)


def _gpt2(chosen: random.Random) -> Configuration:
    """Matrices lie transposed in the checkpoint."""
    sizes = {"n_embd": 64 * chosen.randint(1, 3), "n_layer": 2, "n_head": 2, "n_positions": 512}
    further = {"vocab_size": chosen.randint(500, 1200), "activation_function": "gelu_new"}
    return {**COMMON, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes, **further}


def _gpt_neox(chosen: random.Random) -> Configuration:
    """q, k and v interleaved by head."""
    heads = chosen.choice((2, 4))
    return {
        **COMMON,
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": heads * 32,
        "intermediate_size": 64 * chosen.randint(1, 4),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "vocab_size": chosen.randint(500, 1200),
        "rotary_pct": 0.25,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "hidden_act": "gelu",
    }


def _mamba2(chosen: random.Random) -> Configuration:
    return {
        **COMMON,
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 32,
        "n_groups": 1,
        "expand": 2,
        "conv_kernel": 4,
        "vocab_size": 600,
        "tie_word_embeddings": True,
        "use_conv_bias": True,
        "use_bias": False,
        "rms_norm": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "chunk_size": 64,
        "time_step_limit": [0.0, 1e9],
    }


ARCHITECTURES: dict[str, Callable[[random.Random], Configuration]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "granite": _granite,
    "starcoder2": _starcoder2,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
_FURTHER = {"mistral": _mistral, "qwen2_moe": _qwen2_moe, "mamba2": _mamba2}


def configuration(name: str, seed: int, **changes: Any) -> Configuration:
    """A random one of an architecture."""
    return {**ARCHITECTURES, **_FURTHER}[name](random.Random(f"{name} {seed}")) | changes


def save_configuration(made: Configuration, folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder, which then has config.json."""
    (folder / "config.json").write_text(json.dumps(made))
    return folder


_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1001,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8}
CONFIGS: dict[str, Configuration] = {
    "llama": configuration("llama", 0, **_SIZES),
    "llama, 1 kv head": configuration("llama", 0, **_SIZES | {"num_key_value_heads": 1}),
    "mistral": configuration("mistral", 0, **_SIZES | {"head_dim": 64}),
    "qwen2": configuration("qwen2", 0, **_SIZES),
    "qwen3": configuration("qwen3", 0, **_SIZES),
    "qwen2_moe": configuration("qwen2_moe", 0, **_SIZES, **_EXPERTS, shared_expert_intermediate_size=96),
    "qwen3_moe": configuration("qwen3_moe", 0, **_SIZES, **_EXPERTS),
    "mixtral": configuration("mixtral", 0, **_SIZES, num_local_experts=4),
}
