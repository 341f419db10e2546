"""SGLang servers of two tensor-parallel ranks, played by real processes: what SGLang 0.5.23 does around a custom weight
loader, and its HTTP interface with its answers, as its sources have them. The package is not needed."""

from __future__ import annotations

import base64
import concurrent.futures
import http.server
import json
import logging
import os
import pathlib
import pickle
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import tessera
import torch
import torch.distributed
from jobs import Jobs, Process, Rank
from loaders import LOADERS
from tessera.engines import RankStatus, Verdict, sglang
from tessera.engines.sglang._verdicts import Reader, Teller
from tessera.engines.sglang.server import Server, Settings
from test_learned_maps import tensors, values
from torch_ranks import join_group

MODEL = "fused"
TP = 2
CHECKPOINT = LOADERS[MODEL](0, TP).checkpoint


class Scheduler:
    """A rank of the server: SchedulerWeightUpdaterManager, as far as an update goes."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.model = LOADERS[MODEL](rank.rank, rank.world).model
        group = torch.distributed.new_group(list(range(rank.world)))
        self.server = Server(types.SimpleNamespace(rank_in_group=rank.rank, world_size=rank.world, cpu_group=group))
        self.session = False

    def begin_weight_update(self, body: dict[str, Any]) -> tuple[bool, str]:
        assert body == {"selector": "target"}
        if self.session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.session = True
        torch.distributed.barrier()
        return True, "Success"

    def update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[bool, str]:
        if not self.session:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        assert body["load_format"] == "tessera.engines.sglang.load" and body["selector"] == "target"
        payload = base64.b64decode(body["serialized_named_tensors"][self.rank.rank], validate=True)
        assert pickle.loads(payload) == []
        self.server.load(self.model)
        torch.distributed.barrier()
        return True, "Success"

    def end_weight_update(self, body: dict[str, Any]) -> tuple[bool, str]:
        assert body == {}
        if not self.session:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self.session = False
        torch.distributed.barrier()
        return True, "Success"

    def fail_at(self, point: str) -> None:
        """Its commits raise, until it is told ""."""
        live = self.server._live
        assert live is not None
        live.__dict__.pop("_swap", None)
        if point:
            live._swap = fails  # type: ignore[method-assign]

    def keep_silent(self, silent: bool) -> None:
        """Its first rank tells nothing of what it does."""
        teller = self.server._teller
        if teller is not None:
            teller.__dict__.pop("tell", None)
            if silent:
                teller.tell = fails  # type: ignore[method-assign]

    def state(self) -> int | None:
        """Which version it serves; None: several at once."""
        for version in range(10):
            expected = LOADERS[MODEL](self.rank.rank, self.rank.world).model
            if version:
                expected.load_weights(iter(values(CHECKPOINT, 1000 * version).items()))
            found = tensors(self.model)
            if all(torch.equal(found[name], each) for name, each in tensors(expected).items()):
                return version
        return None


def fails(*_: object) -> None:
    raise ValueError("no place")


def serve(rank: Rank, settings: dict[str, Any]) -> None:
    join_group(rank)
    os.environ["TESSERA_SGLANG"] = json.dumps(settings)
    scheduler = Scheduler(rank)
    rank.tell("ready")
    while (asked := rank.hear()) is not None:
        name, argument = asked
        rank.tell(getattr(scheduler, name)(*argument))
    scheduler.server.close()
    torch.distributed.destroy_process_group()


class Engine:
    """A server: its ranks, and the HTTP interface before them. `calls`: what it was asked."""

    def __init__(self, jobs: Jobs, name: str, **settings: Any) -> None:
        self.name = name
        self.calls: list[tuple[str, Any]] = []
        self.refusing: dict[str, tuple[int, str]] = {}
        self.jobs, self.settings = jobs, {"engine": name, "timeout": 60, **settings}
        self.generation = 0
        self.asking = threading.Lock()
        self.ranks: list[Process] = []
        self.start()
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.calls.append((self.path[1:], None))
                self.answer(200, {"tp_size": TP} if self.path == "/server_info" else {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null")
                self.answer(*engine.answer(self.path[1:], body))

            def answer(self, status: int, found: dict[str, Any]) -> None:
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    def start(self) -> None:
        self.generation += 1
        shared = {"TESSERA_RUNTIME_DIR": os.environ["TESSERA_RUNTIME_DIR"]}  # with the trainer, in this process
        job = f"{self.name}.{self.generation}"
        self.ranks = self.jobs.start(job, serve, self.settings, world=TP, environment=shared)
        for rank in self.ranks:
            assert rank.hear() == "ready"

    def answer(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        self.calls.append((path, body))
        if path in self.refusing:
            status, message = self.refusing.pop(path)
            return status, {"success": False, "message": message}
        if path in ("begin_weight_update", "update_weights_from_tensor", "end_weight_update"):
            success, message = self.ask(path, body)[0]
            return (200 if success else 400), {"success": success, "message": message}
        if path == "update_weight_version":
            said = f"Weight version updated to {body['new_version']}"
            return 200, {"success": True, "message": said, "new_version": body["new_version"]}
        assert path in ("pause_generation", "continue_generation")
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def ask(self, name: str, *argument: Any) -> list[Any]:
        with self.asking:
            for rank in self.ranks:
                rank.tell((name, argument))
            return [rank.hear() for rank in self.ranks]

    @property
    def serves(self) -> list[int | None]:
        return self.ask("state")

    def paths(self) -> list[str]:
        found, self.calls = [path for path, _ in self.calls], []
        return found

    def stop(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()
        with self.asking:  # what the server does for a caller that has left
            for rank in self.ranks:
                rank.tell(None)
        for rank in self.ranks:
            rank.result()


SESSION = ["pause_generation", "begin_weight_update", "update_weights_from_tensor", "end_weight_update"]
JOIN = ["server_info", *SESSION, "continue_generation"]
UPDATE = [*SESSION, "continue_generation", "update_weight_version"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder, Jobs(pathlib.Path(folder), forked=True) as jobs:
        found = Engine(jobs, "engine0")
        yield found
        found.stop()


class Weights:
    """What a trainer of one rank has."""

    def __init__(self) -> None:
        self.memory = values(CHECKPOINT)

    def become(self, version: int) -> None:
        for name, tensor in values(CHECKPOINT, 1000 * version).items():
            self.memory[name].copy_(tensor)


def test_updates_faults_and_a_server_that_is_started_again(engine: Engine) -> None:
    weights = Weights()
    with sglang.Trainer(weights.memory, {"engine0": engine.url}, rank=0, world=1, timeout=60) as trainer:

        def sent(version: int) -> Any:
            weights.become(version)
            return trainer.send()["engine0"]

        found = sent(1)
        assert (found.ok, found.version, found.error) == (True, 1, ""), found
        assert engine.serves == [1, 1] and engine.paths() == JOIN + UPDATE
        assert sent(2).ok and engine.serves == [2, 2] and engine.paths() == UPDATE

        engine.ranks[1].tell(("fail_at", ("place",)))
        engine.ranks[1].hear()
        found = sent(3)
        assert not found.ok and found.version == 2 and "rank 1: ValueError: no place" in found.error
        assert engine.serves == [2, 2] and "update_weight_version" not in engine.paths()
        engine.ask("fail_at", "")
        assert sent(4).ok and engine.serves == [4, 4]
        engine.paths()

        engine.ask("begin_weight_update", {"selector": "target"})  # by a trainer that died
        found = sent(5)
        assert found.ok and engine.serves == [5, 5]
        assert engine.paths()[1:4] == ["begin_weight_update", "end_weight_update", "begin_weight_update"]

        engine.refusing["begin_weight_update"] = 400, "busy"
        found = sent(6)
        assert not found.ok and "begin_weight_update answered 400" in found.error and "busy" in found.error
        assert engine.serves == [5, 5] and engine.paths()[-1] == "continue_generation"
        assert sent(7).ok and engine.serves == [7, 7]
        engine.paths()

        for rank in engine.ranks:
            rank.kill()
        engine.start()
        assert engine.serves == [0, 0]
        found = sent(8)
        assert found.ok and engine.serves == [8, 8], found


def test_a_server_that_does_not_tell_what_it_holds_stays_paused_until_it_does(engine: Engine) -> None:
    weights = Weights()
    with sglang.Trainer(weights.memory, {"engine0": engine.url}, rank=0, world=1, timeout=60) as trainer:

        def sent(version: int, patience: float = 60) -> Any:
            weights.become(version)
            trainer._readers["engine0"]._timeout = patience  # for what never comes
            return trainer.send()["engine0"]

        engine.refusing["update_weights_from_tensor"] = 400, "not this model"  # and it never met the trainer
        found = sent(1, 1)
        assert not found.ok and "answered 400" in found.error and "paused" not in found.error
        assert engine.serves == [0, 0] and engine.paths()[-1] == "continue_generation"
        assert sent(2).ok and engine.serves == [2, 2]

        engine.refusing["update_weights_from_tensor"] = 400, "not now"
        found = sent(3)
        assert not found.ok and "not now" in found.error and "paused" not in found.error
        assert engine.serves == [2, 2] and engine.paths()[-1] == "continue_generation"

        engine.refusing["pause_generation"] = 502, "no answer"  # it may be paused
        found = sent(3)
        assert not found.ok and "pause_generation answered 502" in found.error
        assert engine.paths() == ["pause_generation", "continue_generation"]

        for failing in (lambda: engine.ask("keep_silent", True), lambda: engine.refusing.update(LOST)):
            failing()
            found = sent(4, 1)
            assert not found.ok and "not known, and the server is left paused" in found.error
            assert engine.paths() == SESSION
            engine.ask("keep_silent", False)
            engine.refusing["begin_weight_update"] = 400, "busy"
            found = sent(5)
            assert not found.ok and "busy" in found.error and "continue_generation" not in engine.paths()
            assert sent(6).ok and engine.serves == [6, 6] and engine.paths() == UPDATE


LOST = {"update_weights_from_tensor": (502, "no answer")}


def test_a_checkpoint_that_the_model_does_not_take_is_refused(engine: Engine) -> None:
    with sglang.Trainer({"other": torch.ones(3)}, {"engine0": engine.url}, rank=0, world=1, timeout=60) as trainer:
        found = trainer.send()["engine0"]
    assert not found.ok and "takes nothing of what the trainer sends (other" in found.error
    assert engine.serves == [0, 0]


def test_a_verdict_reaches_a_trainer_that_has_waited_for_it_at_any_moment() -> None:
    for number in range(24):
        reader = Reader("weights", "trainer", "engine0", None, 60)
        with reader, concurrent.futures.ThreadPoolExecutor(1) as beside:
            reading = beside.submit(reader.read, 0, threading.Event())
            with Teller("weights", "trainer", "engine0", None, 60) as teller:
                time.sleep(0.08 + 0.002 * number)  # about when a first look of 0.1 s ends
                teller.tell([RankStatus(number)])
                (told,) = reading.result()
        assert told == RankStatus(number)


def test_what_many_ranks_say_at_length_is_told() -> None:
    long = RankStatus(1, failure="ü" * 5000, verdict=Verdict(False, 1, None, 0, '"' * 5000))
    reader = Reader("weights", "trainer", "engine0", None, 60)
    with reader, concurrent.futures.ThreadPoolExecutor(1) as beside:
        reading = beside.submit(reader.read, 0, threading.Event())
        with Teller("weights", "trainer", "engine0", None, 60) as teller:
            teller.tell([long] * 64)
            told = reading.result()
    assert len(told) == 64 and all(each.failure.startswith("üü") and each.error.startswith('""') for each in told)


def test_a_server_that_is_not_there_is_named() -> None:
    with sglang.Trainer({"w": torch.ones(3)}, {"gone": "http://127.0.0.1:9"}, rank=0, world=1, timeout=5) as trainer:
        found = trainer.send()["gone"]
    assert not found.ok and found.version is None and "http://127.0.0.1:9" in found.error
    with pytest.raises(tessera.InvalidArgumentError, match="give {name: URL of an SGLang server}"):
        sglang.Trainer({"w": torch.ones(3)}, {})


@pytest.mark.parametrize("given", ["", "[]", "{}", '{"engine": "a", "unknown": 1}'])
def test_settings_that_are_none_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_SGLANG", given)
    with pytest.raises(tessera.InvalidArgumentError, match="TESSERA_SGLANG="):
        Settings.from_environment()
    monkeypatch.setenv("TESSERA_SGLANG", '{"engine": "a", "timeout": 3}')
    assert Settings.from_environment() == Settings("a", timeout=3)


def test_a_loader_without_settings_or_sglang_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TESSERA_SGLANG", raising=False)
    with caplog.at_level(logging.WARNING, "tessera.engines.sglang.server"):
        sglang.load(LOADERS[MODEL](0, 1).model, [])
        alone = Server(types.SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None))
        alone.load(LOADERS[MODEL](0, 1).model)
    assert "an update was given up" in caplog.text and "TESSERA_SGLANG=" in caplog.text


def test_a_run_may_begin_with_version_zero_and_a_version_that_is_refused_does_not_count(engine: Engine) -> None:
    weights = Weights()
    with sglang.Trainer(weights.memory, {"engine0": engine.url}, rank=0, world=1, timeout=60) as trainer:
        for number, version in ((1, 0), (2, None), (3, 7)):
            weights.become(number)
            update = trainer.send(version)["engine0"]
            shown = number - 1 if version is None else version
            assert (update.ok, update.version, update.error) == (True, shown, "")
            assert engine.serves == [number, number]
            assert ("update_weight_version", {"new_version": str(shown), "abort_all_requests": False}) in engine.calls
        for version in (7, 3, -1):
            with pytest.raises(tessera.InvalidArgumentError, match="version"):
                trainer.send(version)
        assert trainer.send()["engine0"].version == 8


def test_ranks_of_a_trainer_hear_of_each_other(engine: Engine) -> None:
    weights = [Weights() for _ in range(2)]
    busy = threading.Event()
    answer = engine.answer

    def slow(path: str, body: Any) -> tuple[int, dict[str, Any]]:
        assert path != "begin_weight_update" or busy.wait(60)
        return answer(path, body)

    def make(rank: int) -> Any:
        tensors: dict[str, Any] = dict(weights[rank].memory)
        return sglang.Trainer(tensors, {"engine0": engine.url}, rank=rank, world=2, timeout=60), tensors

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        trainers = list(pool.map(make, range(2)))
        busy.set()
        for number in (1, 2):
            for tensors in weights:
                tensors.become(number)
            sending = [pool.submit(trainer.send) for trainer, _ in trainers]
            assert sending[0].result()["engine0"].ok and sending[1].result() == {}
        assert engine.serves == [2, 2]
        tensors = trainers[0][1]
        name = min(tensors)
        kept, tensors[name] = tensors[name], torch.zeros(3)
        sending = [pool.submit(trainer.send) for trainer, _ in trainers]
        errors = [sending[0].exception(), sending[1].exception()]
        tensors[name] = kept
        sending = [pool.submit(trainer.send) for trainer, _ in trainers]
        assert sending[0].result()["engine0"].version == 4
        errors.append(sending[1].exception())
        assert [str(error) for error in errors if error is not None] == [str(errors[0])] * 2

        busy.clear()
        engine.answer = slow  # type: ignore[method-assign]
        sending = [pool.submit(trainer.send) for trainer, _ in trainers]
        assert sending[1].result() == {}
        leaving = pool.submit(trainers[1][0].close)
        with pytest.raises(TimeoutError):
            leaving.result(0.5)
        busy.set()
        assert sending[0].result()["engine0"].ok and leaving.result() is None
        trainers[0][0].close()


@pytest.mark.parametrize("path", SESSION)
def test_a_send_ends_at_its_deadline_and_the_next_one_takes_in_a_server_that_is_back(engine: Engine, path: str) -> None:
    timeout = 4.0
    weights = Weights()
    moving, answer = threading.Event(), engine.answer

    def slow(asked: str, body: Any) -> tuple[int, dict[str, Any]]:
        assert asked != path or moving.wait(60)
        return answer(asked, body)

    engine.answer = slow  # type: ignore[method-assign]
    moving.set()
    with sglang.Trainer(weights.memory, {"engine0": engine.url}, rank=0, world=1, timeout=timeout) as trainer:

        def sent(number: int) -> Any:
            weights.become(number)
            return trainer.send()["engine0"]

        trainer._sends._timeout = 60  # the first takes longer on a busy machine
        assert sent(1).ok
        trainer._sends._timeout = timeout
        moving.clear()
        for number in (2, 3):
            began = time.monotonic()
            assert not sent(number).ok
            assert time.monotonic() - began < timeout + 2  # of which one is for a machine that is busy
        moving.set()
        trainer._sends._timeout = 60
        update = sent(4)
        assert update.ok and engine.serves == [4, 4], update
        assert "continue_generation" in engine.paths()[-2:]


def test_a_server_that_waits_under_another_name_is_told() -> None:
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder, Jobs(pathlib.Path(folder), forked=True) as jobs:
        engine = Engine(jobs, "engine7", timeout=12)
        with sglang.Trainer(Weights().memory, {"engine0": engine.url}, rank=0, world=1, timeout=6) as trainer:
            update = trainer.send()["engine0"]
        assert not update.ok and "engine7 waits for this trainer, which has no server of that name" in update.error
        assert "or give it the name 'engine0' in TESSERA_SGLANG" in update.error
        engine.stop()
