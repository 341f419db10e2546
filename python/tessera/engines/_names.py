"""Names of an experiment's jobs on the bus.

A job's name is unique among all that share a store, in whatever pair it is. Users tell experiments by `pair=`, and call
the jobs of all of them trainer and engine0: so names on the bus hold the pair, unless it is the default one.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

from .. import _core
from .._arguments import text
from .._errors import AlreadyExistsError

PAIR = "weights"  # by default
_MOST = 48  # characters, of the 64 of a name on the bus, which leaves room for an end
_MARK = 8  # characters of a digest, in place of what is cut off


def with_end(name: str, end: str) -> str:
    """Return `name` with `end` behind it. A long one is shortened, and stays different from others."""
    if len(name) > _MOST:
        name = f"{name[: _MOST - _MARK - 1]}-{hashlib.sha1(name.encode()).hexdigest()[:_MARK]}"
    return name + end


def job_name(name: str, pair: str) -> str:
    """Return the name on the bus of a job that the user calls `name`. Raises InvalidArgumentError."""
    _core.check_name("pair", text("pair", pair))
    return name if pair == PAIR else with_end(f"{name}.{pair}", "")


def user_name(job: str, pair: str) -> str:
    """Return what the user calls a job, by its name on the bus, as far as that can be known."""
    return job if pair == PAIR else job.removesuffix(f".{pair}")


@contextlib.contextmanager
def one_of_each_pair(pair: str) -> Iterator[None]:
    """Say within, of a job that is there already, that it may be another experiment's."""
    try:
        yield
    except AlreadyExistsError as error:
        raise AlreadyExistsError(
            f"{error}. If that is another experiment on this machine, give each a pair= of its own, on all ranks and "
            f"servers that name one: this has {pair!r}"
        ) from None
