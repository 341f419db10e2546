"""An embedding that is constructed sharded."""

from __future__ import annotations

from typing import Unpack

import torch

from ..._errors import InvalidArgumentError
from .._autograd.modules import apply_embedding
from .._weights.parameter import ShardedParameter
from ._base import Declared, Init, Layer, Options
from ._tensor_parallel import TensorParallel


class Embedding(Layer):
    """Rows of W [num_embeddings, embedding_dim] by index, whose rows are cut over the ranks of etp_group.

    Other arguments are those of etp.Linear. Its weight may be given to a Linear of that shape: `head.weight =
    embedding.weight` ties them.

    Args:
        num_embeddings, embedding_dim: F and K.
        padding_idx: A row of zeros at first, which gets no gradient; negative: from the end.
        init_method: Fills the whole weight. None: normal, of mean 0 and standard deviation 1.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        init_method: Init | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(TensorParallel(), **options)
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise InvalidArgumentError(f"Embedding: padding_idx={padding_idx} of {num_embeddings} rows")
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        fill = init_method or torch.nn.init.normal_

        def init(full: torch.Tensor) -> None:
            fill(full)
            if padding_idx is not None:
                full[padding_idx] = 0

        self._declare("weight", Declared((num_embeddings, embedding_dim), init))
        self._make()

    def forward(self, indices: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """[..., embedding_dim] of indices [...]; is_first_microbatch as Linear's."""
        self._begin(is_first_microbatch)
        parameter = self._parameters["weight"]
        if isinstance(parameter, ShardedParameter):
            return apply_embedding(indices, parameter, self.padding_idx, False)
        assert parameter is not None
        return torch.nn.functional.embedding(indices, parameter, self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
