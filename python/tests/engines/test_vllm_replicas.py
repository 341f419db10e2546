"""A vLLM server with data parallelism, over an engine's client that plays workers; no vLLM is needed."""

import asyncio
from types import SimpleNamespace

import pytest
from tessera import InvalidArgumentError
from tessera.engines.vllm._requests import Asked, replicas_of
from tessera.engines.vllm._trainer import Trainer
from test_vllm_server import Client, metrics, started, updated, verdict

__all__ = ["metrics"]  # a fixture of all tests here


class Replicated(Client):
    """Two replicas of one worker each."""

    def __init__(self, **parallel):
        super().__init__()
        self.vllm_config.parallel_config = SimpleNamespace(data_parallel_size=2, **parallel)
        self.engine_core = SimpleNamespace(core_engines=[b"0", b"1"], _call_utility_async=self.called)
        self.set(received=None)

    async def called(self, name, method, timeout, args, kwargs, *, engine):
        assert (name, timeout, kwargs) == ("collective_rpc", None, None)
        replica = int(engine)
        self.said.append((replica, method, *args))
        self.on.get((replica, method), lambda: None)()
        return [dict(self.ranks[replica])]

    async def collective_rpc(self, method, args=()):
        raise AssertionError("it tells only of the first replica")

    def receives(self, replica, version):
        self.on[replica, "tessera_receive"] = lambda: self.set(replica, ready=True, received=version)
        self.on[replica, "tessera_commit"] = lambda: self.set(
            replica, ready=False, received=None, version=version, verdict=verdict(True, 0)
        )

    def asked(self, method):
        return [each for each in self.said if each[1:2] == (method,)]


def test_replicas_take_a_version_together():
    client = Replicated()
    for replica in range(2):
        client.receives(replica, 3)

    async def run():
        endpoints = await started(client)
        await endpoints.join({}, 2)
        return await endpoints.update(Asked(3, 60.0, "keep", True, None))

    answer = asyncio.run(run())
    assert (answer.ok, answer.version, len(answer.ranks)) == (True, 3, 2), answer
    assert client.asked("tessera_commit") == [(0, "tessera_commit"), (1, "tessera_commit")]
    assert client.said[-2:] == ["version 3", "resume"]


def test_a_replica_that_received_nothing_keeps_the_others_from_installing():
    client = Replicated()
    client.receives(0, 3)
    client.set(0, verdict=verdict(False, 0, "of an earlier update"))
    client.on[1, "tessera_commit"] = lambda: client.set(1, verdict=verdict(False, 0, "no version came"))
    answer = asyncio.run(updated(client))
    assert (answer.ok, answer.version, answer.error) == (False, 0, "rank 1: no version came")
    assert client.asked("tessera_commit") == [(1, "tessera_commit")] and "pause keep" not in client.said


def test_a_replica_that_has_found_a_newer_version_waits_for_the_others():
    client = Replicated()
    client.receives(0, 4)
    client.receives(1, 3)
    older = client.on[1, "tessera_receive"]
    client.on[1, "tessera_receive"] = lambda: (older(), client.receives(1, 4))
    answer = asyncio.run(updated(client))
    assert answer.ok and answer.version == 4
    assert [each[2] for each in client.asked("tessera_receive")] == [None, None, 4, 4]
    client.receives(1, 5)
    client.receives(0, 6)
    answer = asyncio.run(updated(client))
    assert not answer.ok and answer.error == "replicas have received versions [5, 6]" and answer.version == 4
    assert "pause keep" not in client.said


def test_replicas_of_which_one_does_not_install_stay_paused():
    client = Replicated()
    client.receives(0, 3)
    client.receives(1, 3)
    client.on[1, "tessera_commit"] = lambda: client.set(1, ready=False, verdict=verdict(False, 0, "no place"))
    answer = asyncio.run(updated(client))
    assert not answer.ok and answer.version is None and "rank 1: no place" in answer.error
    assert "weights of two versions are mixed, and the server is left paused" in answer.error
    assert "resume" not in client.said


@pytest.mark.parametrize(
    ("client", "replicas", "says"),
    [
        (Replicated(), 1, "--data-parallel-size 2, and the trainer counts on 1: give its Trainer data_parallel=2"),
        (Client(), 2, "--data-parallel-size 1, and the trainer counts on 2"),
        (Replicated(data_parallel_external_lb=True), 2, "without --data-parallel-external-lb"),
    ],
)
def test_another_number_of_replicas_is_refused(client, replicas, says):
    async def run():
        await (await started(client)).join({}, replicas)

    with pytest.raises(InvalidArgumentError, match=says):
        asyncio.run(run())


def test_replicas_that_cannot_all_be_asked_are_not_updated():
    client = Replicated()
    client.engine_core.core_engines.pop()
    with pytest.raises(InvalidArgumentError, match="reaches 1 of its 2 replicas"):
        asyncio.run(updated(client))
    assert client.asked("tessera_receive") == []


@pytest.mark.parametrize("given", [0, True, "2", {"other": 2}, {"server": 0}])
def test_numbers_of_replicas_that_are_none_are_refused(given):
    with pytest.raises(InvalidArgumentError, match="data_parallel=.*give each server's --data-parallel-size"):
        Trainer({}, {"server": "http://127.0.0.1:9"}, data_parallel=given)
    if not isinstance(given, dict):
        with pytest.raises(InvalidArgumentError, match="replicas=.*give the server's --data-parallel-size"):
            replicas_of({"replicas": given})
