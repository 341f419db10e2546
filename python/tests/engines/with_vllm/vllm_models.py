"""Small models of vLLM in this process, as its loader makes them, and checkpoints for them. Needs vLLM for CPU."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

import torch

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


def configuration(name: str, seed: int, **changes: Any) -> Configuration:
    """A random one of an architecture."""
    return ARCHITECTURES[name](random.Random(f"{name} {seed}")) | changes


def save_configuration(made: Configuration, folder: pathlib.Path) -> None:
    (folder / "config.json").write_text(json.dumps(made))


def hf_model(folder: pathlib.Path, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """transformers' model of the configuration in `folder`, with its own random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return model.eval()  # type: ignore[no-any-return]


def checkpoint_of(model: Any) -> dict[str, torch.Tensor]:
    """By the names of its files; tied tensors once."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        model.save_pretrained(folder)
        found: dict[str, torch.Tensor] = {}
        for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
            found |= load_file(file)
    if model.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    return found


def random_checkpoint(made: Configuration, seed: int) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        save_configuration(made, pathlib.Path(folder))
        torch.manual_seed(seed)
        found = checkpoint_of(hf_model(pathlib.Path(folder)))
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(each.shape, generator=generator).to(each.dtype) for name, each in found.items()}


def join(rank: int, ranks: int, port: int) -> None:
    """vLLM's process groups, over gloo; those for experts depend on the model."""
    from vllm.distributed import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
    else:
        parallel_state.init_distributed_environment(
            world_size=ranks,
            rank=rank,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            local_rank=rank,
            backend="gloo",
        )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)


@contextlib.contextmanager
def loaded_form(made: Configuration, rank: int = 0, ranks: int = 1, port: int = 0) -> Iterator[tuple[Any, Any]]:
    """vLLM's configuration and its model, before weights are loaded; vLLM finds the configuration until the end."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as folder:
        save_configuration(made, pathlib.Path(folder))
        asked = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            dtype="bfloat16",
            max_num_seqs=4,
            tensor_parallel_size=ranks,
        )
        config = asked.create_engine_config()
        with set_current_vllm_config(config), torch.no_grad():
            join(rank, ranks, port)
            with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
                model = initialize_model(config).eval()
            yield config, model


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
