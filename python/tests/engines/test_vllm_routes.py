"""The routes of a vLLM server over HTTP, with callers that leave; vLLM is not needed, nor FastAPI, whose part Starlette
plays."""

import asyncio
import http.client
import json
import sys
import threading
import time
import types

import pytest
from test_vllm_server import Client, Metrics

starlette = pytest.importorskip("starlette.applications")
uvicorn = pytest.importorskip("uvicorn")
LIMIT = 60


class App(starlette.Starlette):
    """Stands for FastAPI, as far as the plugin uses it."""

    def add_api_route(self, path, endpoint, methods):
        async def answering(request):
            return await (endpoint() if methods == ["GET"] else endpoint(request))

        self.router.add_route(path, answering, methods=methods)


class Running:
    """An HTTP server with the plugin's routes, in a thread."""

    def __init__(self, monkeypatch):
        import starlette.requests
        import starlette.responses
        from tessera.engines.vllm import server as plugin

        fastapi = types.ModuleType("fastapi")
        fastapi.FastAPI, fastapi.Request = App, starlette.requests.Request
        responses = types.ModuleType("fastapi.responses")
        responses.JSONResponse = starlette.responses.JSONResponse
        monkeypatch.setitem(sys.modules, "fastapi", fastapi)
        monkeypatch.setitem(sys.modules, "fastapi.responses", responses)
        monkeypatch.setattr(plugin, "new_metrics", Metrics)
        self.client, self.endpoints, app = Client(), plugin.Endpoints(), App()
        self.endpoints.attach_router(app)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def _run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.endpoints.init_state(self.client, None, None))
        self.loop.run_until_complete(self.server.serve())

    def ask(self, version, timeout=LIMIT):
        """A request to update, whose answer is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        body = {"min_version": version, "timeout": timeout, "run": "run"}
        connection.request("POST", "/v1/tessera/update", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def close(self):
        self.server.should_exit = True
        self.thread.join()


def until(is_so):
    end = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def running(monkeypatch):
    server = Running(monkeypatch)
    yield server
    server.close()


def test_callers_that_have_left_are_dropped_and_those_that_wait_are_answered(running):
    client = running.client
    held = client.holds["tessera_receive"] = asyncio.Event()
    client.installs(1)
    first = running.ask(1)
    until(lambda: ("tessera_receive", 1, float(LIMIT)) in client.said)
    gone, waiting = running.ask(2), running.ask(3)
    until(lambda: len(running.endpoints._tasks) == 3)
    first.close()  # it is carried through
    gone.close()
    until(lambda: len(running.server.server_state.connections) == 1)
    client.installs(3)
    running.loop.call_soon_threadsafe(held.set)
    answer = json.loads(waiting.getresponse().read())
    assert answer["ok"] and answer["version"] == 3
    waiting.close()
    received = [said for said in client.said if said[0] == "tessera_receive"]
    assert [version for _, version, _ in received] == [1, 3]
    assert client.said[-1] == "resume"


def test_a_caller_whose_time_is_over_before_its_turn_is_told(running):
    client = running.client
    held = client.holds["tessera_receive"] = asyncio.Event()
    client.installs(1)
    first = running.ask(1)
    until(lambda: ("tessera_receive", 1, float(LIMIT)) in client.said)
    late = running.ask(2, 0.05)
    until(lambda: len(running.endpoints._tasks) == 2)
    time.sleep(0.1)
    running.loop.call_soon_threadsafe(held.set)
    assert json.loads(first.getresponse().read())["ok"]
    answer = json.loads(late.getresponse().read())
    assert not answer["ok"] and "busy until the caller had no more time" in answer["error"]
    assert sum(said[0] == "tessera_receive" for said in client.said) == 1
    first.close(), late.close()


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"min_version": 0}', b'{"offset": 7}'])
def test_a_bad_request_is_answered_with_400(running, body):
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=LIMIT)
    connection.request("POST", "/v1/tessera/update", body)
    response = connection.getresponse()
    assert response.status == 400 and json.loads(response.read())["error"]
    connection.close()
