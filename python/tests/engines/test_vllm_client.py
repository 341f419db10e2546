"""What a trainer asks of a vLLM server, over HTTP, against a server that plays one; no vLLM is needed."""

import http.server
import json
import threading

import pytest
from tessera import UnavailableError
from tessera.engines._numbers import Number
from tessera.engines._under_way import Deadline
from tessera.engines.vllm._client import NotUp, Server

VERDICT = {"ok": True, "rank": 0, "error": "", "version": 1, "staged": None}
STATUS = {
    **dict.fromkeys(("busy", "ready", "torn"), False),
    "trainer": "run",
    "run": "",
    "failure": "",
    "version": 0,
    "verdict": None,
}
INIT = {"engine": "e", "run": "run"}


class Played:
    """Answers by path: what it is told to, or a function of the body."""

    def __init__(self, answers):
        self.answers, self.asked, self.headers = answers, [], []
        played = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.do_POST()

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.strip("/")
                played.headers.append(dict(self.headers))
                asked = json.loads(body) if body else None
                played.asked.append((path, asked))
                answer = played.answers.get(path)
                if callable(answer):
                    answer = answer(asked)
                code = 200
                if answer is None:
                    code, answer = 404, {"detail": "Not Found"}
                elif isinstance(answer, int):
                    code, answer = answer, {"detail": "so it is"}
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="played", daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def play():
    made = []

    def begin(answers):
        made.append(Played(answers))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def whole(**fields):
    return {"ok": True, "version": 3, "run": "run", "error": "", "pause": 0.5, "ranks": [STATUS], **fields}


def test_a_server_with_the_plugin_is_asked_once_for_each_step(play):
    serves = {**STATUS, "version": 3, "run": "run"}
    played = play({"v1/tessera/join": whole(), "v1/tessera/update": whole(ranks=[serves])})
    server = Server(played.url, "secret", 5, "wait")
    server.join(INIT)
    assert server.update(Number(3), "run").version == 3
    assert played.asked == [
        ("v1/tessera/join", {"init": INIT}),
        ("v1/tessera/update", {"min_version": 3, "timeout": 5, "pause": "wait", "run": "run"}),
    ]
    assert all(each["Authorization"] == "Bearer secret" for each in played.headers)


def test_a_server_is_asked_to_keep_its_caches(play):
    played = play({"v1/tessera/update": whole()})
    Server(played.url, None, 5, "keep", clear_cache=False).update(Number(3), "run")
    assert played.asked == [
        (
            "v1/tessera/update",
            {"min_version": 3, "timeout": 5, "pause": "keep", "run": "run", "clear_cache": False},
        ),
    ]


def test_a_server_that_refuses_is_named(play):
    played = play(
        {"v1/tessera/join": whole(ok=False, error="rank 1: no trainer came", ranks=[{**STATUS, "trainer": None}])}
    )
    server = Server(played.url, None, 5, "keep")
    with pytest.raises(UnavailableError, match="rank 1: no trainer came"):
        server.join(INIT)
    assert "Authorization" not in played.headers[0]


@pytest.mark.parametrize("code", [400, 401, 500])
def test_an_error_of_the_server_is_passed_on(play, code):
    server = Server(play({"v1/tessera/join": code}).url, None, 5, "keep")
    with pytest.raises(UnavailableError, match=f"join answered {code}.*so it is"):
        server.join(INIT)


def test_a_server_that_is_not_up_is_told_from_one_that_refuses(play):
    for url in ("http://127.0.0.1:9", play({"v1/tessera/join": 503}).url):
        with pytest.raises(NotUp):
            Server(url, None, 5, "keep").join(INIT)


@pytest.mark.parametrize(
    "answer", [b"", b"[1]", b"no json", whole(ranks=[]), whole(ranks=[{}]), whole(version="3"), {"ok": True}]
)
def test_what_is_no_answer_is_refused(play, answer):
    server = Server(play({"v1/tessera/join": answer}).url, None, 5, "keep")
    with pytest.raises(UnavailableError):
        server.join(INIT)


class Workers:
    """A server in development mode, without the plugin for endpoints."""

    def __init__(self):
        self.ranks = [dict(STATUS) for _ in range(2)]
        self.said = []
        self.on = {}
        self.answers = {
            "collective_rpc": self.call,
            "pause?mode=keep": lambda _: self.say("pause"),
            "pause?mode=keep&clear_cache=false": lambda _: self.say("pause with caches"),
            "resume": lambda _: self.say("resume"),
            "update_weight_version": lambda body: self.say("version " + body["new_version"]),
        }

    def say(self, what):
        self.said.append(what)
        return {}

    def call(self, body):
        self.say(body["method"].removeprefix("tessera_"))
        return self.on.get(body["method"], lambda *_: None)(*body["args"]) or {"results": self.ranks}

    def set(self, **fields):
        for each in self.ranks:
            each.update(fields)


