"""Loops in etp.join() that are under way in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .join import Join

joined: list[Join] = []
