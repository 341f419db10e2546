"""What the fork server imports: see there."""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read as NumPy is imported; the server must have no other threads

import jobs
import tessera
import torch._dynamo  # which the first DTensor would import
import torch.distributed.fsdp
import torch.distributed.tensor

__all__ = ["jobs", "tessera", "torch"]
