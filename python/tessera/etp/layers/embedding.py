"""An embedding that is constructed sharded."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from ..._arguments import choice, whole
from ..._errors import InvalidArgumentError
from ..compile import left_out
from ..modules import apply_embedding
from ..parameter import LogicalParameter
from ._base import Declared, Init, Layer, Options, initialiser
from ._tensor_parallel import TensorParallel


class Embedding(Layer):
    """Rows of W [num_embeddings, embedding_dim] by index, whose rows are cut over the ranks of etp_group.

    Other arguments are those of etp.Linear. Its weight may be given to a Linear of that shape: `head.weight =
    embedding.weight` ties them. With parallel_mode="vocab" that is one of parallel_mode="column" over the same
    tp_group, whose outputs are the logits of this rank's part of the vocabulary.

    Args:
        num_embeddings, embedding_dim: F and K, before tensor parallelism.
        padding_idx: A row of zeros at first, which gets no gradient; negative: from the end.
        init_method: Fills the whole weight. None: normal, of mean 0 and standard deviation 1.
        parallel_mode: With a tp_group: "vocab" cuts num_embeddings over its ranks, `vocab_range` being this rank's; the
            first ranks have a row more where that does not divide. Indices are the same on all of them: a rank has
            zeros for those that are not its own, and the sum is the output.
        sequence_parallel: Dim 0 of the output is cut over the tp_group; indices are those of the whole sequence.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        init_method: Init | None = None,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        **options: Unpack[Options],
    ) -> None:
        mode = None if parallel_mode is None else choice("parallel_mode", parallel_mode, ("vocab",))
        super().__init__(TensorParallel(tp_group, sequence_parallel, mode is not None), **options)
        if padding_idx is not None:
            if not -whole("num_embeddings", num_embeddings, 1) <= whole("padding_idx", padding_idx) < num_embeddings:
                raise InvalidArgumentError(f"Embedding: padding_idx={padding_idx} of {num_embeddings} rows")
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self.parallel_mode = mode
        fill = initialiser(init_method, torch.nn.init.normal_)

        def init(full: torch.Tensor) -> None:
            fill(full)
            if padding_idx is not None:
                full[padding_idx] = 0

        self._declare("weight", Declared((num_embeddings, embedding_dim), init, 0 if mode else None))
        self.vocab_range = self._tp.range_of(num_embeddings)
        self._make()

    @left_out
    def forward(self, indices: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """[..., embedding_dim] of indices [...]; is_first_microbatch as Linear's."""
        self._begin(is_first_microbatch)
        if self._tp.size == 1:
            return self._rows_of(indices, self.padding_idx)
        if indices.numel() > 0 and not 0 <= int(indices.min()) <= int(indices.max()) < self.num_embeddings:
            raise InvalidArgumentError(
                f"{self.name}: indices from {int(indices.min())} to {int(indices.max())} of {self.num_embeddings} rows"
            )
        begin, end = self.vocab_range
        padding = self.padding_idx
        own = (indices >= begin) & (indices < end)
        out = self._rows_of(
            torch.where(own, indices - begin, 0),
            padding - begin if padding is not None and begin <= padding < end else None,
        )
        return self._tp.from_row(out.masked_fill(~own.unsqueeze(-1), 0))

    def _rows_of(self, indices: torch.Tensor, padding: int | None) -> torch.Tensor:
        """Of this rank's part of the vocabulary."""
        parameter = self._parameters["weight"]
        if isinstance(parameter, LogicalParameter):
            return apply_embedding(indices, parameter, padding, False)
        assert parameter is not None
        return torch.nn.functional.embedding(indices, parameter, padding)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
