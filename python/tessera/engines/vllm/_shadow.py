"""A model of vLLM as each rank of a group loads it, without data and in one process: for asking its loader."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..._errors import InvalidArgumentError
from ._generation import reloading


def config_of(folder: Path, tp: int, *, expert_parallel: bool = False, trust_remote_code: bool = False) -> Any:
    """vLLM's configuration for a model's folder, which needs no more than config.json.

    Raises InvalidArgumentError: vLLM does not know the model, or cannot share it out to `tp` ranks; with its reason.
    """
    from vllm.engine.arg_utils import EngineArgs

    try:
        config = EngineArgs(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            trust_remote_code=trust_remote_code,
        ).create_engine_config()
        # Not as an argument: vLLM would want `tp` devices.
        config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = tp
        config.parallel_config.enable_expert_parallel = expert_parallel
        config.model_config.verify_with_parallel_config(config.parallel_config)
    except Exception as error:
        raise InvalidArgumentError(f"{folder}: vLLM refuses it: {error}") from error
    return config


@contextlib.contextmanager
def group(config: Any) -> Iterator[None]:
    """A group of one process, in which as_rank() can be called for models of `config`. Raises InvalidArgumentError if
    this process is in a group already."""
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config

    if torch.distributed.is_initialized():
        raise InvalidArgumentError("this process is in a group of torch.distributed: ask in another process")
    alone = copy.copy(config)
    alone.parallel_config = copy.copy(config.parallel_config)
    alone.parallel_config.tensor_parallel_size = alone.parallel_config.world_size = 1
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(alone):
        try:
            state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
            state.initialize_model_parallel(1)
            yield
        finally:
            state.destroy_model_parallel()
            state.destroy_distributed_environment()


def as_rank(config: Any, rank: int) -> torch.nn.Module:
    """The model as this rank makes it, on the meta device; within group(). Layers ask vLLM's groups only who they are,
    and are told so: nothing is exchanged."""
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    size = config.parallel_config.tensor_parallel_size
    own = copy.deepcopy(config)  # layers register themselves in it
    for coordinator in (state.get_tp_group(), *_experts(state)):
        coordinator.rank_in_group, coordinator.world_size, coordinator.ranks = rank, size, list(range(size))
    with (
        set_current_vllm_config(own),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("cpu"),
        _EmptyOnMeta(),
        torch.no_grad(),
    ):
        model: torch.nn.Module = initialize_model(own)
    _without_data(model)
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """Memory that nobody fills is not taken. All else is: layers look at what they compute, such as maps of experts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "meta"} if func is torch.empty else kwargs))


def _without_data(model: torch.nn.Module) -> None:
    """Whatever a loader may write is on meta. Integers that are no parameters are what it may look at."""
    to_meta = reloading().to_meta
    made: dict[int, Any] = {}  # tied ones stay tied
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None or tensor.is_meta or (tensors is module._buffers and not tensor.is_floating_point()):
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = to_meta(tensor)
                tensors[name] = made[id(tensor)]


def _experts(state: Any) -> list[Any]:
    try:
        return [state.get_ep_group()]
    except AssertionError:  # a model without experts
        return []


def quiet() -> None:
    """Before vLLM is imported: no log but errors, and nothing is fetched."""
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)
