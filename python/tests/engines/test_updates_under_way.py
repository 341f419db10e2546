"""Updates of servers beside each other: interrupted, slow, late; no engine is needed."""

import signal
import threading
import time

import pytest
from tessera import CancelledError
from tessera.engines import EngineUpdate
from tessera.engines._numbers import Number
from tessera.engines._under_way import Deadline, Sent, Updates

LIMIT = 60


class Servers:
    """Plays servers: an update waits while its server is closed. `taken`: (server, version), in order."""

    def __init__(self, *names):
        self.open = {name: threading.Event() for name in names}
        self.begun = {name: threading.Semaphore(0) for name in names}
        self.taken, self.running, self.most = [], dict.fromkeys(names, 0), 0
        for name in names:
            self.open[name].set()

    def update(self, name, sent):
        self.running[name] += 1
        self.most = max(self.most, self.running[name])
        self.begun[name].release()
        assert self.open[name].wait(LIMIT)
        self.taken.append((name, sent.number.version))
        self.running[name] -= 1
        return EngineUpdate(True, sent.number.version)


@pytest.fixture
def make():
    started = []

    def updates(servers, grace=None):
        urls = {name: f"http://{name}" for name in servers.open}
        started.append((servers, Updates(urls, servers.update, grace)))
        return started[-1][1]

    yield updates
    for servers, running in started:
        for is_open in servers.open.values():
            is_open.set()
        running.close()


def sent(version, seconds=LIMIT):
    return Sent(Number(version), Deadline(seconds))


def interrupted(run, servers, name):
    """Interrupts it once the server is at work."""

    def interrupt():
        assert servers.begun[name].acquire(timeout=LIMIT)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    while servers.begun[name].acquire(blocking=False):
        pass
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run()
    thread.join()


@pytest.mark.parametrize("grace", [None, 30.0])
@pytest.mark.parametrize("times", [1, 3])
def test_after_an_interrupt_the_next_version_waits_for_what_is_under_way(make, grace, times):
    servers = Servers("a", "b")
    updates = make(servers, grace)
    servers.open["b"].clear()
    interrupted(lambda: updates.run(sent(1)), servers, "b")
    for number in range(1, times):  # at the server that waits for nothing
        interrupted(lambda number=number: updates.run(sent(1 + number)), servers, "a")
    threading.Timer(0.2, servers.open["b"].set).start()
    results = updates.run(sent(9))
    assert results == {"a": EngineUpdate(True, 9), "b": EngineUpdate(True, 9)}
    assert [version for name, version in servers.taken if name == "b"] == [1, 9]  # those between are superseded
    assert servers.most == 1


def test_one_that_takes_longer_than_the_grace_is_waited_for_again_once_it_is_done(make):
    servers = Servers("a", "b")
    updates = make(servers, grace=0.05)
    servers.open["b"].clear()
    for version in (1, 2, 3):
        results = updates.run(sent(version))
        assert results["a"] == EngineUpdate(True, version)
        assert results["b"] == EngineUpdate(False, None, "http://b was busy with an earlier version")
    servers.open["b"].set()
    while updates.busy:
        time.sleep(0.005)
    updates._grace = LIMIT
    assert updates.run(sent(4))["b"] == EngineUpdate(True, 4)
    assert [version for name, version in servers.taken if name == "b"] == [1, 4]


def test_one_that_does_not_end_at_its_deadline_is_left_under_way(make):
    servers = Servers("a", "b")
    updates = make(servers)
    servers.open["b"].clear()
    for version in (1, 2):
        results = updates.run(sent(version, 0.1))
        assert results["a"].ok and results["b"].error == "http://b was busy with an earlier version"
    servers.open["b"].set()
    assert updates.run(sent(3))["b"] == EngineUpdate(True, 3)
    assert servers.most == 1


def test_a_failure_of_one_is_raised_once_all_have_ended(make):
    servers = Servers("a", "b")
    updates = make(servers)
    ended = []

    def work(name):
        if name == "a":
            raise ValueError(name)
        ended.append(name)

    with pytest.raises(ValueError, match="a"):
        updates.for_each(work)
    assert ended == ["b"]


def test_a_trainer_that_another_thread_has_closed_says_so(make):
    updates = make(Servers("a"))
    updates.close()
    with pytest.raises(CancelledError, match="closed by another thread"):
        updates.run(sent(1))
