"""One trainer of several vLLM servers: each at its own pace, and none in the way of another one."""

from __future__ import annotations

import pytest
from fault_servers import LIMIT, Server, train
from jobs import Jobs


@pytest.fixture
def servers(folder):
    made = {name: Server(folder, name, 1) for name in ("steady", "slow", "late")}
    yield made
    for server in made.values():
        server.close()


def test_one_that_is_slow_late_gone_or_started_again_keeps_no_other_one_waiting(servers, folder):
    steady, slow, late = servers.values()
    with Jobs(folder, forked=True) as jobs:
        late.refuses = True
        urls = {name: server.url for name, server in servers.items()}
        options = {"timeout": LIMIT, "grace": 1.0}
        (trainer,) = jobs.start("trainer", train, urls, 0, options)
        runs = {"": 0, trainer.hear()[1]: 0}

        def send():
            trainer.tell("sent")
            return trainer.hear()[2]

        def send_until(*names):
            """Which gives each of them the time that it needs."""
            while True:
                updates = send()
                if all(updates[name][0] for name in ("steady", *names)):
                    return updates

        number = send_until("slow")["steady"][1]
        assert steady.serves(runs) == slow.serves(runs) == number and late.shown == "default"
        held = slow._lock
        with held:  # no call of it is answered
            for _ in range(3):
                updates = send()
                assert updates["steady"][0] and not updates["slow"][0] and not updates["late"][0]
            assert "was busy with an earlier version" in updates["slow"][3]
        assert steady.serves(runs) == number + 3
        late.refuses = False
        newest = send_until("slow", "late")["steady"][1]
        assert all(server.serves(runs) == newest for server in servers.values())

        slow.kill()
        updates = send()
        assert updates["steady"][0] and updates["slow"][:2] == (False, None)
        trainer.tell(None)
        trainer.result()


def test_a_server_that_was_started_again_is_taken_in_by_the_next_send(folder):
    before = Server(folder, "engine", 1)
    urls = {"engine": before.url}
    with Jobs(folder, forked=True) as jobs:
        (trainer,) = jobs.start("trainer", train, urls, 0, {"timeout": LIMIT})
        runs = {"": 0, trainer.hear()[1]: 0}
        trainer.tell("sent")
        assert trainer.hear()[2]["engine"][:2] == (True, 1)
        before.kill()
        after = Server(folder, "engine", 1, port=before.port)
        try:
            assert after.serves(runs) == 0
            trainer.tell("sent")
            assert trainer.hear()[2]["engine"][:2] == (True, 2)
            assert after.serves(runs) == 2 and after.shown == "2"
            trainer.tell(None)
            trainer.result()
        finally:
            after.close()
            before.close()
