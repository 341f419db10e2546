"""Fixtures that tests of the package share."""

from __future__ import annotations

import gc
import importlib.util
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Jobs
from loopback import Loopback

# Of what a script starts in the background, SIGINT is ignored, and so would be by the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_torch_*.py"]


@pytest.fixture(autouse=True, scope="session")
def runtime_dir() -> Iterator[Path]:
    """The runtime folder of this run: short, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESSERA_RUNTIME_DIR", folder)
        yield Path(folder)
        gc.collect()  # buses that are closed, but that an error's traceback still holds, have files there


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder with a short path, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="tessera-") as path:
        yield Path(path)


@pytest.fixture
def jobs(folder: Path) -> Iterator[Jobs]:
    """Jobs of real processes, with their own runtime folder."""
    with Jobs(folder) as started:
        yield started


@pytest.fixture
def forked_jobs(folder: Path) -> Iterator[Jobs]:
    """The same, without the time that each process takes to import torch."""
    with Jobs(folder, forked=True) as started:
        yield started


@pytest.fixture(scope="session")
def loopback(runtime_dir: Path) -> Iterator[Loopback]:
    """Two jobs in this process."""
    pair = Loopback()
    yield pair
    pair.close()
