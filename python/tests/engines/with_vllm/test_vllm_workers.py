"""Versions in a worker's engine around a real vLLM's model; see scripts/engines.sh."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

import vllm_workers


def compared(name, starts, in_place, folder):
    """By a process of its own: how linears lie is decided once."""
    environment = {**os.environ, "TESSERA_VLLM_CPU_IN_PLACE": str(int(in_place)), "TESSERA_RUNTIME_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, vllm_workers.__file__, name, starts],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("starts", ["checkpoint", "trainer"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v2", "mamba2"])
def test_each_version_is_what_vllm_loads(name, in_place, starts, tmp_path):
    found = compared(name, starts, in_place, tmp_path)
    assert [each["version"] for each in found] == [1, 2, 3]
    assert [each["differing"] for each in found] == [[], [], []] and found[0]["compared"] > 20
    updates = [each for each in found if "rebuilt" in each]
    assert len(updates) == 3 - (starts == "trainer")
    assert all(each["in_place"] for each in updates)
    if name == "llama":
        assert all(bool(each["rebuilt"]) != in_place for each in updates)
