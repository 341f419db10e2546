"""The routes of a vLLM server, over an engine's client that plays workers; no vLLM is needed."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from tessera import InvalidArgumentError
from tessera.engines.vllm import server as server_module
from tessera.engines.vllm._requests import Asked, init_of, update_of
from tessera.engines.vllm.server import Endpoints


def verdict(ok, rank, error=""):
    return {"ok": ok, "rank": rank, "error": error, "version": 0, "staged": None}


class Client:
    """An engine of two workers, by the methods that vLLM's client has."""

    def __init__(self, backend="tessera"):
        self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))
        self.said = []
        self.ranks = [
            {
                **dict.fromkeys(("busy", "ready", "torn"), False),
                "trainer": "run",
                "run": "",
                "failure": "",
                "version": 0,
                "verdict": None,
            }
            for _ in range(2)
        ]
        self.on = {}  # by method: what changes the ranks
        self.polls = 0
        self.holds = {}  # by method: an Event to wait for

    async def collective_rpc(self, method, args=()):
        self.said.append((method, *args) if method != "tessera_status" else method)
        if method in self.holds:
            await self.holds[method].wait()
        if method == "tessera_status" and self.polls:
            self.polls -= 1
            if not self.polls:
                self.set(busy=False)
        self.on.get(method, lambda: None)()
        return [dict(each) for each in self.ranks]

    async def pause_generation(self, *, mode, clear_cache):
        self.said.append(f"pause {mode}" if clear_cache else f"pause {mode} with caches")

    async def resume_generation(self):
        self.said.append("resume")

    async def update_weight_version(self, version):
        self.said.append(f"version {version}")

    async def generate(self, *args, **options):
        yield None

    def set(self, rank=None, **fields):
        for each in self.ranks if rank is None else [self.ranks[rank]]:
            each.update(fields)

    def works(self, polls, **fields):
        """Workers are busy until that many looks at them."""
        self.polls = polls
        self.set(busy=True, **fields)

    def installs(self, version):
        """What workers do that receive and commit a version."""
        self.on["tessera_receive"] = lambda: self.set(ready=True)
        self.on["tessera_commit"] = lambda: [
            self.set(rank, ready=False, version=version, verdict=verdict(True, rank)) for rank in range(2)
        ]

    def without_status(self):
        return [each for each in self.said if each != "tessera_status"]


class Metrics:
    def __init__(self):
        self.version, self.counted = None, []

    def show(self, version):
        self.version = version

    def count(self, ok, pause):
        self.counted.append(ok)


@pytest.fixture(autouse=True)
def metrics(monkeypatch):
    made = Metrics()
    monkeypatch.setattr(server_module, "new_metrics", lambda: made)
    return made


async def started(client):
    endpoints = Endpoints()
    await endpoints.init_state(client, None, None)
    client.said.clear()
    return endpoints


def test_an_update_pauses_for_the_commit_only_and_shows_the_version_before_requests_go_on(metrics):
    client = Client()
    client.installs(3)
    client.on["tessera_receive"] = lambda: client.works(3, ready=True)

    async def run():
        endpoints = await started(client)
        answer = await endpoints.update(Asked(3, 60.0, "keep", True, "run"))
        return answer, await endpoints.shown_version()

    answer, shown = asyncio.run(run())
    assert answer.ok and answer.version == 3 and shown == "3"
    assert client.said == [
        "tessera_status",
        ("tessera_receive", 3, 60.0),
        *["tessera_status"] * 3,
        "pause keep",
        ("tessera_commit",),
        "version 3",
        "resume",
    ]
    assert metrics.version == 3 and metrics.counted == [True]


def test_what_was_not_received_pauses_nothing(metrics):
    client = Client()
    client.on["tessera_receive"] = lambda: client.set(0, ready=True)
    client.on["tessera_commit"] = lambda: [
        client.set(0, verdict=verdict(False, 0, "another rank failed")),
        client.set(1, verdict=verdict(False, 1, "no version came")),
    ]
    answer = asyncio.run(updated(client))
    assert not answer.ok and answer.error == "rank 1: no version came"
    assert client.without_status() == [("tessera_receive", None, 5.0), ("tessera_commit",)]
    assert metrics.counted == [False]


async def updated(client):
    return await (await started(client)).update(Asked(None, 5.0, "wait", True, None))


def test_a_worker_that_cannot_begin_ends_the_update():
    client = Client()
    client.on["tessera_receive"] = lambda: client.set(
        1, failure="InvalidArgumentError: no trainer is known", joined=False
    )
    answer = asyncio.run(updated(client))
    assert not answer.ok and answer.error.startswith("rank 1: InvalidArgumentError")
    assert client.without_status() == [("tessera_receive", None, 5.0)]