def test_without_the_plugin_the_same_is_done_by_routes_for_development(play):
    workers = Workers()
    workers.on = {
        "tessera_meet": lambda init: workers.set(busy=True),
        "tessera_status": lambda: workers.set(busy=False),
        "tessera_receive": lambda version, timeout: workers.set(busy=True, ready=True),
        "tessera_commit": lambda: workers.set(ready=False, version=4, verdict=VERDICT),
    }
    server = Server(play(workers.answers).url, None, 5, "keep")
    server.join(INIT)
    answer = server.update(Number(4), "run")
    assert answer.ok and answer.version == 4
    joining = ["leave", "meet", "status", "learn", "status"]
    assert workers.said == [*joining, "receive", "status", "pause", "commit", "version 4", "resume"]


def test_without_the_plugin_caches_are_kept_where_that_is_asked(play):
    workers = Workers()
    workers.on = {
        "tessera_receive": lambda version, timeout: workers.set(ready=True),
        "tessera_commit": lambda: workers.set(ready=False, version=4, verdict=VERDICT),
    }
    assert Server(play(workers.answers).url, None, 5, "keep", clear_cache=False).update(Number(4), "run").ok
    assert workers.said[-4:] == ["pause with caches", "commit", "version 4", "resume"]


def test_without_the_plugin_a_version_that_is_there_is_not_waited_for(play):
    workers = Workers()
    workers.set(run="run", version=4, verdict={**VERDICT, "ok": False, "error": "of an earlier one"})
    answer = Server(play(workers.answers).url, None, 5, "keep").update(Number(4), "run")
    assert answer.ok and answer.version == 4 and workers.said == ["status"]


def test_without_the_plugin_torn_weights_stay_paused(play):
    workers = Workers()
    workers.on = {
        "tessera_receive": lambda version, timeout: workers.set(ready=True),
        "tessera_commit": lambda: workers.set(torn=True, verdict={**VERDICT, "ok": False, "error": "copy failed"}),
    }
    server = Server(play(workers.answers).url, None, 5, "keep")
    server.join(INIT)
    answer = server.update(Number(1), "run")
    assert not answer.ok and "left paused" in answer.error and "resume" not in workers.said


def test_without_the_plugin_a_commit_that_is_not_answered_is_followed_by_resume(play):
    workers = Workers()
    workers.on = {
        "tessera_receive": lambda version, timeout: workers.set(ready=True),
        "tessera_commit": lambda: {"results": ["TypeError"]},
    }
    server = Server(play(workers.answers).url, None, 5, "keep")
    server.join(INIT)
    with pytest.raises(UnavailableError, match="TypeError"):
        server.update(Number(1), "run")
    assert workers.said[-2:] == ["status", "resume"]


def test_without_the_plugin_a_server_that_did_not_answer_in_the_pause_is_resumed_by_the_next_update(play):
    workers = Workers()
    workers.on = {
        "tessera_receive": lambda version, timeout: workers.set(ready=True),
        "tessera_commit": lambda: [workers.on.update(tessera_status=lambda: 500), 500][1],
    }
    server = Server(play(workers.answers).url, None, 5, "keep")
    with pytest.raises(UnavailableError, match="500"):
        server.update(Number(4), "run")
    assert "resume" not in workers.said
    workers.on, workers.said = {}, []
    workers.set(run="run", version=4, ready=False)
    for said in (["status", "resume"], ["status"]):
        assert server.update(Number(4), "run").ok
        assert workers.said == said
        workers.said = []


@pytest.mark.parametrize("steps", [False, True])
def test_what_is_asked_ends_with_the_deadline(play, steps):
    workers = Workers()
    workers.on = {"tessera_receive": lambda version, timeout: patience.append(timeout)}
    patience = []
    took = {"v1/tessera/update": lambda body: [patience.append(body["timeout"]), whole()][1]}
    server = Server(play(workers.answers if steps else took).url, None, 60, "keep")
    with server.until(Deadline(30)):
        server.update(Number(4), "run")
    assert 0 < patience[0] <= 30
    with server.until(Deadline(0)), pytest.raises(UnavailableError, match="busy until the time .* was over"):
        server.update(Number(4), "run")
    server.update(Number(4), "run")
    assert len(patience) == 2 and patience[1] == 60


