"""SGLang takes weights from a trainer by the tensor bus, through its custom weight loaders.

On the side of SGLang, with the name that the trainer gives this server::

    TESSERA_SGLANG='{"engine": "engine0"}' python -m sglang.launch_server --model-path MODEL \\
        --custom-weight-loader tessera.engines.sglang.load

On the side of the trainer, see Trainer.

It follows the sources of SGLang 0.5.23, and has not met the package itself, which does not install without CUDA: its
tests play SGLang's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .server import load

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Trainer", "load"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from .trainer import Trainer

        return Trainer
    raise AttributeError(name)
