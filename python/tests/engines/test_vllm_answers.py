"""What a trainer takes for a worker's answer; no vLLM is needed."""

import pytest
from tessera.engines.vllm._client import is_status

VERDICT = {"ok": True, "rank": 0, "error": "", "version": 1}
STATUS = {
    **dict.fromkeys(("busy", "ready", "torn"), False),
    "version": 1,
    "run": "a",
    "trainer": None,
    "failure": "",
    "verdict": VERDICT,
}


@pytest.mark.parametrize("verdict", [VERDICT, None])
def test_a_status_is_taken(verdict):
    assert is_status({**STATUS, "verdict": verdict})


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "TypeError",
        [],
        {},
        {**STATUS, "version": "1"},
        {name: value for name, value in STATUS.items() if name != "verdict"},
        {**STATUS, "verdict": {}},
        {**STATUS, "verdict": {**VERDICT, "error": None}},
    ],
)
def test_anything_else_is_not(answer):
    assert not is_status(answer)
