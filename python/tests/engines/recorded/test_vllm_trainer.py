"""vLLM's own interface of a trainer, with the real package: its factories, sources, and a model that it has loaded."""

import pytest
import torch
from engine_marks import needs_vllm
from played_vllm import Client, Worker
from vllm_configs import CONFIGS, save_configuration


def made_by_transformers(folder, seed):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)


def loaded_by_vllm(config, weights):
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.bfloat16), torch.no_grad():
        model = initialize_model(config)
        model.load_weights(weights)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def worker_with(model, config):
    from tessera.engines.vllm.worker import Extension
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    class Loaded(Extension, Worker):
        def __init__(self):
            self._played = type("Installed", (), {"version": "0.32"})  # whose calls it makes
            self._played.factory = type("Factories", (), {"WeightTransferEngineFactory": WeightTransferEngineFactory})
            self._weight_update_active = False
            self.vllm_config = config
            self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend="tessera"), config, torch.device("cpu"), model
            )

    return Loaded()


@needs_vllm
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_module_of_transformers_is_sent_to_a_model_of_vllm(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_VLLM_CPU_IN_PLACE", "1")
    from tessera import maps
    from tessera.engines import vllm as ours
    from tessera.engines.vllm import _shadow
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer import ModuleSource, WeightSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import ParamMeta

    class Experts(WeightSource):
        """One tensor for each expert's projection, as the checkpoint has them; transformers stacks them in memory."""

        def __init__(self, module):
            self.module = module

        def metadata(self):
            return [ParamMeta(each, value.dtype, tuple(value.shape)) for each, value in self]

        def __iter__(self):
            mapping = maps.transformers(self.module.config)
            for each, value in self.module.named_parameters():
                parts = mapping(each, value)
                for part in [] if isinstance(parts, str) else parts:
                    yield part.name, value[part.whole]
                if isinstance(parts, str):
                    yield parts, value

    ours.register()
    folder = save_configuration(CONFIGS[name], tmp_path)
    config = _shadow.config_of(folder, 1)
    source = Experts if name == "qwen3_moe" else ModuleSource
    with _shadow.group(config), set_current_vllm_config(config):
        trained = made_by_transformers(folder, 0)
        model = loaded_by_vllm(config, iter(source(trained)))
        client = Client(worker_with(model, config))
        info = ours.TesseraTrainerInitInfo(rank=0, world=1, pair=f"installed-{name}")
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source(trained))
        for version in (1, 2):
            with torch.no_grad():
                for each, new in zip(
                    trained.parameters(), made_by_transformers(folder, version).parameters(), strict=True
                ):
                    each.copy_(new)
            trainer.send_weights()
            config.compilation_config.static_forward_context.clear()
            expected = dict(loaded_by_vllm(config, iter(source(trained))).named_parameters())
            live = dict(model.named_parameters())
            assert live.keys() == expected.keys()
            assert all(torch.equal(each, expected[key]) for key, each in live.items())
            assert client.version == str(version) and trainer.last_update.ok
        trainer.shutdown()
        client.worker.play("shutdown")
