"""A sharded tensor acts as the whole tensor: a sample of torch's OpInfo database that the commit draws, and in the slow
lane all of it. The harness is checked on itself: with nothing sharded all is right, and planted mistakes are found.
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from .driver import run_apart
from .faults import FAULTS
from .options import Options
from .verdicts import Report, Verdict

SAMPLE = 60
WHOLE_DATABASE = 7200.0  # seconds
SMALL = Options(adapter="unsharded", differ=True, grad=True, only="^(add|exp|mul|transpose)$", samples=4, alarm=3)
NARROW = {"standstill": "^forward$", "death": "^forward$"}  # modes: each case costs new ranks


def draw_seed() -> int:
    """Return a seed that another commit changes."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "1"  # sources without their repository
    seed = int(commit[:8], 16)
    print(f"operations are drawn by --seed {seed}")
    return seed


def require_good(report: Report) -> None:
    """Require that something was right, and the rest refused by name."""
    print(report.text())
    assert report.finished == set(report.names)
    assert report.total()[Verdict.RIGHT] > 0
    assert not report.bad(), report.text(20)


@pytest.fixture(scope="module")
def of_faults() -> dict[str, Report]:
    options = [
        dataclasses.replace(
            SMALL,
            adapter=FAULTS[name].adapter,
            fault=name,
            samples=1 if name in NARROW else 4,
            modes=NARROW.get(name, ""),
            alarm=3 if FAULTS[name].adapter == "unsharded" else 20,
        )
        for name in FAULTS
    ]
    return {report.options.fault: report for report in run_apart(options, timeout=600)}


@pytest.mark.slow  # alarms of seconds, which other work on the machine may set off
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_mistake_is_found(of_faults: dict[str, Report], name: str) -> None:
    worst = max(finding.verdict for finding in of_faults[name].findings)
    assert worst is FAULTS[name].expected, of_faults[name].text()
    assert of_faults[name].finished == set(of_faults[name].names)


def test_with_nothing_sharded_all_is_right() -> None:
    seed = draw_seed()
    drawn = Options(adapter="unsharded", differ=True, grad=True, operations=20, seed=seed)
    lists = dataclasses.replace(drawn, only="^_foreach_(add|norm|copy)$|^_fused|^_amp", operations=0, samples=1)
    for report in run_apart([drawn, lists], timeout=600):
        require_good(report)
        assert not report.bad(Verdict.NAMED), report.text()


def test_operations_that_the_commit_draws() -> None:
    options = Options(ranks=2, differ=True, grad=True, operations=SAMPLE, seed=draw_seed(), samples=1)
    (report,) = run_apart([options], timeout=900)
    require_good(report)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["equal", "differ", "numbers"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_whole_database(ranks: int, arguments: str) -> None:
    options = Options(ranks=ranks, grad=True, differ=arguments != "equal", numbers=arguments == "numbers")
    (report,) = run_apart([options], timeout=WHOLE_DATABASE)
    require_good(report)
