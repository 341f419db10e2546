"""TRL's asynchronous GRPO sends its weights to vLLM by the tensor bus.

The server as for tessera.engines.vllm; in the script, on every rank::

    from tessera.engines.trl import WeightTransfer

    trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer("http://localhost:8000"))
"""

from __future__ import annotations

from ._transfer import WeightTransfer

__all__ = ["WeightTransfer"]
