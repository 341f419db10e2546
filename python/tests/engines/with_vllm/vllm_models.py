"""Small models of vLLM in this process, as its loader makes them, and checkpoints for them. Needs vLLM for CPU."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

import torch
from vllm_configs import Configuration, save_configuration


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
        model.should_save_on_this_rank = lambda _: True  # not only on rank 0, once there are process groups
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
        os.environ["VLLM_DIST_IDENT"] = str(port)  # names their shared memory: vLLM asks for it
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
