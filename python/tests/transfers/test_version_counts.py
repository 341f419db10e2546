"""What is counted: versions, not the steps in which they come."""

from __future__ import annotations

import pytest
import torch
from loopback import Loopback
from ranks import LIMIT


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("sender_mode", ["inplace", "staged"])
def test_a_version_that_is_staged_counts_once_it_is_committed(
    loopback: Loopback, sender_mode: str, staged: bool
) -> None:
    name = f"counts {sender_mode} {staged}".replace(" ", "-")
    weights, taken = torch.zeros(5), torch.zeros(5)
    sender = loopback.trainer.register({"w": weights}, name, mode=sender_mode)
    receiver = loopback.inference.register({"w": taken}, name, mode="staged")
    with sender, receiver:
        for version in range(1, 4):
            weights.fill_(version)
            sent = sender.send(version=version, blocking=False, timeout=LIMIT)
            if staged:
                receiver.stage(timeout=LIMIT)
                assert receiver.stats.transfers == version - 1
                receiver.commit()
            else:
                receiver.recv(timeout=LIMIT)
            sent.wait()
            assert receiver.stats.transfers == version
            assert sender.stats.transfers == version
            assert taken.tolist() == [version] * 5