def test_an_engine_that_fails_in_the_pause_is_resumed():
    client = Client()
    client.installs(1)

    def die():
        raise RuntimeError("engine is dead")

    client.on["tessera_commit"] = die
    with pytest.raises(RuntimeError, match="dead"):
        asyncio.run(updated(client))
    assert client.said[-1] == "resume"


def test_an_engine_that_has_met_another_trainer_takes_nothing():
    client = Client()
    client.set(1, trainer="another")

    async def run():
        return await (await started(client)).update(Asked(1, 5.0, "keep", True, "run"))

    answer = asyncio.run(run())
    assert not answer.ok and answer.error == "it has not met this trainer"
    assert client.said == ["tessera_status"]


@pytest.mark.parametrize(
    ("asked", "run", "serves", "is_there"),
    [
        (3, "run", 3, True),
        (3, "run", 4, True),
        (4, "run", 3, False),
        (3, "another", 4, False),  # of a trainer before
        (3, "", 4, False),  # loaded
        (None, "run", 4, False),  # any that is newer is asked for
    ],
)
def test_a_version_that_a_request_before_has_brought_is_not_waited_for(asked, run, serves, is_there):
    client = Client()
    client.set(run=run, version=serves, verdict=verdict(False, 0, "of an earlier one"), failure="")
    client.installs(5)

    async def update():
        return await (await started(client)).update(Asked(asked, 5.0, "keep", True, "run"))

    answer = asyncio.run(update())
    assert answer.ok and answer.version == (serves if is_there else 5)
    assert ("tessera_receive" in str(client.said)) != is_there


def test_ranks_that_serve_different_versions_are_not_served():
    client = Client()
    client.installs(2)
    client.on["tessera_commit"] = lambda: [
        client.set(0, version=2, verdict=verdict(True, 0)),
        client.set(1, version=1, verdict=verdict(False, 1, "it does not know what the others decided")),
    ]
    answer = asyncio.run(updated(client))
    assert not answer.ok and answer.version is None and "rank 1: it does not know" in answer.error
    assert "resume" not in client.said


def test_requests_that_do_not_end_in_time_keep_their_version_and_go_on():
    client = Client()
    client.installs(1)

    async def pause(*, mode, clear_cache):
        client.said.append(f"pause {mode}")
        await asyncio.Event().wait()

    client.pause_generation = pause

    async def run():
        return await (await started(client)).update(Asked(1, 0.01, "wait", True, None))

    answer = asyncio.run(run())
    assert not answer.ok and "requests did not end in 0.01 s" in answer.error
    assert client.said[-2:] == ["pause wait", "resume"] and ("tessera_commit",) not in client.said


def test_what_receiving_took_is_not_there_for_the_pause():
    client = Client()
    client.installs(1)
    client.on["tessera_receive"] = lambda: [time.sleep(0.5), client.set(ready=True)]
    waited = []

    async def pause(*, mode, clear_cache):
        began = time.monotonic()
        try:
            await asyncio.Event().wait()
        finally:
            waited.append(time.monotonic() - began)

    client.pause_generation = pause

    async def run():
        return await (await started(client)).update(Asked(1, 2.0, "wait", True, None))

    assert "requests did not end in 2 s" in asyncio.run(run()).error
    assert waited[0] < 1.9 and client.said[-1] == "resume"


def test_caches_are_kept_where_that_is_asked():
    client = Client()
    client.installs(1)

    async def run():
        return await (await started(client)).update(Asked(1, 5.0, "keep", False, None))

    assert asyncio.run(run()).ok
    assert "pause keep with caches" in client.said and "pause keep" not in client.said


def test_an_engine_that_cannot_pause_is_resumed():
    client = Client()
    client.installs(1)

    async def pause(*, mode, clear_cache):
        raise RuntimeError("caches cannot be reset")

    client.pause_generation = pause
    with pytest.raises(RuntimeError, match="caches"):
        asyncio.run(updated(client))
    assert client.said[-1] == "resume"


@pytest.mark.parametrize("is_mixed", [True, False])
def test_a_commit_that_is_not_answered_is_followed_by_requests_only_if_all_ranks_have_one_version(is_mixed):
    client = Client()
    client.installs(2)

    def fails():
        client.ranks[0].update(version=2)
        if not is_mixed:
            client.ranks[1].update(version=2)
        raise RuntimeError("a worker does not answer")

    client.on["tessera_commit"] = fails
    with pytest.raises(RuntimeError, match="does not answer"):
        asyncio.run(updated(client))
    assert client.said[-2:] == [("tessera_commit",), "tessera_status"] if is_mixed else client.said[-1] == "resume"
    assert ("resume" in client.said) != is_mixed


def test_torn_weights_are_not_served():
    client = Client()
    client.installs(1)
    client.on["tessera_commit"] = lambda: client.set(torn=True, verdict=verdict(False, 0, "copy failed"))
    answer = asyncio.run(updated(client))
    assert not answer.ok and "left paused" in answer.error
    assert "resume" not in client.said


