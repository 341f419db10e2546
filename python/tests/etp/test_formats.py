"""What travels quantised trains the same for every number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from etp_models import Run, adamw, built
from tessera import etp
from torch_ranks import launch

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"formats": {".*": "bf16"}},
    "fp8_e4m3": {"formats": {".*": "fp8_e4m3"}},
    "mxfp8": {"formats": {".*": "mxfp8"}},
    "nvfp4": {"formats": {".*": "nvfp4"}},
    "fp8_block": {"formats": {".*": "fp8_block_128x128"}},
    "nvfp4 but for the embedding, at the first use": {
        "formats": {"emb.*": "bf16", ".*": "nvfp4"},
        "publish": "first_use",
    },
    "mxfp8 computed in bf16": {"formats": {".*": "mxfp8"}, "compute_dtype": torch.bfloat16},
}
MICRO_BATCHES = 4  # of a step, on all ranks


def _train(rank: int, size: int) -> dict[str, dict[str, bytes]]:
    found = {}
    with etp.init_group() as group:
        for name, options in CASES.items():
            model = built()
            run = Run(size, rank, group)
            if size > 1 or options:
                etp.shard_module_(model, group, **options)
            run.train(model, adamw(model.parameters()), steps=3, accumulation=MICRO_BATCHES // size)
            found[name] = run.weights(model)
    return found


@pytest.fixture(scope="module")
def trained() -> dict[int, list[dict[str, dict[str, bytes]]]]:
    return {size: launch(functools.partial(_train, size=size), size) for size in (1, 2, 4)}


@pytest.mark.parametrize("name", CASES)
def test_every_number_of_ranks_gives_the_same_bytes(
    trained: dict[int, list[dict[str, dict[str, bytes]]]], name: str
) -> None:
    expected = trained[1][0][name]
    assert all(each[name] == expected for size in (2, 4) for each in trained[size])


def test_formats_give_other_bytes(trained: dict[int, list[dict[str, dict[str, bytes]]]]) -> None:
    found = [trained[1][0][name]["up.weight"] for name in CASES]
    assert len(set(found)) == len(found)
