"""Answers of an engine's ranks, as a trainer takes and sums them up; no engine is needed."""

import dataclasses
import json

import pytest
from tessera.engines import EngineUpdate, RankStatus, Verdict
from tessera.engines._updates import ANOTHER_FAILED, fields_of, read

VERDICT = Verdict(True, 1, None, 0, seconds=0.5, run="a")
STATUS = RankStatus(1, "a", trainer="a", verdict=VERDICT, received=1, in_place=3)
WRONG = " is no |a RankStatus without|a Verdict without"
TOLD = json.loads(json.dumps(fields_of(STATUS)))


@pytest.mark.parametrize(
    "told",
    [STATUS, dataclasses.replace(STATUS, verdict=None, trainer=None), VERDICT, EngineUpdate.of([STATUS, STATUS])],
)
def test_what_is_told_is_read(told):
    assert read(type(told), json.loads(json.dumps(fields_of(told)))) == told


def test_another_release_may_tell_more_or_less():
    less = {name: value for name, value in TOLD.items() if name in ("version", "run", "verdict")}
    assert read(RankStatus, {**less, "colour": "blue"}) == RankStatus(1, "a", verdict=VERDICT)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "TypeError",
        [],
        {},
        {**TOLD, "version": "1"},
        {**TOLD, "version": True},
        {**TOLD, "torn": 1},
        {name: value for name, value in TOLD.items() if name != "version"},
        {**TOLD, "verdict": {}},
        {**TOLD, "verdict": {**TOLD["verdict"], "error": None}},
        {**TOLD, "verdict": {**TOLD["verdict"], "seconds": "0.5"}},
    ],
)
def test_anything_else_is_not(answer):
    with pytest.raises(ValueError, match=WRONG):
        read(RankStatus, answer)
    with pytest.raises(ValueError, match=WRONG):
        read(EngineUpdate, {"ok": True, "version": 1, "ranks": [TOLD, answer]})


def refused(rank, error, version=0):
    return RankStatus(version, verdict=Verdict(False, version, None, rank, error))


@pytest.mark.parametrize(
    ("ranks", "version", "error"),
    [
        ([STATUS, STATUS], 1, ""),
        ([refused(0, ANOTHER_FAILED), refused(1, "no version came")], 0, "rank 1: no version came"),
        ([RankStatus(0, failure="ValueError: x"), RankStatus(0)], 0, "rank 0: ValueError: x"),
        ([RankStatus(1), RankStatus(2)], None, "ranks differ; weights of two versions are mixed, and it is paused"),
        ([RankStatus(1, "a"), RankStatus(1, "b")], None, "ranks differ; weights of two versions are mixed, and it is"),
        ([refused(0, "lost", 1), RankStatus(2)], None, "rank 0: lost; weights of two versions are mixed, and it is"),
        ([], None, "ranks differ; weights of two versions are mixed, and it is paused"),
        ([RankStatus(1, torn=True)] * 2, None, "ranks differ; weights of two versions are mixed, and it is paused"),
    ],
)
def test_an_update_is_what_its_ranks_say(ranks, version, error):
    update = EngineUpdate.of(ranks, pause=0.25, when_mixed="it is paused")
    assert (update.ok, update.version, update.pause) == (not error, version, 0.25)
    assert update.error.startswith(error) and update.ranks == tuple(ranks)


@pytest.mark.parametrize(
    ("wanted", "run", "error"),
    [
        (1, "a", ""),
        (2, "a", "it took version 1, which was on its way, and not 2"),
        (1, "b", "it goes on with version 1 of an earlier trainer"),
    ],
)
def test_an_update_is_of_what_was_sent(wanted, run, error):
    update = EngineUpdate.of([STATUS]).after(wanted, run)
    assert (update.ok, update.error, update.version) == (not error, error, 1)


def test_long_texts_are_shortened():
    status = dataclasses.replace(refused(0, "a" * 900), failure="b" * 900).shortened(5)
    assert (status.error, status.failure) == ("aaaaa", "bbbbb")


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        (
            ["", ANOTHER_FAILED, "OSError: disk", "ValueError: shape"],
            "rank 2: OSError: disk; rank 3: ValueError: shape",
        ),
        ([ANOTHER_FAILED] * 3, f"rank 0: {ANOTHER_FAILED}"),
        (list("abcdef"), "rank 0: a; rank 1: b; rank 2: c; rank 3: d"),
    ],
)
def test_ranks_that_know_why_are_named(errors, expected):
    ranks = [refused(rank, error) if error else RankStatus(0) for rank, error in enumerate(errors)]
    assert EngineUpdate.of(ranks).error == expected
