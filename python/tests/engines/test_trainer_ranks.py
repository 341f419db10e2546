"""Calls of rank 0 of a trainer, as the other ranks hear of them; no engine is needed."""

import concurrent.futures
import dataclasses

import pytest
import tessera
from tessera.engines._ranks import Ranks, State

LIMIT = 60
WORLD = 3
ERRORS = [
    tessera.InvalidArgumentError("batch default: no"),
    tessera.UnavailableError("http://a:1 is no vLLM server"),
    tessera.DeadlineExceededError("too late"),
    tessera.PeerLostError("engine/0 has died"),
    tessera.DataLossError("ünïcödé \ud800 \0"),
]


def joined(role="trainer", world=WORLD):
    with concurrent.futures.ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: Ranks("weights", role, "default", None, rank, world, LIMIT), range(world)))


@pytest.fixture
def ranks():
    started = joined()
    yield started
    for rank in started:
        rank.close()


def heard(rank, call):
    return rank.wait(lambda state: state.ended >= call, "anything", LIMIT)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_raised_alike_by_every_rank(ranks, error):
    ranks[0].tell(lambda state: state.after(7, error))
    for rank in ranks[1:]:
        state = heard(rank, 7)
        assert state.failed == 7 and type(state.error) is type(error)
        assert str(state.error) == str(error).encode(errors="replace").decode()


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), ValueError("x" * 100_000)])
def test_what_is_no_error_of_ours_is_told_with_its_name(ranks, error):
    ranks[0].tell(lambda state: state.after(0, error))
    for rank in ranks[1:]:
        assert type(heard(rank, 0).error) is tessera.CancelledError
        assert f"rank 0 has raised {type(error).__name__}: {str(error)[:50]}" in str(rank.state.error)


def test_a_rank_has_the_newest_state(ranks):
    for call in range(20):
        ranks[0].tell(lambda state, call=call: dataclasses.replace(state.after(call, None), busy=call % 2 == 0))
    for rank in ranks[1:]:
        assert heard(rank, 19) == State(ended=19)


def test_a_rank_0_that_leaves_is_told(ranks):
    ranks[0].tell(lambda state: dataclasses.replace(state.after(3, ERRORS[0]), closed=True))
    ranks[0].close()
    for rank in ranks[1:]:
        assert rank.wait(lambda state: state.closed, "that it leaves", LIMIT).failed == 3
        with pytest.raises(tessera.PeerLostError, match="rank 0 of this trainer is gone, and has not told the end: "):
            rank.wait(lambda state: state.ended > 3, "the end", LIMIT)


def test_a_wait_has_a_deadline(ranks):
    with pytest.raises(tessera.DeadlineExceededError, match=r"rank 0 of this trainer has not told in 0\.1 s the end"):
        ranks[1].wait(lambda state: state.ended > 0, "the end", 0.1)


def test_rank_0_waits_until_all_have_sent_a_version(ranks):
    for number in (1, 2, 5):
        ranks[1].has_sent(number)
        with pytest.raises(tessera.UnavailableError, match="not all ranks of this trainer have sent the version"):
            ranks[0].wait_for_all(number, 0.2)
        ranks[2].has_sent(number)
        ranks[0].wait_for_all(number, LIMIT)


def test_a_trainer_of_one_rank_needs_nobody():
    (alone,) = joined(world=1)
    alone.tell(lambda state: state.after(0, None))
    alone.wait_for_all(3, 0)
    alone.close()
    alone.close()


def test_long_names_are_shortened():
    for role in ("a" * 64, "a" * 63 + "b"):  # at once: they stay different
        for rank in joined(role, 2):
            rank.close()
