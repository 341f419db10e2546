"""The example of Trainer, as users run it."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

RUN = pathlib.Path(__file__).resolve().parents[4] / "examples/etp_trainer/run.py"


def test_two_and_three_processes_have_the_losses_of_one(tmp_path):
    output = tmp_path / "summary.json"
    command = [sys.executable, str(RUN), "--json", str(output)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout
    summary = json.loads(output.read_text())
    assert summary["problems"] == []
    assert max(summary["differences"]) <= 1e-6
