"""A worker's engine around a model of a real vLLM, and a trainer in another process: after each version, what it
holds is compared, bit for bit, with what vLLM loads of the same checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch
import vllm_configs as configs
import vllm_models as models

LIMIT = 300.0
_TRAIN = """
import sys, tessera, torch
file, limit = sys.argv[1], float(sys.argv[2])
versions = torch.load(file)
tensors = {name: each.clone() for name, each in versions[0].items()}
with tessera.connect("weights", role="trainer", peer=["engine"], rank=0, world=1, timeout=limit) as bus:
    batch = bus.register(tensors, "default", "staged", direction="send", timeout=limit)
    for number, version in enumerate(versions, 1):
        for name, each in version.items():
            tensors[name].copy_(each)
        batch.send(number).wait()
        if not sys.stdin.readline():
            break
"""


class Engine:
    """Of one rank, in this process."""

    def __init__(self, config: Any, model: torch.nn.Module) -> None:
        from tessera.engines.vllm.worker import Extension, TesseraWeightTransferEngine

        self.engine = TesseraWeightTransferEngine(None, config, torch.device("cpu"), model)
        self.worker: Any = type("Worker", (Extension,), {})()
        self.worker.weight_transfer_engine = self.engine

    def done(self, status: dict[str, Any]) -> dict[str, Any]:
        end = time.monotonic() + LIMIT
        while status["busy"]:
            assert time.monotonic() < end
            time.sleep(0.002)
            status = self.worker.tessera_status()
        assert not status["failure"], status
        return status

    def join(self) -> dict[str, Any]:
        self.done(self.worker.tessera_meet({"timeout": LIMIT, "run": "here"}))
        return self.done(self.worker.tessera_learn())

    def take(self, version: int) -> dict[str, Any]:
        assert self.done(self.worker.tessera_receive(version, LIMIT))["ready"]
        status: dict[str, Any] = self.worker.tessera_commit()
        assert status["verdict"]["ok"], status
        return status


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its tensors, those that attention has packed for AMX, and what linears give that are packed out of sight."""
    found = {name: each.clone() for name, each in models.tensors(model).items()}
    for name, module in model.named_modules():
        hidden = vars(module.impl) if hasattr(module, "impl") else {}
        found |= {f"{name}.impl.{key}": each.clone() for key, each in hidden.items() if isinstance(each, torch.Tensor)}
        packed: Any = getattr(module, "cpu_linear", None)
        if packed is None or not hasattr(module, "input_size_per_partition"):
            continue
        if packed is torch.nn.functional.linear and module.weight.numel() == 0:  # attention has taken it
            continue
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(3, module.input_size_per_partition, generator=generator)  # type: ignore[arg-type]
        found[f"{name}()"] = packed(probe.to(torch.bfloat16), module.weight, None).clone()
    return found


def loaded_by_vllm(made: configs.Configuration, config: Any, checkpoint: dict[str, torch.Tensor]) -> Any:
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        model = initialize_model(config).eval()
    model.load_weights(iter(checkpoint.items()))
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return held(model)


def differing(model: torch.nn.Module, wanted: dict[str, torch.Tensor]) -> list[str]:
    found = held(model)
    return [name for name, each in wanted.items() if name not in found or not torch.equal(found[name], each)]


def compare(name: str, starts: str, seed: int = 3) -> list[dict[str, Any]]:
    """Of three versions. `starts`: with "checkpoint" the engine has loaded another one; with "trainer" it waits for the
    first version, as --load-format tessera does."""
    made = configs.configuration(name, seed)
    versions = [models.random_checkpoint(made, seed + each) for each in range(3)]
    with tempfile.NamedTemporaryFile() as file, models.loaded_form(made, port=models.free_port()) as (config, model):
        torch.save(versions, file.name)
        command = [sys.executable, "-c", _TRAIN, file.name, str(LIMIT)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as trainer:
            try:
                return _compare(made, versions, config, model, trainer, starts)
            finally:
                trainer.kill()


def _compare(made: Any, versions: Any, config: Any, model: Any, trainer: Any, starts: str) -> list[dict[str, Any]]:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    found = []
    if starts == "trainer":
        from tessera.engines.vllm.loader import TesseraModelLoader

        given = SimpleNamespace(model_loader_extra_config={"timeout": LIMIT})
        TesseraModelLoader(given).load_weights(model, config.model_config)
    else:
        model.load_weights(iter(models.random_checkpoint(made, 99).items()))
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    engine = Engine(config, model)
    joined = engine.join()
    if starts == "trainer":
        wanted = loaded_by_vllm(made, config, versions[0])
        found.append({"version": joined["version"], "differing": differing(model, wanted), "compared": len(wanted)})
    for number in range(1 + (starts == "trainer"), len(versions) + 1):
        if number > 1:
            trainer.stdin.write("\n")  # the next one
            trainer.stdin.flush()
        status = engine.take(number)
        wanted = loaded_by_vllm(made, config, versions[number - 1])
        found.append(
            {
                "version": status["version"],
                "differing": differing(model, wanted),
                "compared": len(wanted),
                "in_place": status["in_place"] + status["exchanged"],
                "rebuilt": status["rebuilt"],
            }
        )
    engine.worker.tessera_leave()
    return found


def main() -> None:
    torch.set_num_threads(1)
    from tessera.engines.vllm import register

    register()
    for each in compare(sys.argv[1], sys.argv[2]):
        print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
