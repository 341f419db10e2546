"""Checkpoints of models and optimisers: logical tensors in safetensors files, written by all ranks at once.

    from tessera import checkpoint

    checkpoint.save(model, optimizer, "step-1000", metadata={"step": "1000"})
    checkpoint.load(model, optimizer, "step-1000").metadata["step"]

Models are sharded by tessera.etp or by torch (FSDP2, tensor parallelism), or not at all; what one has saved, any other
loads, on any number of ranks. Both calls are collective. This package imports torch.
"""

from ._load import Loaded, load
from ._save import save

__all__ = ["Loaded", "load", "save"]
