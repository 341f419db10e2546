"""What a rank of LiveWeights does when votes are lost, ranks differ, or somebody interrupts."""

import threading

import pytest
import torch
from loaders import LOADERS
from tessera import MismatchError, UnavailableError, engines
from test_live_weights import Engine, Failing, Interrupted, Ranks


class Votes:
    """Answers of the other ranks to the votes to come: True, False, or an error; then they agree."""

    def __init__(self):
        self.answers = []
        self.proposals = []

    def __call__(self, proposal):
        self.proposals.append(proposal)
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, BaseException):
            raise answer
        return answer and proposal is not None


def updated(**options):
    """An engine at version 1 that has staged version 2, and the votes to come."""
    votes = Votes()
    one = Engine("repeated", agree=votes, **options)
    one.source.version = 1
    assert one.live.stage().ok and one.live.commit().ok
    one.source.version = 2
    assert one.live.stage().ok
    votes.proposals.clear()
    return one, votes


LOST = UnavailableError("lost")


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize(
    ("answers", "torn"),
    [
        ([False], False),
        ([LOST], False),
        ([True, False], False),
        ([True, LOST], False),
        ([True, True, False], "copied"),
        ([True, True, LOST], True),
    ],
)
def test_a_vote_that_is_lost_is_no_yes_and_the_last_one_is_told(answers, torn, undo):
    one, votes = updated(undo=undo)
    votes.answers = list(answers)
    verdict = one.live.commit()
    assert (
        not verdict.ok and verdict.version == 1 and one.live.torn == (torn is True or (torn == "copied" and not undo))
    )
    assert verdict.error == ("UnavailableError: lost" if LOST in answers else "another rank failed")
    assert votes.proposals == ["2"] * len(answers) + [None] * (3 - len(answers))  # the others do not wait for it
    assert one.live.torn or one.holds(1)
    assert one.live.stage().ok and one.live.commit().ok and not one.live.torn and one.holds(2)


def test_ranks_that_received_different_versions_install_none():
    ranks = Ranks(2)
    both = [Engine("fused", rank, 2, agree=ranks.agree) for rank in range(2)]
    for rank, one in enumerate(both):
        one.source.version = 1 + rank
    found = ranks.run(lambda rank: (both[rank].live.stage(), both[rank].live.commit()))
    assert not any(verdict.ok for verdicts in found for verdict in verdicts)
    assert both[0].holds(0) and both[1].holds(0)


def test_nothing_is_settled_while_a_version_is_received():
    one, votes = updated()
    begun, go_on = threading.Event(), threading.Event()

    def recv(min_version=None, *, timeout=None):
        begun.set()
        go_on.wait(60)
        return 3

    one.source.recv = recv
    thread = threading.Thread(target=one.live.receive)
    thread.start()
    begun.wait(60)
    one.live.receive()  # does nothing
    verdict = one.live.settle()
    assert not verdict.ok and "still being received" in verdict.error and votes.proposals == [None]
    assert not one.live.commit().ok
    go_on.set()
    thread.join()
    assert one.live.settle().ok and one.live.staged == 3


def test_what_serves_outlives_the_trainer():
    serving = engines.Serving()
    first = Engine("fused", serving=serving, run="a")
    first.source.version = 7
    assert first.live.stage().ok
    verdict = first.live.commit()
    assert (verdict.version, verdict.run) == (7, "a")
    second = engines.LiveWeights(
        first.live._parameters, first.learned, first.source, first.source.staged, serving=serving, run="b"
    )
    assert (second.version, second.serving.run) == (7, "a")
    first.source.version = 1  # it counts from 1 again
    assert second.stage().ok and second.version == 7
    verdict = second.commit()
    assert verdict.ok and serving == engines.Serving(1, "b") and first.holds(1)


def test_torn_weights_stay_torn_for_the_next_trainer(monkeypatch):
    one, _ = updated(serving=engines.Serving())
    with monkeypatch.context() as patch:
        Interrupted(patch, 2, more=1000)
        assert not one.live.commit().ok
    second = engines.LiveWeights(
        one.live._parameters, one.learned, one.source, one.source.staged, serving=one.live.serving
    )
    assert second.torn and second.stage().ok and second.torn
    assert second.commit().ok and not second.torn and one.holds(2)


@pytest.mark.parametrize("at", ["undo", "drop"])
def test_what_cannot_be_undone_at_first_is_tried_again(at):
    class Once(Failing):
        def _step(self, name):
            super()._step(name)
            if name == at and self.calls.count(name) == before + 1:
                raise MemoryError

    before = 0
    change = Once(LOADERS["repeated"](0, 1).model)
    one = Engine("repeated", changes=[change])
    one.source.version = 1
    assert one.live.stage().ok
    change.at = "swap"
    assert not one.live.commit().ok and not one.live.torn and one.holds(0)
    assert change.model.extra is None and change.calls.count(at) == 2


def test_what_cannot_be_undone_at_all_is_told():
    change = Failing(LOADERS["repeated"](0, 1).model)
    votes = Votes()
    one = Engine("repeated", changes=[change], agree=votes)
    one.source.version = 1
    assert one.live.stage().ok
    change.at = "undo"
    votes.answers = [True, False]
    assert not one.live.commit().ok and one.live.torn


@pytest.mark.parametrize("undo", [False, True])
def test_a_keyboard_interrupt_leaves_one_version_on_all_ranks(undo, monkeypatch):
    one, votes = updated(undo=undo)
    real = torch.Tensor.copy_
    left = [2]

    def copy(tensor, *args, **options):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return real(tensor, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy)
        with pytest.raises(KeyboardInterrupt):
            one.live.commit()
    assert votes.proposals == (["2", "2", None] if undo else ["2", "2", "2"])
    assert not one.live.torn and one.live.version == (1 if undo else 2) and one.holds(one.live.version)


@pytest.mark.parametrize("vote", [0, 1, 2])
def test_a_vote_that_is_interrupted_keeps_the_ranks_in_step(vote):
    one, votes = updated()
    votes.answers = [True] * vote + [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        one.live.commit()
    assert votes.proposals == ["2"] * (vote + 1) + [None] * (2 - vote)
    assert one.live.torn == (vote == 2) and (one.live.torn or one.holds(1))


def test_a_version_that_the_other_ranks_took_without_this_one_is_passed_over():
    one, _ = updated()
    real, calls = one.source.recv, []

    def recv(min_version=None, *, timeout=None):
        calls.append(min_version)
        if len(calls) == 1:
            raise MismatchError("recv is collective")
        return real(min_version, timeout=timeout)

    one.source.recv = recv
    assert one.live.stage(2).ok and calls == [2, 2]
