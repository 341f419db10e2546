"""Checksums of tensors (docs/formats/digest.md). Those of disjoint parts add up, so that ranks take them of what they
write and read themselves, however the tensor is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from .. import _core
from .._errors import DataLossError
from ._parts import Region, size_of
from ._plan import disjoint

CHECKSUMS = "tessera.checksums"
"""The key of a file's metadata with the checksums of its tensors; those of several files are in their index."""

Sum: TypeAlias = tuple[int, int]
ZERO: Sum = (0, 0)
_MODULUS = 1 << 64
_TEXT = re.compile(r"[0-9a-f]{32}")


def of_region(dtype: str, shape: Sequence[int], region: Region, address: int) -> Sum:
    """Return the checksum of a region's elements, which lie packed at an address."""
    return _core.region_digest(dtype, shape, region, address)


def added(sums: Iterable[Sum]) -> Sum:
    """Return the checksum of all of these parts."""
    first = second = 0
    for each in sums:
        first, second = (first + each[0]) % _MODULUS, (second + each[1]) % _MODULUS
    return first, second


def text_of(found: Sum) -> str:
    return f"{found[0]:016x}{found[1]:016x}"


def sum_of(text: Any) -> Sum:
    """Return what text_of() has written. Raises ValueError for anything else."""
    if not isinstance(text, str) or _TEXT.fullmatch(text) is None:
        raise ValueError(text)
    return int(text[:16], 16), int(text[16:], 16)


class Read(NamedTuple):
    """Rows that a rank has read of a tensor of a file."""

    name: str
    regions: list[Region]
    sums: list[str]  # of each region


def unlike(saved: dict[str, str], shapes: dict[str, tuple[int, ...]], reads: Iterable[Read]) -> tuple[str, str] | None:
    """Return name and checksum of a tensor that is not what was saved. Those of which the regions do not cover the
    whole once are left to `unread`."""
    for name, regions in _by_name(reads).items():
        if name in saved and _covers(regions, shapes[name]):
            found = text_of(added(map(sum_of, regions.values())))
            if found != saved[name]:
                return name, found
    return None


def unread(saved: dict[str, str], shapes: dict[str, tuple[int, ...]], reads: Iterable[Read]) -> list[str]:
    """Return names of tensors of which ranks have read a part, or parts that overlap."""
    return [name for name, regions in _by_name(reads).items() if name in saved and not _covers(regions, shapes[name])]


def _by_name(reads: Iterable[Read]) -> dict[str, dict[Region, str]]:
    found: dict[str, dict[Region, str]] = {}
    for name, regions, sums in reads:
        found.setdefault(name, {}).update(zip(regions, sums, strict=True))
    return found


def _covers(regions: dict[Region, str], shape: Sequence[int]) -> bool:
    total = 1
    for size in shape:
        total *= size
    return sum(map(size_of, regions)) == total and disjoint(list(regions))


def damaged(path: str, name: str, found: str, saved: str) -> DataLossError:
    """Return the error of a tensor that has changed since it was saved."""
    return DataLossError(
        f"{path}: tensor {name!r} is damaged: its checksum is {found}, and was {saved} when it was saved: copy the "
        "file again, or load another checkpoint; verify=False loads what is there"
    )