def test_without_the_plugin_a_worker_that_cannot_join_takes_the_others_back(play):
    workers = Workers()
    workers.on = {"tessera_meet": lambda init: workers.ranks[1].update(failure="UnavailableError: nobody")}
    server = Server(play(workers.answers).url, None, 5, "keep")
    with pytest.raises(UnavailableError, match="rank 1: UnavailableError: nobody"):
        server.join(INIT)
    assert workers.said == ["leave", "meet", "leave"]


def test_without_the_plugin_a_pause_that_is_refused_is_followed_by_resume(play):
    workers = Workers()
    workers.on = {"tessera_receive": lambda version, timeout: workers.set(ready=True)}
    workers.answers["pause?mode=keep"] = 500
    server = Server(play(workers.answers).url, None, 5, "keep")
    server.join(INIT)
    with pytest.raises(UnavailableError, match="pause.*500"):
        server.update(Number(1), "run")
    assert workers.said[-2:] == ["status", "resume"]


def test_replicas_need_the_plugin(play):
    config = {"vllm_config": {"parallel_config": {"data_parallel_size": 2}}}
    played = play({"server_info?config_format=json": config, "collective_rpc": {"results": [STATUS]}})
    for replicas in (1, 2):
        with pytest.raises(UnavailableError, match="has 2 replicas: start it with VLLM_PLUGINS=tessera"):
            Server(played.url, None, 5, "keep", replicas=replicas).join(INIT)
    assert "collective_rpc" not in [path for path, _ in played.asked]
    played = play({"v1/tessera/join": whole()})
    Server(played.url, None, 5, "keep", replicas=2).join(INIT)
    assert played.asked == [("v1/tessera/join", {"init": INIT, "replicas": 2})]


REFUSES = {**STATUS, "version": 3, "run": "run", "verdict": {**VERDICT, "ok": False, "error": "no place"}}
SERVES = {**STATUS, "version": 3, "run": "run"}


@pytest.mark.parametrize(
    ("answer", "error", "version"),
    [
        ({"ranks": [SERVES]}, "", 3),
        ({"ok": False, "ranks": [SERVES]}, "it says that this did not work, and not why", 3),
        ({"ranks": [SERVES, REFUSES]}, "rank 1: no place", 3),
        ({"ranks": [SERVES, {**SERVES, "failure": "OSError: x"}]}, "rank 1: OSError: x", 3),
        ({"ok": False, "error": "lost; mixed", "ranks": [SERVES, {**SERVES, "version": 2}]}, "lost; mixed", None),
        ({"version": None, "ranks": [SERVES]}, "", 3),
        (
            {"ranks": [SERVES, {**SERVES, "version": 2}]},
            "ranks differ; weights of two versions are mixed, and the",
            None,
        ),
        ({"ranks": [{**SERVES, "version": 2}]}, "it took version 2, which was on its way, and not 3", 2),
        ({"ranks": [{**SERVES, "run": "another"}]}, "it goes on with version 3 of an earlier trainer", 3),
    ],
)
def test_what_ranks_say_counts_more_than_their_server(play, answer, error, version):
    server = Server(play({"v1/tessera/update": whole(**answer)}).url, None, 5, "keep")
    update = server.update(Number(3), "run").after(3, "run")
    assert (update.ok, update.version) == (not error, version)
    assert update.error.startswith(error) and update.error.count("mixed") <= 1


@pytest.mark.parametrize(
    "answer", [{"ranks": []}, {"ranks": None}, {"ranks": [None]}, {"ok": "yes"}, {"error": None}, {"pause": "1"}]
)
def test_what_is_no_update_is_named(play, answer):
    server = Server(play({"v1/tessera/update": whole(**answer)}).url, None, 5, "keep")
    with pytest.raises(UnavailableError, match="v1/tessera/update answered {"):
        server.update(Number(3), "run")


def test_a_server_without_any_routes_is_told_how_to_start_it(play):
    server = Server(play({}).url, None, 5, "keep")
    with pytest.raises(UnavailableError, match="has no routes for updates .*start vLLM with VLLM_PLUGINS=tessera"):
        server.join(INIT)


@pytest.mark.parametrize("page", [b"<!DOCTYPE html><html></html>", b"\n <html>"])
def test_something_else_than_a_server_is_told(play, page):
    server = Server(play({"v1/tessera/join": page}).url, None, 5, "keep")
    with pytest.raises(UnavailableError, match="is no vLLM server: .* with a page of HTML: no engine does$"):
        server.join(INIT)
