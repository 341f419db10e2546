"""What fine-tuning makes smaller: adjacent sentences of a text should get similar vectors, different from the rest."""

import torch
from model import embed, tokenize
from torch.nn.functional import cross_entropy

TEMPERATURE = 0.05


def contrastive_loss(model: torch.nn.Module, batch: list[tuple[str, str]]) -> torch.Tensor:
    """The first sentence of each pair should find the second one among those of all pairs."""
    first, second = zip(*batch, strict=True)
    vectors = embed(model, tokenize([*first, *second]))
    similarities = vectors[: len(batch)] @ vectors[len(batch) :].T
    return cross_entropy(similarities / TEMPERATURE, torch.arange(len(batch)))
