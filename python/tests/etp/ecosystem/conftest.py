"""Set-up that tests of released packages share.

scripts/ecosystem.sh runs them; where a package is missing, its tests are skipped by name, as in the environment of the
other tests.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import fork_server
import pytest

if importlib.util.find_spec("accelerate") is not None:
    fork_server.also_preload("preloaded_trainers", Path(__file__).parent)


def pytest_runtest_setup() -> None:
    if importlib.util.find_spec("accelerate") is None:  # others may be there for other tests
        pytest.skip("accelerate is not installed: scripts/ecosystem.sh sets up an environment")
