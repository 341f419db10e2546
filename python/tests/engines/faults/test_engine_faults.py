"""Whatever fails in an update, an engine serves one version, says which, and takes the next one: the worker's real
code in processes, a real trainer over HTTP and the bus. fault_run.py does the same for as long as wanted."""

from __future__ import annotations

import itertools
import random
import types

import pytest
from fault_campaign import MEETING, PHASES, TRAINER, VLLM_ONLY, Campaign, Case, cases
from jobs import Jobs


@pytest.fixture
def campaign(folder):
    with Jobs(folder, 1200.0, forked=True) as jobs:
        made = []

        def make(*settings, **options):
            made.append(Campaign(jobs, folder, *settings, **options))
            assert not made[-1].meet()
            made[-1].check_next()
            return made[-1]

        yield make
        for each in made:
            each.leave()
            each.close()


TAKEN = ("copy", "refresh", "drop", "drop, for good")  # a retry helps, or nothing that matters has failed
TORN = ("copy, for good", "refresh, for good", "vote installed", "vote installed, decided", "vote swapped, decided")


@pytest.mark.slow
def test_a_fault_of_any_phase_on_one_rank_of_two(campaign):
    one = campaign(2)
    for number, phase in enumerate(each for each in PHASES if each not in VLLM_ONLY):
        outcome = one.run(Case(phase, ("error", "memory", "full")[number % 3], number % 2))
        assert outcome.what == ("taken" if phase in TAKEN else "torn" if phase in TORN else "refused"), outcome


def test_copies_that_can_be_undone_are(campaign):
    one = campaign(2, undo=True)
    for number, phase in enumerate(("swap", "copy", "copy, for good", "refresh", "vote swapped, decided")):
        outcome = one.run(Case(phase, "error", number % 2))
        assert outcome.what == "refused", outcome
    assert one.run(Case("vote installed, decided", "error", 1)).what == "torn"  # it does not know what the others do


@pytest.mark.slow
def test_a_fault_while_an_engine_and_its_trainer_meet(campaign):
    one = campaign(2)
    for number, phase in enumerate(each for each in MEETING if each not in VLLM_ONLY):
        outcome = one.run(Case(phase, "error", number % 2))
        assert outcome.what == "refused" and outcome.error, outcome


def test_an_engine_of_one_rank_that_is_interrupted(campaign):
    one = campaign(1)
    for phase in ("recv", "build", "swap", "copy", "refresh", "drop", "plan"):
        one.run(Case(phase, "interrupt", 0))


def test_an_engine_of_four_ranks_of_which_some_stop_for_a_while(campaign):
    one = campaign(4)
    for rank, phase in enumerate(("vote settle", "swap", "vote swapped", "vote installed")):
        assert one.run(Case(phase, "stop", rank, moment=0.05)).what == "taken"


@pytest.mark.slow
def test_a_rank_that_stops_for_longer_than_anybody_waits(campaign):
    one = campaign(2, patience=2.0)
    for phase, what in (("vote settle", "refused"), ("vote swapped", "refused"), ("vote installed", "torn")):
        outcome = one.run(Case(phase, "stop", 1, moment=5.0))
        assert outcome.what == what, outcome


@pytest.mark.parametrize("trainers", [1, 2])
def test_trainers_that_are_killed_come_late_or_are_started_again(campaign, trainers):
    one = campaign(2, trainers)
    for moment in (0.1, 0.5, 0.9):
        one.run(Case("killed", "one", trainers - 1, moment=moment))
    one.run(Case("killed while it meets", "all", 0, moment=0.1))
    one.run(Case("late rank", "all", 0, moment=0.2))
    one.run(Case("restarted", "all", 0))
    assert len(one.runs) == 2 + len(one.outcomes)  # the first versions of six runs were taken, though the number fell


def test_a_trainer_that_stands_still_for_longer_than_anybody_waits(campaign):
    one = campaign(2, timeout=2.0)
    one.run(Case("stopped", "one", 0, moment=0.3))


def test_cases_reach_every_phase():
    setting = types.SimpleNamespace(world=2, trainers=2, timeout=3.0, model="")
    found = {case.phase for case in itertools.islice(cases(random.Random(0), setting), 100)}
    assert found == {*PHASES, *MEETING, *TRAINER} - {*VLLM_ONLY}
