"""Layers that are constructed sharded, with the arguments of TransformerEngine's."""

from .cross_entropy import vocab_parallel_cross_entropy
from .embedding import Embedding
from .grouped import GroupedLinear
from .linear import Linear
from .norm_linear import LayerNormLinear, LayerNormMLP

__all__ = ["Embedding", "GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear", "vocab_parallel_cross_entropy"]
