"""What docs/limits.md says of a batch that is not closed."""

from __future__ import annotations

import gc
import weakref

import pytest
import tessera
import torch
from loopback import Loopback, move


def test_an_unclosed_batch_stays_with_its_tensors_and_its_name(loopback: Loopback) -> None:
    tensor = torch.ones(3)
    kept = weakref.ref(tensor)
    sender = loopback.trainer.register({"w": tensor}, "unclosed")
    receiver = loopback.inference.register({"w": torch.zeros(3)}, "unclosed")
    move(sender, receiver)
    del sender, tensor
    gc.collect()
    assert kept() is not None
    with pytest.raises(tessera.AlreadyExistsError, match=r"batch unclosed of pair .* close\(\) it first"):
        loopback.trainer.register({"w": torch.ones(3)}, "unclosed")
    loopback.trainer._batches["unclosed"].close()
    gc.collect()
    assert kept() is None
    receiver.close()
    loopback.trainer.register({"w": torch.ones(3)}, "unclosed").close()
