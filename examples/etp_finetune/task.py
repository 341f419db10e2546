"""What is trained: the model, the text and the loss of examples/weight_sync."""

import pathlib
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "weight_sync"))
from loss import contrastive_loss
from model import pretrained
from text import pairs

__all__ = ["MICRO_BATCHES", "contrastive_loss", "micro_batch", "pretrained"]

MICRO_BATCHES = 2  # a step
PAIRS = 4  # of adjacent sentences, in a micro-batch


def micro_batch(number: int) -> list[tuple[str, str]]:
    """Of all that the processes of a run train on, in one order for any number of them."""
    text = pairs()
    epoch, place = divmod(number * PAIRS, len(text) - PAIRS + 1)
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(epoch)).tolist()
    return [text[index] for index in order[place : place + PAIRS]]
