"""Names of jobs on the bus; no engine is needed."""

import pytest
from tessera import InvalidArgumentError, _core
from tessera.engines._names import job_name, user_name, with_end
from tessera.engines.sglang.server import Settings

LONG = "x" * 64


@pytest.mark.parametrize("name", ["trainer", "engine0", LONG])
@pytest.mark.parametrize("pair", ["weights", "two", LONG])
def test_a_name_holds_its_pair_and_fits(name, pair):
    job = job_name(name, pair)
    _core.check_name("job", job)
    assert (job == name) == (pair == "weights")
    for end in (".rank123", "-dp12", ".verdicts", ".waiting"):
        _core.check_name("job", with_end(job, end))
    if LONG not in (name, pair):
        assert user_name(job, pair) == name


def test_names_that_are_shortened_stay_different():
    names = [with_end("a" * 60 + end, ".rank0") for end in "abc"]
    assert len({*names, *(job_name("a" * 40, f"{'b' * 40}{end}") for end in "abc")}) == 6


@pytest.mark.parametrize("pair", ["", "two pairs", 3, None, LONG + "x"])
def test_a_pair_that_is_no_name_is_refused(pair):
    with pytest.raises(InvalidArgumentError, match="pair"):
        job_name("trainer", pair)


def test_a_server_of_sglang_has_the_names_of_its_pair(monkeypatch):
    monkeypatch.setenv("TESSERA_SGLANG", '{"engine": "a", "pair": "two"}')
    settings = Settings.from_environment()
    assert (settings.engine, settings.trainer, settings.pair) == ("a.two", "trainer.two", "two")
