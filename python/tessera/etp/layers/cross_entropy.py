"""A loss of logits whose vocabulary is cut over a tp_group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from ..._errors import InvalidArgumentError
from ._tensor_parallel import TensorParallel


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocab_range: tuple[int, int],
    tp_group: Any,
    *,
    ignore_index: int = -100,
) -> torch.Tensor:
    """The loss of each token, [...], in float32, as F.cross_entropy(reduction="none") has it; 0 of those that are
    ignored. Two exchanges of a few numbers a token stand for a gather of the logits. Collective over the tp_group.

    Args:
        logits: [..., words] of this rank's words: the output of Linear(parallel_mode="column").
        targets: [...], the same on all ranks of the tp_group.
        vocab_range: Which words those are: `vocab_range` of the Embedding.
        ignore_index: Targets that have no loss.
    """
    begin, end = vocab_range
    if logits.shape != (*targets.shape, end - begin):
        raise InvalidArgumentError(
            f"vocab_parallel_cross_entropy: logits are {tuple(logits.shape)}: {(*targets.shape, end - begin)} are "
            f"needed for targets {tuple(targets.shape)} and the words {begin} to {end}"
        )
    parallel = TensorParallel(tp_group)
    logits = logits.float()
    largest = logits.detach().amax(-1)
    if parallel.size > 1:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=tp_group)
    logits = logits - largest.unsqueeze(-1)
    own = (targets >= begin) & (targets < end)
    found = logits.gather(-1, torch.where(own, targets - begin, 0).unsqueeze(-1)).squeeze(-1).masked_fill(~own, 0)
    found, total, owners = parallel.from_row(torch.stack([found, logits.exp().sum(-1), own.float()])).unbind()
    ignored = targets == ignore_index
    unknown = (owners == 0) & ~ignored
    if bool(unknown.any()):
        raise InvalidArgumentError(
            f"vocab_parallel_cross_entropy: target {int(targets[unknown][0])} is no word of any rank, and not "
            f"ignore_index={ignore_index}"
        )
    return (total.log() - found).masked_fill(ignored, 0)
