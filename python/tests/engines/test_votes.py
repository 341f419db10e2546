"""Votes over a store: one decision, whoever is late, and an end of every wait."""

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
from tessera import UnavailableError, engines
from torch.distributed import PrefixStore, TCPStore

LIMIT = 60


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=LIMIT), wait_for_workers=False)


def voters(store, world, timeout=LIMIT, name="votes"):
    return [engines.StoreVote(PrefixStore(name, store.clone()), rank, world, timeout) for rank in range(world)]


def together(votes, proposals):
    """What each voter learns: a decision or an error."""
    found = [None] * len(votes)

    def one(rank):
        try:
            found[rank] = votes[rank](proposals[rank])
        except UnavailableError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(votes))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LIMIT)
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_learn_whether_all_propose_the_same(store, world):
    votes = voters(store, world)
    for proposals, expected in [
        (["7"] * world, True),
        ([None] * world, False),
        (["8"] * (world - 1) + [None], False),
        ([None] + ["8"] * (world - 1), False),
        (["9"] * world, True),
    ]:
        assert together(votes, proposals) == [expected] * world
    if world > 1:
        assert together(votes, ["9"] * (world - 1) + ["10"]) == [False] * world


def test_a_rank_that_says_no_waits_for_nobody(store):
    votes = voters(store, 2)
    assert votes[0](None) is False and votes[0](None) is False
    assert votes[1]("1") is False and votes[1]("1") is False  # both votes were decided before
    assert together(votes, ["2", "2"]) == [True, True]


def test_the_deadline_is_a_no_that_a_late_rank_obeys(store):
    votes = voters(store, 2, timeout=0.2)
    assert votes[0]("1") is False
    assert votes[1]("1") is False  # all have proposed by now, and it is too late
    votes = voters(store, 2, name="others")
    assert together(votes, ["1", "1"]) == [True, True]


def test_votes_that_are_over_leave_the_store(store):
    votes = voters(store, 2)
    for number in range(20):
        proposals = ["1", None] if number == 3 else ["1", "1"]
        together(votes, proposals)
    assert store.num_keys() <= 2 * 3 + 1  # those of the last vote, and torch's own


class Stuck:
    """A store that answers nothing until it is let go, as that of a process that has stopped."""

    def __init__(self, store):
        self.store = store
        self.go_on = threading.Event()
        self.asked = threading.Event()

    def set(self, *arguments):
        self.asked.set()
        self.go_on.wait(LIMIT)
        return self.store.set(*arguments)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_a_store_that_does_not_answer_is_told_and_the_next_vote_works(store):
    stuck = Stuck(PrefixStore("votes", store.clone()))
    vote = engines.StoreVote(stuck, 0, 2, timeout=0.1)
    with pytest.raises(UnavailableError, match="has not answered in"):
        vote("1")
    assert stuck.asked.is_set()
    stuck.go_on.set()
    other = engines.StoreVote(PrefixStore("votes", store.clone()), 1, 2, LIMIT)
    other(None)
    late = engines.StoreVote(stuck, 0, 2, LIMIT)
    late(None)
    assert together([late, other], ["2", "2"]) == [True, True]


def host(rank):
    """Hosts a store until it is told."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    rank.tell(store.port)
    rank.hear()


def test_a_host_that_stops_or_dies_ends_in_an_error_and_not_in_a_wait(forked_jobs):
    (process,) = forked_jobs.start("host", host)
    client = TCPStore("127.0.0.1", process.hear(), None, False, timeout=timedelta(seconds=LIMIT))
    votes = voters(client, 2, timeout=0.2)
    process.kill(signal.SIGSTOP)
    with pytest.raises(UnavailableError):
        votes[0]("1")
    os.kill(process.pid, signal.SIGCONT)
    process.kill()
    with pytest.raises(UnavailableError):
        votes[1]("1")


def test_default_group_gives_a_connection_of_its_own(store):
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        made = engines._vote.group_store("a")
        waiting = threading.Thread(target=store.wait, args=(["awaited"],))
        waiting.start()
        made.set("key", "value")  # it does not wait for that
        assert made.get("key") == b"value"
        store.clone().set("awaited", "")
        waiting.join(LIMIT)
    finally:
        torch.distributed.destroy_process_group()
