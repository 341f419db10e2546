"""Tensors that torch itself distributed, over real gloo processes, and what Tessera says of them.

A module-scoped fixture runs a function on all ranks once (`launch`); the function answers `record()` for every tensor;
`check()` then compares with the whole tensor, in the process of the test.
"""

from __future__ import annotations

import ctypes
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import tessera
import torch
import torch.distributed
from jobs import Jobs, Rank
from tessera._tensors.location import Location, Source
from tessera._tensors.tensors import source_of

TIMEOUT = 400  # seconds: six processes that import torch, on a machine that is busy with other things


@dataclass
class Held:
    """One rank's part of a tensor, as Tessera sees it."""

    rank: int | None
    layout: str
    placements: str  # torch's
    shape: tuple[int, ...]  # global
    dtype: str
    elements: numpy.ndarray[Any, Any]  # unsigned integers, read where the Location points
    whole: numpy.ndarray[Any, Any]  # likewise, for the whole tensor


def launch(function: Callable[[int], Any], world: int) -> list[Any]:
    """What function(rank) returns on each rank of a gloo group."""
    with (
        tempfile.TemporaryDirectory(prefix="tessera-") as folder,
        Jobs(pathlib.Path(folder), TIMEOUT, forked=True) as jobs,
    ):
        jobs.start("torch", _in_group, function, world=world)
        return jobs.results()["torch"]


def _in_group(rank: Rank, function: Callable[[int], Any]) -> Any:
    join_group(rank)
    try:
        return function(rank.rank)
    finally:
        torch.distributed.destroy_process_group()


def join_group(rank: Rank) -> None:
    """Makes the process a rank of its job's gloo group."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(rank.folder / f"{rank.job}.gloo"), rank.world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world)


def record(tensor: torch.Tensor, whole: torch.Tensor) -> Held:
    """REQUIRES: `whole` is what the DTensor `tensor` is a part of."""
    return _held(source_of("w", tensor), tensor, whole)


def _held(source: Source, tensor: Any, whole: torch.Tensor) -> Held:
    at = source.locate()
    assert at.layout is not None
    assert at.global_shape is not None
    return Held(at.rank, str(at.layout), str(tensor.placements), at.global_shape, at.dtype, _read(at), _as_bits(whole))


def _read(at: Location) -> numpy.ndarray[Any, Any]:
    """A copy of the elements from memory, as the core would see them."""
    size = tessera._core.bits_of(at.dtype) // 8
    if not at.address:
        return numpy.empty(at.shape, f"u{size}")
    last = sum((extent - 1) * stride for extent, stride in zip(at.shape, at.strides, strict=True))
    block = (ctypes.c_char * ((last + 1) * size)).from_address(at.address)
    flat = numpy.frombuffer(block, f"u{size}")
    strides = [stride * size for stride in at.strides]
    return numpy.lib.stride_tricks.as_strided(flat, at.shape, strides).copy()


def _as_bits(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    size = tensor.element_size()
    flat = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return flat.view(f"u{size}").reshape(tuple(tensor.shape)).copy()


def check(held: Sequence[Held | None], *, holders: int | None = None) -> None:
    """That every rank holds exactly the elements that its layout says, and all ranks all of them.

    held: by rank; None for one without the tensor. holders: how many ranks hold each element, if it is the same number.
    """
    counts: numpy.ndarray[Any, Any] | None = None
    for rank, mine in enumerate(held):
        if mine is None:
            continue
        layout = tessera.Layout(mine.layout)
        assert mine.rank == (rank if rank in layout.mesh else -1)
        if rank not in layout.mesh:
            assert mine.elements.size == 0
            continue
        where = f"rank {rank}, {mine.placements} as {mine.layout} of {mine.shape}"
        assert layout.local_shape(mine.shape, rank) == mine.elements.shape, where
        owned = layout.owned(mine.shape, rank)
        counts = numpy.zeros(mine.shape, int) if counts is None else counts
        if owned is None:
            assert mine.elements.size == 0, where
            continue
        picked = numpy.ix_(*([i for begin, end in dim for i in range(begin, end)] for dim in owned))
        numpy.testing.assert_array_equal(mine.elements, mine.whole[picked], where, strict=True)
        counts[picked] += 1
    assert counts is not None
    assert (counts > 0).all() if holders is None else (counts == holders).all()


def by_name(results: Sequence[Mapping[str, Held]], name: str) -> list[Held | None]:
    return [result.get(name) for result in results]
