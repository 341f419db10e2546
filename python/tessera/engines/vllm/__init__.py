"""vLLM takes weights from a trainer by the tensor bus, while it serves.

On the side of vLLM, once this package is installed (it is a plugin that vLLM finds by itself):

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "tessera"}' \\
        --worker-extension-cls tessera.engines.vllm.worker.Extension

On the side of the trainer, see Trainer. It has met vLLM 0.32 for CPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..._errors import InvalidArgumentError

if TYPE_CHECKING:
    from .trainer import EngineUpdate, Trainer

__all__ = ["BACKEND", "EngineUpdate", "Trainer", "register"]

BACKEND = "tessera"
CPU_IN_PLACE = "TESSERA_VLLM_CPU_IN_PLACE"


def register() -> None:
    """Makes the backend known to vLLM, which calls this in each of its processes. Cheap and idempotent."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__name__}.worker", "TesseraWeightTransferEngine")
    if _flag(CPU_IN_PLACE):
        _keep_linears_unpacked()


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise InvalidArgumentError(f"{name}={value}: give 0 or 1")
    return value == "1"


def _keep_linears_unpacked() -> None:
    """On a CPU, vLLM packs linears for oneDNN; so they stay as they are on GPUs, and updates are copies in place."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


def __getattr__(name: str) -> Any:
    if name in ("EngineUpdate", "Trainer"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(name)
