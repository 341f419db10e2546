"""What the processes of a launch are forked off: one that has imported everything, and has no other threads."""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read as NumPy is imported

import torch._dynamo  # which the first DTensor would import
import torch.distributed.tensor

from . import worker

__all__ = ["torch", "worker"]
