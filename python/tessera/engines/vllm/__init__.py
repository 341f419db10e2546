"""vLLM takes weights from a trainer by the tensor bus, while it serves.

On the side of vLLM, once this package is installed (it is a plugin that vLLM finds by itself):

    VLLM_PLUGINS=tessera vllm serve MODEL --weight-transfer-config '{"backend": "tessera"}'

On the side of the trainer, see trainer(); or, with vLLM's own interface of one, TesseraTrainerInitInfo. It has met vLLM
0.32 for CPU; of 0.28 to 0.33 the interface is known.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._register import register
from ._settings import BACKEND

if TYPE_CHECKING:
    from .._updates import EngineUpdate
    from ._trainer import Trainer, trainer
    from ._trainer_engine import TesseraTrainerEngine, TesseraTrainerInitInfo

__all__ = [
    "BACKEND",
    "EngineUpdate",
    "TesseraTrainerEngine",
    "TesseraTrainerInitInfo",
    "Trainer",
    "register",
    "trainer",
]

_LAZY = {
    "EngineUpdate": ".._updates",
    "Trainer": "._trainer",
    "trainer": "._trainer",
    "TesseraTrainerEngine": "._trainer_engine",
    "TesseraTrainerInitInfo": "._trainer_engine",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(name)
