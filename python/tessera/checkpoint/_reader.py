"""What is read: files of whole tensors, or the local tensors that `tessera recv --out` has written for each rank."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from .. import _core
from .._errors import Error, InvalidArgumentError
from ._checksums import CHECKSUMS
from ._parts import Intervals, Region, size_of

_OF_RANK = re.compile(r"rank-(\d{5})\.safetensors")

Visit: TypeAlias = Callable[[str, Region, int], None]
"""Called with the key of a stored tensor, a region of it, and the address where its elements lie packed."""


class Stored(NamedTuple):
    """A tensor as it lies in a file: the whole one, or one rank's part of it."""

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    checkpoint: _core.Checkpoint

    def read(self, region: Region, address: int, room: int) -> int:
        return self.checkpoint.read_slice(self.name, region, address, room)


class Reader(Protocol):
    path: str
    metadata: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # dtype and logical shape by name
    stored: dict[str, Stored]  # by keys; where files hold whole tensors, by their names
    checksums: dict[str, str]  # of stored tensors by key, as the files note them

    def read(self, name: str, regions: Sequence[Region], memory: torch.Tensor, visit: Visit | None = None) -> None:
        """Fills `memory`, which is contiguous, with the regions, one after the other."""


def open_reader(path: str) -> Reader:
    """Of a file, an index, or a folder."""
    if os.path.isdir(path):
        names = [name for name in os.listdir(path) if name.endswith((".safetensors", ".safetensors.index.json"))]
        if names and all(map(_OF_RANK.fullmatch, names)):
            return LocalTensors(path, sorted(names))
    return WholeTensors(path)


class WholeTensors:
    def __init__(self, path: str) -> None:
        self._checkpoint = _core.Checkpoint.open(path)
        self.path = self._checkpoint.path
        self.metadata = _without_checksums(self._checkpoint)
        self.tensors = {name: (dtype, shape) for name, dtype, shape in self._checkpoint.tensors}
        self.stored = {
            name: Stored(self.path, name, dtype, shape, self._checkpoint)
            for name, (dtype, shape) in self.tensors.items()
        }
        self.checksums = dict(self._checkpoint.checksums)

    def read(self, name: str, regions: Sequence[Region], memory: torch.Tensor, visit: Visit | None = None) -> None:
        address, room = memory.data_ptr(), memory.numel() * memory.element_size()
        for region in regions:
            read = self.stored[name].read(region, address, room)
            if visit is not None:
                visit(name, region, address)
            address, room = address + read, room - read


def _without_checksums(checkpoint: _core.Checkpoint) -> dict[str, str]:
    return {key: value for key, value in checkpoint.metadata.items() if key != CHECKSUMS}


# --- local tensors


class _Local(NamedTuple):
    """One rank's part of a tensor."""

    key: str  # of the stored tensor
    owned: Region


class LocalTensors:
    """Of all ranks of one version."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.stored: dict[str, Stored] = {}
        self.checksums: dict[str, str] = {}
        self._locals: dict[str, list[_Local]] = {}
        self._layouts: dict[str, str] = {}
        for name in names:
            checkpoint = _core.Checkpoint.open(os.path.join(path, name))
            self._add(checkpoint, int(name[5:10]))
        self.metadata.pop("tensors", None)

    def _add(self, checkpoint: _core.Checkpoint, rank: int) -> None:
        metadata = checkpoint.metadata
        try:
            described = json.loads(metadata["tensors"])
            for name, dtype, extents in checkpoint.tensors:
                self._add_tensor(checkpoint, rank, name, dtype, extents, described[name])
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, Error) as error:
            raise InvalidArgumentError(
                f"{checkpoint.path}: it is not what tessera recv --out writes: {error}"
            ) from None
        if self.metadata and metadata.get("version") != self.metadata.get("version"):
            raise InvalidArgumentError(
                f"{self.path}: the files of ranks are of versions {self.metadata.get('version')} and "
                f"{metadata.get('version')}: copy them between two versions"
            )
        self.metadata = _without_checksums(checkpoint)

    def _add_tensor(
        self, checkpoint: _core.Checkpoint, rank: int, name: str, dtype: str, extents: tuple[int, ...], said: Any
    ) -> None:
        shape = tuple(said["shape"])
        layout = _core.Layout(said["layout"])
        owned = layout.owned(shape, rank)
        local = layout.local_shape(shape, rank)
        known = self.tensors.setdefault(name, (dtype, shape))
        if dtype == "f4" or local != extents or known != (dtype, shape):
            raise ValueError(f"tensor {name} is {dtype} {list(extents)}, as {layout} of {list(shape)}")
        if self._layouts.setdefault(name, said["layout"]) != said["layout"]:
            raise ValueError(f"tensor {name} has two layouts")
        region: Region = tuple(owned) if owned is not None else ()
        others = self._locals.setdefault(name, [])
        if owned is not None and all(each.owned != region for each in others):
            key = f"{rank} {name}"
            others.append(_Local(key, region))
            self.stored[key] = Stored(checkpoint.path, name, dtype, extents, checkpoint)
            if name in checkpoint.checksums:
                self.checksums[key] = checkpoint.checksums[name]

    def read(self, name: str, regions: Sequence[Region], memory: torch.Tensor, visit: Visit | None = None) -> None:
        flat, at = memory.view(-1), 0
        for region in regions:
            count = size_of(region)
            into = flat[at : at + count].view(_extents(region))
            found = sum(self._read_of(local, region, into, visit) for local in self._locals[name])
            if found != count:
                raise InvalidArgumentError(
                    f"{self.path}: the files of ranks hold {found} of {count} elements of tensor {name} that are "
                    "wanted here: all ranks' files have to be in the folder"
                )
            at += count

    def _read_of(self, local: _Local, region: Region, into: torch.Tensor, visit: Visit | None) -> int:
        """Copies what that rank has of the region; returns how many elements."""
        common = tuple(_intersection(a, b) for a, b in zip(region, local.owned, strict=True))
        count = size_of(common)
        if count == 0:
            return 0
        read = torch.empty(_extents(common), dtype=into.dtype)
        source = tuple(_within(a, b) for a, b in zip(common, local.owned, strict=True))
        self.stored[local.key].read(source, read.data_ptr(), count * read.element_size())
        if visit is not None:
            visit(local.key, source, read.data_ptr())
        target = [_within(a, b) for a, b in zip(common, region, strict=True)]
        packed = [_within(each, each) for each in common]
        for places in itertools.product(*map(_slices, target, packed)):
            into[tuple(to for to, _ in places)] = read[tuple(of for _, of in places)]
        return count


def _extents(region: Region) -> tuple[int, ...]:
    return tuple(sum(end - begin for begin, end in dim) for dim in region)


def _intersection(a: Intervals, b: Intervals) -> Intervals:
    both = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return tuple((begin, end) for begin, end in both if begin < end)


def _within(parts: Intervals, whole: Intervals) -> Intervals:
    """Where parts are in the packed whole. REQUIRES: each lies within one of its intervals."""

    def placed() -> Iterator[tuple[int, int]]:
        before = 0
        for begin, end in whole:
            for each in parts:
                if begin <= each[0] and each[1] <= end:
                    yield before + each[0] - begin, before + each[1] - begin
            before += end - begin

    return tuple(placed())


def _slices(target: Intervals, packed: Intervals) -> list[tuple[slice, slice]]:
    return [(slice(*to), slice(*of)) for to, of in zip(target, packed, strict=True)]
