"""As much of vLLM as the worker's module needs, so that its code runs where vLLM is not installed."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any, Generic, TypeVar

InitInfo = TypeVar("InitInfo")
UpdateInfo = TypeVar("UpdateInfo")
RANK, WORLD = 0, 1  # of this process in the engine


class Engine(Generic[InitInfo, UpdateInfo]):
    """The base of weight transfer engines."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config


class Info:
    """The base of init and update info."""


class Loader:
    """The base of model loaders."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


class Group:
    """The group of all ranks."""

    @property
    def rank_in_group(self) -> int:
        return RANK

    @property
    def world_size(self) -> int:
        return WORLD


def config() -> Any:
    parallel = types.SimpleNamespace(data_parallel_size=1, data_parallel_index=0)
    return types.SimpleNamespace(parallel_config=parallel, model_config=types.SimpleNamespace(dtype=None))


def install(rank: int, world: int) -> None:
    """Makes `import vllm...` find this in the process."""
    global RANK, WORLD
    RANK, WORLD = rank, world
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {
            "set_current_vllm_config": lambda config: contextlib.nullcontext(),
            "get_current_vllm_config": config,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": Loader},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_world_group": Group},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Engine,
            "WeightTransferInitInfo": Info,
            "WeightTransferUpdateInfo": Info,
        },
    }
    for name, members in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
