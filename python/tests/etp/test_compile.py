"""A compiled model gives the bytes of the one that is not."""

from __future__ import annotations

import pytest
import torch
from etp_models import Tied, adamw, batch, built, loss_of
from tessera import etp


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_bytes_are_those_of_plain_torch(backend: str) -> None:
    torch.set_num_threads(1)
    plain = built(Tied)
    model = etp.shard_module_(built(Tied), etp.init_group(), formats={".*weight": "f32"})
    compiled = torch.compile(model, backend=backend)
    for each, called in ((plain, plain), (model, compiled)):
        optimizer = adamw(each.parameters())
        for number in range(2):
            loss_of(called, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(etp.logical(ours), theirs)
    with torch.no_grad():
        assert torch.equal(compiled(batch(3)[0]), plain(batch(3)[0]))
