"""TRL's protocol over a real bus; a vLLM server is played, with the answers of our worker. TRL is not needed."""

from __future__ import annotations

import http.server
import inspect
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tessera
import torch
from tessera.engines import EngineUpdate, RankStatus, Verdict
from tessera.engines._updates import fields_of
from tessera.engines.trl import WeightTransfer

NAMES = {"a": (3, 4), "b": (5,)}


class Server:
    """A vLLM of one rank with our routes."""

    def __init__(self) -> None:
        self.weights = {name: torch.zeros(shape) for name, shape in NAMES.items()}
        self.staged = {name: torch.zeros(shape) for name, shape in NAMES.items()}
        self.calls: list[str] = []
        self.failing = False
        self.version = 0
        self.run = ""
        self.bus: Any = None
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                data = json.dumps(server.answer(self.path[1:].partition("?")[0], body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        step = path.rpartition("/")[2]
        self.calls.append(step)
        failed = ""
        if step == "join":
            info = body["init"]
            self.run = info["run"]
            self.bus = tessera.connect(
                info["pair"], role=info["engine"], peer=info["trainer"], rank=0, world=1, timeout=60
            )
            self.batch = self.bus.register(self.staged, info["batch"], direction="recv")
        elif step == "update":
            self.batch.recv(body["min_version"], timeout=60)
            failed = "no place" if self.failing else ""
            if not failed:
                self.version = self.batch.version
                for name, tensor in self.staged.items():
                    self.weights[name].copy_(tensor)
        verdict = Verdict(not failed, self.version, None, 0, failed)
        return fields_of(EngineUpdate.of([RankStatus(self.version, self.run, trainer=self.run, verdict=verdict)]))

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()
        if self.bus is not None:
            self.bus.close()


@pytest.fixture
def server() -> Iterator[Server]:
    played = Server()
    yield played
    played.close()


def weights(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in NAMES.items()}


def is_version(server: Server, version: int) -> bool:
    return all(torch.equal(server.weights[name], tensor) for name, tensor in weights(version).items())


def test_each_sync_arrives_and_failures_are_tolerated_as_often_as_asked(server: Server) -> None:
    transfer = WeightTransfer(server.url, tolerated=1, timeout=60)
    transfer.init_weight_transfer()
    for version in (1, 2):
        transfer.pause()
        transfer.send_weights(iter(weights(version).items()))
        transfer.resume()
        assert is_version(server, version) and transfer.last is not None and transfer.last.version == version
    assert server.calls == ["join", "update", "update"]
    server.failing = True
    transfer.send_weights(iter(weights(3).items()))
    assert is_version(server, 2) and not transfer.last.ok
    with pytest.raises(tessera.UnavailableError, match="serves version 2: rank 0: no place"):
        transfer.send_weights(iter(weights(4).items()))
    server.failing = False
    transfer.send_weights(iter(weights(5).items()))
    assert is_version(server, 5)
    transfer.destroy()
    transfer.destroy()


def test_other_weights_than_at_first_are_refused_after_all_were_taken(server: Server) -> None:
    with WeightTransfer(server.url, timeout=60) as transfer:
        transfer.send_weights(iter(weights(1).items()))
        for other, said in [
            ({"a": torch.ones(3, 4)}, "without b"),
            ({"c": torch.ones(1), **weights(2)}, r"c \(1,\)"),
            ({**weights(2), "b": torch.ones(6)}, r"b \(6,\)"),
        ]:
            pairs = iter(other.items())
            with pytest.raises(tessera.MismatchError, match=said):
                transfer.send_weights(pairs)
            assert next(pairs, None) is None
        transfer.send_weights(iter(weights(3).items()))
        assert is_version(server, 3)


RECORDED = {  # of TRL 1.16's WeightTransferProtocol
    "init_weight_transfer": [],
    "pause": [],
    "send_weights": ["iterator"],
    "resume": [],
    "destroy": [],
}


def test_the_protocol_as_it_was_recorded() -> None:
    for name, parameters in RECORDED.items():
        assert list(inspect.signature(getattr(WeightTransfer, name)).parameters) == ["self", *parameters]


def test_the_protocol_of_the_package() -> None:
    package = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", reason="trl is not installed")
    protocol = package.WeightTransferProtocol
    found = {name: each for name, each in vars(protocol).items() if inspect.isfunction(each) and name[0] != "_"}
    assert {name: list(inspect.signature(each).parameters)[1:] for name, each in found.items()} == RECORDED
    assert "weight_transfer" in inspect.signature(package.AsyncGRPOTrainer.__init__).parameters
