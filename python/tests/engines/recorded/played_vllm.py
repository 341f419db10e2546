"""A release of vLLM as its record has it, with one worker that makes the calls which that release's worker makes."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm_interface

KNOWN = ("0.28", "0.29-0.31", "0.32", "0.33")
TRANSFER = "vllm.distributed.weight_transfer"
RELOAD = "vllm.model_executor.model_loader.reload"


class Played:
    """The modules of a release, while it is the one that is imported."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.base = importlib.import_module(f"{TRANSFER}.base")
        self.factory = importlib.import_module(f"{TRANSFER}.factory")
        self.ours = importlib.import_module("tessera.engines.vllm")

    def worker(self, model: torch.nn.Module) -> Any:
        """One that has loaded `model`, with the backend "tessera" and our extension."""
        extension = importlib.import_module("tessera.engines.vllm.worker").Extension
        return type("Worker", (extension, Worker), {})(self, model)


class Worker:
    """Rank 0 of 1."""

    def __init__(self, played: Played, model: torch.nn.Module) -> None:
        self._played = played
        self._weight_update_active = False
        parallel = importlib.import_module("vllm.config.parallel").ParallelConfig()
        values = {"data_parallel_size": 1, "data_parallel_index": 0, "world_size": 1, "rank": 0}
        for name in type(parallel).__annotations__:
            setattr(parallel, name, values[name])
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(dtype=torch.bfloat16),
            weight_transfer_config=SimpleNamespace(backend="tessera"),
        )
        self.device = torch.device("cpu")
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.weight_transfer_engine: Any = None
        self.play("load_model")

    def play(self, method: str, argument: Any = None) -> None:
        """Calls the engine as that method does. Names that the record does not explain stand for `argument`."""
        names = {"self": self, "WeightTransferEngineFactory": self._played.factory.WeightTransferEngineFactory}
        names["weight_transfer_engine"] = self.weight_transfer_engine
        played = vllm_interface.calls(self._played.version, method)
        assert played, method
        for statement in played:
            for each in ast.walk(statement):
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
                    names.setdefault(each.id, argument)
            exec(compile(ast.Module([statement], []), method, "exec"), names)

    def start(self) -> None:
        assert not self._weight_update_active, "vLLM raises here"
        self.play("_start_weight_update")
        self._weight_update_active = True

    def finish(self) -> None:
        assert self._weight_update_active, "vLLM raises here"
        self.play("finish_weight_update")
        self._weight_update_active = False


class Client:
    """A VLLMWeightSyncClient of a worker in this process; what it passes on has been JSON."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.version = ""
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.worker.play("init_weight_transfer_engine", json.loads(json.dumps(init_info)))

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.worker.start()

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        self.worker.play("update_weights", json.loads(json.dumps(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        self.worker.finish()
        self.version = self.version if weight_version is None else weight_version

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return [json.loads(json.dumps(getattr(self.worker, method)(*args)))]

    def update_weight_version(self, new_version: str) -> None:
        self.version = new_version


@contextlib.contextmanager
def played(version: str, folder: Path, change: tuple[str, str] | None = None) -> Iterator[Played]:
    """Makes `import vllm` find this release, and imports the adapter again. `change`: (text, text instead of it)."""
    vllm_interface.install(version, folder)
    if change is not None:
        path = folder.joinpath(*TRANSFER.split("."), "base.py")
        assert change[0] in path.read_text()
        path.write_text(path.read_text().replace(*change))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_imported_again(name)}
    engines = importlib.import_module("tessera.engines")
    adapter = engines.__dict__.pop("vllm", None)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        _behave()
        yield Played(version)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if _is_imported_again(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
        engines.__dict__.pop("vllm", None)
        if adapter is not None:
            engines.__dict__["vllm"] = adapter


def _is_imported_again(name: str) -> bool:
    return name.split(".")[0] == "vllm" or name.startswith("tessera.engines.vllm")


def _behave() -> None:
    """What functions do that the adapter relies on."""
    base, factory = (importlib.import_module(f"{TRANSFER}.{name}") for name in ("base", "factory"))
    engine = base.WeightTransferEngine
    engine.parse_init_info = lambda self, init_dict: self.init_info_cls(**init_dict)
    engine.parse_update_info = lambda self, update_dict: self.update_info_cls(**update_dict)
    base.TrainerInitInfo.is_sender = property(lambda self: self.rank == 0)
    for each in (factory.WeightTransferEngineFactory, factory.WeightTransferTrainerFactory):
        each.register_engine = classmethod(_register)
    factory.WeightTransferEngineFactory.create_engine = classmethod(
        lambda cls, config, *args: _registered(cls, config.backend)(config, *args)
    )
    factory.WeightTransferTrainerFactory.trainer_init = classmethod(
        lambda cls, info, *, client, source=None: _registered(cls, info.backend).trainer_init(
            info, client=client, source=source
        )
    )
    if hasattr(base.WeightSource, "iter_local"):
        base.WeightSource.implements_iter_local = lambda self: type(self).iter_local is not base.WeightSource.iter_local
    config = importlib.import_module("vllm.config")
    config.set_current_vllm_config = lambda *args: contextlib.nullcontext()
    group = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)
    importlib.import_module("vllm.distributed.parallel_state").get_world_group = lambda: group
    _behave_at_reloads()


def _register(cls: Any, name: str, module: str, class_name: str) -> None:
    if name in cls._registry:
        raise ValueError(f"{name} is registered already")
    cls._registry[name] = lambda: getattr(importlib.import_module(module), class_name)


def _registered(cls: Any, name: str) -> Any:
    return cls._registry[name]()


def _behave_at_reloads() -> None:
    """A layer runs in the form in which it is loaded."""
    layerwise, meta = (importlib.import_module(f"{RELOAD}.{name}") for name in ("layerwise", "meta"))

    def to_meta(tensor: Any) -> Any:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        made.__class__ = tensor.__class__
        made.__dict__.update(tensor.__dict__)
        return made

    def restore(layer: Any, info: Any) -> None:
        layer._parameters.update(info.restore_metadata[0])

    layerwise.get_layerwise_info = lambda layer: SimpleNamespace(
        restore_metadata=({name: to_meta(each) for name, each in layer._parameters.items()}, {})
    )
    layerwise._get_original_loader = lambda tensor: tensor.weight_loader
    meta.to_meta_tensor = to_meta
    meta.restore_layer_on_meta = restore
    meta.restore_layer_refs = lambda tensor, layer: tensor
    importlib.import_module("vllm.model_executor.layers.attention").is_deferred_attention_layer = lambda layer: False