def test_a_caller_that_leaves_in_the_pause_leaves_no_server_paused():
    client = Client()
    client.installs(4)

    async def run():
        endpoints = await started(client)
        client.holds["tessera_commit"] = asyncio.Event()
        asked = asyncio.create_task(endpoints.update(Asked(4, 5.0, "keep", True, None)))
        while "pause keep" not in client.said:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert "resume" not in client.said
        client.holds.pop("tessera_commit").set()
        while "resume" not in client.said:
            await asyncio.sleep(0)
        return (await endpoints.status()).version

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 4


def test_updates_are_carried_through_one_after_the_other():
    client = Client()
    client.installs(1)

    async def run():
        endpoints = await started(client)
        await asyncio.gather(*(endpoints.update(Asked(1, 5.0, "keep", True, None)) for _ in range(3)))

    asyncio.run(run())
    steps = [("tessera_receive", 1, 5.0), "pause keep", ("tessera_commit",), "version 1", "resume"]
    assert client.without_status() == steps * 3


def test_joining_takes_two_steps_that_wait_elsewhere():
    client = Client()
    client.on["tessera_meet"] = lambda: client.works(2)

    async def run():
        return await (await started(client)).join({"engine": "e"})

    assert asyncio.run(run()).ok
    assert client.without_status() == [("tessera_leave",), ("tessera_meet", {"engine": "e"}), ("tessera_learn",)]


@pytest.mark.parametrize("step", ["tessera_meet", "tessera_learn"])
def test_if_a_worker_cannot_join_none_does(step):
    client = Client()
    client.on[step] = lambda: client.set(1, failure="UnavailableError: nobody is there")

    async def run():
        return await (await started(client)).join({})

    answer = asyncio.run(run())
    assert not answer.ok and answer.error == "rank 1: UnavailableError: nobody is there"
    assert client.said[-1] == ("tessera_leave",)


def test_the_version_that_was_loaded_is_shown_from_the_start(metrics):
    client = Client()
    client.set(version=7)

    async def run():
        endpoints = Endpoints()
        await endpoints.init_state(client, None, None)
        return await endpoints.shown_version()

    assert asyncio.run(run()) == "7" and "version 7" in client.said and metrics.version == 7


@pytest.mark.parametrize("backend", ["nccl", None])
def test_a_server_with_another_backend_says_how_to_start_it(backend):
    client = Client(backend)
    if backend is None:
        client.vllm_config.weight_transfer_config = None

    async def run():
        endpoints = Endpoints()
        await endpoints.init_state(client, None, None)
        await endpoints.status()

    with pytest.raises(InvalidArgumentError, match="--weight-transfer-config"):
        asyncio.run(run())
    assert client.said == []


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ([], "min_version"),
        ({"min_version": "3"}, "min_version='3'"),
        ({"min_version": True}, "min_version=True"),
        ({"min_version": 0}, "min_version=0"),
        ({"pause": "never"}, "keep, wait, abort"),
        ({"pause": ["keep"]}, "keep, wait, abort"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": 1e9}, "timeout=1000000000.0"),
        ({"timeout": "60"}, "timeout='60'"),
        ({"clear_cache": "no"}, "clear_cache='no'"),
        ({"run": 3}, "run=3"),
        ({"offset": 2}, "offset=2"),
        ({"offset": True}, "offset=True"),
    ],
)
def test_a_bad_request_is_told_what_to_give(body, named):
    with pytest.raises(InvalidArgumentError) as caught:
        update_of(body)
    assert named in str(caught.value)


def test_a_request_may_leave_out_what_has_a_default():
    assert update_of({}) == (None, 60.0, "keep", True, None, 0)
    body = {"min_version": 2, "timeout": 1, "pause": "abort", "clear_cache": False, "run": "r", "offset": 1}
    assert update_of(body) == (2, 1.0, "abort", False, "r", 1)
    assert init_of({"init": {"engine": "e"}}) == {"engine": "e"}
    for body in ({}, {"init": 3}, None, {"init": {"timeout": -1}}):
        with pytest.raises(InvalidArgumentError):
            init_of(body)


def test_a_process_beside_the_one_that_was_asked_shows_the_version_that_serves():
    client = Client()
    client.vllm_config.parallel_config = SimpleNamespace(data_parallel_size=1, _api_process_count=2)
    versions = ["default", "7", RuntimeError("Engines returned different versions")]

    async def get_weight_version():
        found = versions.pop(0)
        if isinstance(found, str):
            return found
        raise found

    client.get_weight_version = get_weight_version

    async def run():
        endpoints = await started(client)
        return [await endpoints.shown_version() for _ in range(3)]

    assert asyncio.run(run()) == ["default", "7", "7"]
