"""An interpreter that has imported torch and what its distributed parts import late, off which tests fork processes:
those imports take seconds of each process, and a test has six or eight of them.

It must have no threads of its own, and nobody connects in it. A forked process ends without its interpreter's end: no
handlers of atexit.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

PRELOADED = "preloaded"  # the module that it imports
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([PRELOADED])


def context() -> ForkServerContext:
    """Whose processes are forked off it; it is started with the first."""
    # With this folder on its path, which it ignores otherwise and then silently preloads nothing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return _context


def require_preloaded() -> None:
    """In a forked process: raises RuntimeError unless it need not import torch itself."""
    if PRELOADED not in sys.modules:
        raise RuntimeError("the fork server has preloaded nothing: each process would import torch itself")
