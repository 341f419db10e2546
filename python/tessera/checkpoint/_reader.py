"""What is read: files of whole tensors, or the local tensors that `tessera recv --out` has written for each rank."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .. import _core
from .._errors import Error, InvalidArgumentError
from ._parts import Intervals, Region, size_of

_OF_RANK = re.compile(r"rank-(\d{5})\.safetensors")


class Reader(Protocol):
    path: str
    metadata: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # dtype and logical shape by name

    def read(self, name: str, regions: Sequence[Region], memory: torch.Tensor) -> None:
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
        self.metadata = dict(self._checkpoint.metadata)
        self.tensors = {name: (dtype, shape) for name, dtype, shape in self._checkpoint.tensors}

    def read(self, name: str, regions: Sequence[Region], memory: torch.Tensor) -> None:
        address, room = memory.data_ptr(), memory.numel() * memory.element_size()
        for region in regions:
            read = self._checkpoint.read_slice(name, region, address, room)
            address, room = address + read, room - read


# --- local tensors


class _Local(NamedTuple):
    """One rank's part of a tensor."""

    checkpoint: _core.Checkpoint
    owned: Region


class LocalTensors:
    """Of all ranks of one version."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
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
        self.metadata = dict(metadata)

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
            others.append(_Local(checkpoint, region))

    def read(self, name: str, regions: Sequence[Region], memory: torch.Tensor) -> None:
        flat, at = memory.view(-1), 0
        for region in regions:
            count = size_of(region)
            into = flat[at : at + count].view(_extents(region))
            found = sum(self._read_of(local, name, region, into) for local in self._locals[name])
            if found != count:
                raise InvalidArgumentError(
                    f"{self.path}: the files of ranks hold {found} of {count} elements of tensor {name} that are "
                    "wanted here: all ranks' files have to be in the folder"
                )
            at += count

    def _read_of(self, local: _Local, name: str, region: Region, into: torch.Tensor) -> int:
        """Copies what that rank has of the region; returns how many elements."""
        common = tuple(_intersection(a, b) for a, b in zip(region, local.owned, strict=True))
        count = size_of(common)
        if count == 0:
            return 0
        read = torch.empty(_extents(common), dtype=into.dtype)
        source = tuple(_within(a, b) for a, b in zip(common, local.owned, strict=True))
        bytes = count * read.element_size()
        local.checkpoint.read_slice(name, source, read.data_ptr(), bytes)
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
