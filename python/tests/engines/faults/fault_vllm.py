"""Faults in vLLM itself: a model of vLLM in a process of the test, and an extension for the workers of a server."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import torch
from fault_points import Faults
from vllm_configs import CONFIGS, save_configuration

LLAMA = CONFIGS["llama"] | {"vocab_size": 500}
FAULTS = Faults()


def write_model(path: str) -> str:
    """The configuration, and the shapes of the checkpoint, in a folder; returns its name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = pathlib.Path(path)
    save_configuration(LLAMA, folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shapes = {name: list(each.shape) for name, each in model.state_dict().items()}
    (folder / "shapes.json").write_text(json.dumps(shapes))
    return str(folder)


def install_faults() -> None:
    """Once in a process."""
    from tessera.engines import _learn, _live
    from tessera.engines.vllm import _joined, _layers, worker

    if hasattr(worker, "is_faulty"):
        return
    worker.is_faulty = True
    FAULTS.around_worker()
    FAULTS.around(_joined, "plan_of", "plan")
    FAULTS.around(_layers, "is_proven", "proof")
    FAULTS.around(_layers.Shadow, "fill", "fill")
    FAULTS.around(_layers.Shadow, "process", "process", "processed")
    for name in ("build", "swap", "undo", "drop"):
        FAULTS.around(_layers.RebuiltLayers, name, name)
    FAULTS.around(_layers, "_replace", "replace")
    copying = []
    real = _live.LiveWeights._copy

    def copy(live: Any, done: Any) -> None:
        copying.append(live)
        try:
            real(live, done)
        finally:
            copying.clear()

    _live.LiveWeights._copy = copy  # type: ignore[method-assign]
    install = _learn.Piece.install

    def faulty(piece: Any, parameter: torch.Tensor, staged: torch.Tensor) -> None:
        if copying:
            FAULTS.at("copy")
        install(piece, parameter, staged)

    _learn.Piece.install = faulty  # type: ignore[method-assign]


def worker(place: Any, meeting: str) -> Any:
    """What vLLM's worker has that matters here, around a model of vLLM."""
    import vllm.distributed.parallel_state as parallel
    from fault_ranks import contents
    from tessera.engines.vllm import worker as module
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    os.environ["VLLM_DIST_IDENT"] = str(place.port)  # of the ranks' shared memory
    install_faults()
    config = EngineArgs(
        model=place.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        dtype="bfloat16",
        max_num_seqs=4,
        tensor_parallel_size=place.world,
    ).create_engine_config()

    def loaded(number: int) -> torch.nn.Module:
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.no_grad():
            config.compilation_config.static_forward_context.clear()
            model: torch.nn.Module = initialize_model(config).eval()
            model.load_weights(iter(contents(number, place.model).items()))  # type: ignore[operator]
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        return model

    class Worker(module.Extension):  # type: ignore[misc]
        def __init__(self) -> None:
            self.faults = FAULTS
            self.vllm_config = config
            self.model = loaded(0)
            self.weight_transfer_engine = module.TesseraWeightTransferEngine(
                None, config, torch.device("cpu"), self.model
            )

        def holds(self, number: int) -> str:
            """Empty if the weights are those that vLLM leaves of contents(number); else those that are not."""
            wanted, found = state(loaded(number)), state(self.model)
            return " ".join(name for name, each in wanted.items() if not torch.equal(each, found[name]))

    with set_current_vllm_config(config):
        parallel.init_distributed_environment(
            world_size=place.world,
            rank=place.rank,
            distributed_init_method=meeting,
            local_rank=place.rank,
            backend="gloo",
        )
        parallel.initialize_model_parallel(tensor_model_parallel_size=place.world)
    return Worker()


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and what packed linears make of an input."""
    found = {name: each.detach().clone() for name, each in model.named_parameters(remove_duplicate=False)}
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            size = module.input_size_per_partition if hasattr(module, "input_size_per_partition") else None
            size = size or getattr(module, "embedding_dim", None) or module.input_size
            x = torch.randn(3, size, generator=torch.Generator().manual_seed(0)).bfloat16()
            found[f"{name} of x"] = module.cpu_linear(x, module.weight, None).clone()
    return found


def extension() -> Any:
    from tessera.engines.vllm.worker import Extension

    class FaultyExtension(Extension):  # type: ignore[misc]
        """`--worker-extension-cls fault_vllm.FaultyExtension`: faults on demand in the workers of a real server."""

        def arm(self, rank: int, *fault: Any) -> dict[str, Any]:
            install_faults()
            if rank == self.rank:  # type: ignore[attr-defined]
                FAULTS.arm(*fault)
            return {}

        def disarm(self) -> list[str]:
            return FAULTS.disarm()

        def process_id(self) -> list[int]:
            return [os.getpid()]

    return FaultyExtension


def __getattr__(name: str) -> Any:
    if name == "FaultyExtension":  # vLLM's modules are imported by those who ask for it
        globals()[name] = extension()
        return globals()[name]
    raise AttributeError(name)
