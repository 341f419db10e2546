"""Servers that speak the routes of vLLM and run the worker's real code in processes, and trainers of them."""

from __future__ import annotations

import asyncio
import json
import pathlib
import socket
import threading
import time
import types
from collections import Counter
from collections.abc import Coroutine, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fork_server
from fault_ranks import Place, contents, serve
from jobs import Rank
from tessera.engines._updates import fields_of
from tessera.engines.vllm import server as plugin
from tessera.engines.vllm._client import NotUp
from tessera.engines.vllm._requests import init_of, update_of
from tessera.engines.vllm.server import Endpoints

LIMIT = 120.0
START_LIMIT = 900.0  # vLLM is imported


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


class Client:
    """What vLLM's HTTP server has of its engine."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.vllm_config = types.SimpleNamespace(weight_transfer_config=types.SimpleNamespace(backend="tessera"))
        self.generate = None

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return await asyncio.to_thread(self._server.call, method, *args)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._server.paused = True
        self._server.pauses += 1

    async def resume_generation(self) -> None:
        self._server.paused = False

    async def update_weight_version(self, version: str) -> None:
        self._server.shown = version
        self._server.shown_at[version] = time.monotonic()


class Metrics:
    """Nobody looks at them here."""

    def show(self, version: int) -> None: ...

    def count(self, ok: bool, pause: float) -> None: ...


class Server:
    """An engine: processes for its ranks, and HTTP in threads of this one. Its executor is as strict as vLLM's: at the
    first rank that fails it leaves the other ranks' answers for the next call."""

    def __init__(
        self,
        folder: pathlib.Path,
        name: str,
        world: int,
        undo: bool = False,
        patience: float = 60,
        model: str = "",
        port: int = 0,  # of HTTP
    ) -> None:
        """See Place."""
        self.name, self.world = name, world
        self.paused = False
        self.shown = "default"  # what /weight_info says
        self.shown_at: dict[str, float] = {}  # since when
        self.pauses = 0
        self.asked: Counter[str] = Counter()  # by path
        self.delay = 0.0  # of each call
        self.refuses = False  # as one that is not there yet
        self.answering = threading.Event()  # as one that does not stand still
        self.answering.set()
        self._lock = threading.Lock()
        environment = {"TESSERA_RUNTIME_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"}
        meeting = free_port()
        self.ranks = []
        for rank in range(world):
            ours, theirs = fork_server.context().Pipe()
            log = str(folder / f"{name}-{rank}.log")
            process = fork_server.context().Process(
                target=serve,
                args=(theirs, log, environment, Place(rank, world, meeting, undo, patience, model)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.ranks.append((process, ours))
        for rank, (_, connection) in enumerate(self.ranks):
            try:
                assert connection.poll(START_LIMIT) and connection.recv() == (True, "ready")
            except (AssertionError, EOFError):
                print((folder / f"{name}-{rank}.log").read_text())
                raise
        self._loop = asyncio.new_event_loop()
        self._endpoints = Endpoints()
        self._serving = threading.Thread(target=self._loop.run_forever)
        self._serving.start()
        plugin.new_metrics = Metrics
        self._run(self._endpoints.init_state(Client(self), None, None))
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server._answer(self, json.loads(body or b"{}"))

            def do_GET(self) -> None:
                server._answer(self, {})

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def pid(self, rank: int) -> int:
        pid: int = self.ranks[rank][0].pid
        return pid

    def call(self, method: str, *args: Any, **options: Any) -> list[Any]:
        """A collective call, by its rules."""
        with self._lock:
            time.sleep(self.delay)
            for _, connection in self.ranks:
                connection.send((method, args, options))  # BrokenPipeError: it was killed
            answers = []
            for rank, (_, connection) in enumerate(self.ranks):
                if not connection.poll(LIMIT):
                    raise RuntimeError(f"rank {rank} does not answer {method}")
                worked, value = connection.recv()
                if not worked:
                    raise RuntimeError(f"rank {rank}: {value}")
                answers.append(value)
            return answers

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _answer(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        self.answering.wait(LIMIT)

        async def has_left() -> bool:
            try:
                return request.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True

        try:
            found, code = self._route(request.path, body, has_left), 200
        except NotUp as error:
            found, code = {"error": str(error)}, 503
        except Exception as error:
            found, code = {"error": str(error)}, 500
        data = json.dumps(found).encode()
        try:
            request.send_response(code)
            request.send_header("Content-Length", str(len(data)))
            request.end_headers()
            request.wfile.write(data)
        except OSError:
            pass  # the trainer is gone

    def _route(self, path: str, body: Any, has_left: Any) -> Any:
        path, _, _ = path.strip("/").partition("?")
        self.asked[path] += 1
        if self.refuses:
            raise NotUp("not there yet")
        if path == "v1/tessera/join":
            return fields_of(self._run(self._endpoints.join(init_of(body), has_left=has_left)))
        if path == "v1/tessera/update":
            return fields_of(self._run(self._endpoints.update(update_of(body), has_left)))
        if path == "v1/tessera/status":
            return fields_of(self._run(self._endpoints.status()))
        if path == "weight_info":
            return {"weight_version": self.shown}
        if path not in ("health", "is_paused"):
            raise RuntimeError(f"no route {path}")
        return {"is_paused": self.paused}

    def serves(self, runs: Mapping[str, int]) -> int:
        """The number of what all ranks hold, bit for bit, by what they say. `runs`: number of contents before a run's
        first version."""
        while True:
            (said,) = self._said()
            run, version, torn = said
            assert not torn, said
            number = runs[run] + version if version else 0
            different = self.call("holds", number)
            if self._said() == {said}:  # what a dead trainer had asked for is done
                break
        assert different == [""] * self.world, (said, number, different)
        return number

    def _said(self) -> set[tuple[str, int, bool]]:
        return {(each["run"], each["version"], each["torn"]) for each in self.call("tessera_status")}

    def kill(self) -> None:
        """As if its machine had gone."""
        for process, _ in self.ranks:
            process.kill()
            process.join()
        self._http.shutdown()
        self._http.server_close()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._serving.join()
        self._loop.close()
        for process, connection in self.ranks:
            connection.close()
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()


def train(rank: Rank, engines: Mapping[str, str], before: int, options: Mapping[str, Any], model: str = "") -> None:
    """Makes a Trainer, and sends a version each time it is told to; after `before` earlier contents. Ends if that
    raises, having told it."""
    from tessera.engines.vllm import Trainer

    number = before
    try:
        tensors = contents(before + 1, model)
        with Trainer(tensors, engines, role=rank.job, rank=rank.rank, world=rank.world, **options) as trainer:
            rank.tell(("run", trainer.run))
            while (what := rank.hear()) is not None:
                number += 1
                for name, each in contents(number, model).items():
                    tensors[name].copy_(each)
                began = time.monotonic()
                updates = trainer.send()
                seconds = time.monotonic() - began
                told = {name: (each.ok, each.version, each.run, each.error) for name, each in updates.items()}
                rank.tell((what, number, told, (began, seconds)))
            rank.tell(("end", None))
    except Exception as error:
        rank.tell(("failed", f"{type(error).__name__}: {error}"))
