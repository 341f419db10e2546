"""What tests of the package share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def runtime_dir() -> Iterator[Path]:
    """A runtime folder of this run's own: short, because socket paths are."""
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESSERA_RUNTIME_DIR", folder)
        yield Path(folder)
