"""What vLLM is told of us."""

from __future__ import annotations

from ._settings import BACKEND, keeps_linears


def register() -> None:
    """Makes the backend known to vLLM, which calls this in each of its processes. Cheap and idempotent. A vLLM whose
    interface is not known refuses the backend once it is asked for, and runs without."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    except ImportError:  # too old for any backend
        return
    for factory, module, name in (
        (WeightTransferEngineFactory, "worker", "TesseraWeightTransferEngine"),
        (WeightTransferTrainerFactory, "_trainer_engine", "TesseraTrainerEngine"),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, f"{__package__}.{module}", name)
    _register_loader()
    if keeps_linears():
        keep_linears_unpacked()


def _register_loader() -> None:
    from ._generation import model_loaders

    loaders = model_loaders()
    if loaders is not None and BACKEND not in loaders._LOAD_FORMAT_TO_MODEL_LOADER:
        from .loader import TesseraModelLoader

        loaders.register_model_loader(BACKEND)(TesseraModelLoader)


def keep_linears_unpacked() -> None:
    """On a CPU, vLLM packs linears for oneDNN; so they stay as they are on GPUs, and updates are copies in place."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
