"""Names on the bus that are made of others'."""

from __future__ import annotations

import hashlib

_MOST = 48  # characters, of the 64 of a name on the bus, which leaves room for an end
_MARK = 8  # characters of a digest, in place of what is cut off


def with_end(name: str, end: str) -> str:
    """Return `name` with `end` behind it. A long one is shortened, and stays different from others."""
    if len(name) > _MOST:
        name = f"{name[: _MOST - _MARK - 1]}-{hashlib.sha1(name.encode()).hexdigest()[:_MARK]}"
    return name + end
