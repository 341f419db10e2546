"""Megatron-Core reshards a model by Tessera: each piece is read out of the memory of the rank that has it.

Of Megatron-Core's own services, the one for CPUs needs CUDA, and sends each piece through sockets. This one serves all
that lies in host memory without a copy in between; tensors of other devices go by way of the host::

    from megatron.core.resharding import swap_model_weights
    from tessera.engines.megatron import CopyService

    with CopyService() as service:
        swap_model_weights(training_model, inference_model, service)

CopyService needs Megatron-Core; Copies, which does the work, needs torch only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._copies import Copies

if TYPE_CHECKING:
    from .service import CopyService

__all__ = ["Copies", "CopyService"]


def __getattr__(name: str) -> Any:
    if name == "CopyService":
        from .service import CopyService

        return CopyService
    raise AttributeError(name)
