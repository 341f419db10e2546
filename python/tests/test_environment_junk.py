"""Junk in an environment variable is an InvalidArgumentError that names variable and value. (More values are tried with
the command: tests/cli/environment_test.py.)"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tessera
from tessera import etp
from tessera.engines.vllm import _settings

PROGRAM = """
import tessera
try:
    tessera.connect("junk", role="a", peer="b", timeout=0.2)
except tessera.Error as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TESSERA_LOG", "loud"),
        ("TESSERA_LOG_FORMAT", "xml"),
        ("TESSERA_METRICS", "-1"),
        ("TESSERA_TRACE", "~nobody/trace"),
        ("TESSERA_STORE", "tcp://127.0.0.1:x"),
        ("TESSERA_TOKEN_FILE", "~nobody/token"),
        ("TESSERA_AGENT", "yes"),
        ("TESSERA_NAMESPACE", "~/x"),
        ("TESSERA_RANK", "-1"),
        ("TESSERA_WORLD_SIZE", "x"),
        ("TORCHELASTIC_RESTART_COUNT", "x"),
        ("TESSERA_RUNTIME_DIR", "~nobody/run"),
        ("TESSERA_FORCE_KERNEL", "x"),
        ("TESSERA_FORCE_PULL", "-1"),
        ("TESSERA_FORCE_TRANSPORT", "x"),
        ("TESSERA_ALLOW_PTRACE", "1"),
        ("TESSERA_ETP_CHECK", "yes"),
        ("TESSERA_ETP_LOG", "~nobody/log"),
    ],
)
def test_connect_refuses_junk(variable: str, value: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.startswith("InvalidArgumentError "), found
    assert variable in found.stdout
    assert value in found.stdout


@pytest.mark.parametrize("value", ["yes", "-1", "2", "~/x"])
@pytest.mark.parametrize("variable", ["TESSERA_VLLM_COPY", "TESSERA_VLLM_CPU_IN_PLACE"])
def test_flags_of_engines(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    read = _settings.copies_always if variable == "TESSERA_VLLM_COPY" else _settings.keeps_linears
    monkeypatch.setenv(variable, value)
    with pytest.raises(tessera.InvalidArgumentError, match=f"{variable} is '{value}'"):
        read()
    monkeypatch.setenv(variable, "")
    assert not read()
    monkeypatch.setenv(variable, "1")
    assert read()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RANK", "x"),
        ("RANK", "-1"),
        ("RANK", "²"),
        ("RANK", "9" * 19),
        ("RANK", "9" * 5000),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "1.5"),
        ("TESSERA_NAMESPACE", "a/b"),
        ("TESSERA_NAMESPACE", "~/x"),
    ],
)
def test_groups_over_a_store(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    for name, good in (("RANK", "0"), ("WORLD_SIZE", "1"), (variable, value)):
        monkeypatch.setenv(name, good)
    with pytest.raises(tessera.InvalidArgumentError, match=variable) as error:
        etp.init_group(store="auto", timeout=1)
    assert value[:19] in str(error.value)
