"""Programs that end because of an error on one rank: the others learn it at once, and no rank waits for another at its
end. The group's timeout is longer than the tests'."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_torchrun import LIMIT, script

PROGRAM = """
import os
import sys

import torch
from tessera import etp

HOUR = 3600.0
FAILS = {fails!r}


def train(group):
    model = etp.shard_module_(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), group)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        if step == 2 and group.rank == 0:
            exec(FAILS)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    return model


torch.manual_seed(0)
{body}
"""
BODIES = {
    "with": "with etp.init_group(store='auto', timeout=HOUR) as group:\n    train(group)",
    "without": "group = etp.init_group(store='auto', timeout=HOUR)\nmodel = train(group)\ngroup.close()",
}
ENDS = {
    "raises": "raise RuntimeError('a mistake of the user')",
    "exits": "sys.exit('a mistake of the user')",
    "is interrupted": "raise KeyboardInterrupt('a mistake of the user')",
}


def _ends(folder: Path, program: str) -> list[tuple[int, str]]:
    """Exit status and output of both ranks."""
    path = script(program, folder, "program")
    common = {**os.environ, "TESSERA_NAMESPACE": folder.name, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, path],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, each) for rank, each in zip(ranks, said, strict=True)]


@pytest.mark.parametrize("body", list(BODIES))
@pytest.mark.parametrize("end", list(ENDS))
def test_a_rank_that_fails_ends_the_others(tmp_path: Path, runtime_dir: Path, body: str, end: str) -> None:
    (failed, told), (lost, learnt) = _ends(tmp_path, PROGRAM.format(fails=ENDS[end], body=BODIES[body]))
    assert failed and told.rstrip().endswith("a mistake of the user"), told
    assert lost == 1 and learnt.rstrip().splitlines()[-1].startswith("tessera.PeerLostError"), learnt
    assert "rank 0" in learnt and "and rank 1" in learnt
