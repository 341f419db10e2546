"""What a trainer is told where some ranks of an engine have failed, by each kind of server alike."""

from __future__ import annotations

import pytest
from tessera.engines._updates import ANOTHER_FAILED, mixed, told
from tessera.engines.sglang.trainer import _update_of
from tessera.engines.vllm._client import outcome

CAUSES = ["", ANOTHER_FAILED, "OSError: disk", "ValueError: shape"]
NAMED = "rank 2: OSError: disk; rank 3: ValueError: shape"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([], ""),
        (enumerate(CAUSES[1:], 1), NAMED),
        (enumerate([ANOTHER_FAILED] * 3), f"rank 0: {ANOTHER_FAILED}"),
        (enumerate("abcdef"), "rank 0: a; rank 1: b; rank 2: c; rank 3: d"),
    ],
)
def test_ranks_that_know_why_are_named(errors, expected):
    assert told(errors) == expected


def of_vllm(torn):
    ranks = [
        {
            "failure": "",
            "run": "here",
            "version": 5 if torn and not error else 4,
            "torn": False,
            "verdict": {"ok": not error, "rank": rank, "error": error},
        }
        for rank, error in enumerate(CAUSES)
    ]
    return outcome(ranks)["error"]


def of_sglang(torn):
    ranks = [
        {"joined": False, "ok": not error, "version": 4, "torn": torn, "rank": rank, "error": error}
        for rank, error in enumerate(CAUSES)
    ]
    return _update_of(ranks, 5, 0.0).error


@pytest.mark.parametrize("said", [of_vllm, of_sglang])
def test_each_engine_says_the_same(said):
    assert said(torn=False) == NAMED
    assert said(torn=True) == mixed(NAMED) != mixed("")
