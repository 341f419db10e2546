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
_folders = [str(Path(__file__).parent)]


def also_preload(module: str, folder: Path) -> None:
    """Have the server import a module of that folder, too. Before the first process is started."""
    _context.set_forkserver_preload([PRELOADED, module])
    _folders.append(str(folder))


def context() -> ForkServerContext:
    """A context whose processes are forked off the server, which starts with the first of them."""
    # With these folders on its path; without, it silently preloads nothing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(_folders), prepend=os.pathsep)
        forkserver.ensure_running()
    return _context


def require_preloaded() -> None:
    """In a forked process: raises RuntimeError if it would have to import torch itself."""
    if PRELOADED not in sys.modules:
        raise RuntimeError("the fork server has preloaded nothing: each process would import torch itself")
