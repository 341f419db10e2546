"""Every way in which torch cuts rows by several mesh axes, on every rank of every small mesh, against torch itself.

A fake process group makes this process any rank of any world: to cut a tensor needs no communication. A tensor's rows
hold their own numbers, so its local tensor says which rows the rank has. The batch's registrations of all ranks then
agree, as they do over the store, and their layouts must name those rows.

python -m pytest -m slow python/tests/torch_tensors/test_torch_strided.py   # all meshes of up to 4 axes and 12 ranks
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import tessera
import torch
import torch.distributed
from tessera._bus.registration import Registration
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

R, S0 = Replicate(), Shard(0)
MESHES = itertools.count()
# Torch 2.11 and later. (2.6 takes even rows only: test_torch_parallel.py)
ORDERED = hasattr(DTensorSpec, "shard_order")

Sizes = tuple[int, ...]
Tensors = dict[str, DTensor]
Way = Callable[[DeviceMesh, Sequence[int]], Tensors]


def meshes(ranks: int) -> list[Sizes]:
    """All of one to four axes."""
    return [
        sizes
        for count in range(1, 5)
        for sizes in itertools.product(range(1, ranks + 1), repeat=count)
        if math.prod(sizes) == ranks
    ]


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


def numbered(rows: int) -> torch.Tensor:
    return torch.arange(float(rows)).reshape(rows, 1)


def distribute(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)


def strided(mesh: DeviceMesh, order: Sequence[int]) -> list[Any]:
    """The placements that say that these axes of the mesh cut dim 0, in this order."""
    placements: list[Any] = [R] * mesh.ndim
    for place, axis in enumerate(order):
        factor = math.prod(mesh.size(before) for before in order[:place] if before > axis)
        placements[axis] = _StridedShard(0, split_factor=factor) if factor > 1 else S0
    return placements


def choices(mesh: DeviceMesh, axes: Iterable[int], placements: Sequence[Any]) -> Iterator[list[Any]]:
    """All placements over these axes; those of size 1, which cut nothing, have all R or all S0."""
    trivial = [axis for axis in axes if mesh.size(axis) == 1]
    others = [axis for axis in axes if mesh.size(axis) > 1]
    for choice in itertools.product(placements, repeat=len(others)):
        for alone in (R, S0) if trivial else (R,):
            placed = [R] * mesh.ndim
            for axis in trivial:
                placed[axis] = alone
            for axis, placement in zip(others, choice, strict=True):
                placed[axis] = placement
            yield placed


# --- the ways


def sharded_by_fsdp(mesh: DeviceMesh, rows: Sequence[int]) -> Tensors:
    """FSDP2 and HSDP over tensor parallelism by one axis or two."""
    made: Tensors = {}
    for data in (1, 2):
        names, others = names_of(mesh)[:data], names_of(mesh)[data:]
        if not 1 <= len(others) <= 2:
            continue
        for placements in itertools.product((R, S0), repeat=len(others)):
            module = module_of(mesh[others], placements, rows)
            fully_shard(module, mesh=mesh[names])
            made |= {f"{data} axes of data, {placements}: {name}": made for name, made in module.named_parameters()}
    return made


def sharded_in_one_mesh(mesh: DeviceMesh, rows: Sequence[int]) -> Tensors:
    """FSDP2 and HSDP by any axes of the mesh whose other axes cut the parameters already."""
    names, made = names_of(mesh), {}
    cutting = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    for shard, replicate in itertools.product(cutting, [-1, *cutting]):
        if shard == replicate:
            continue
        others = [axis for axis in range(mesh.ndim) if axis not in (shard, replicate)]
        for placements in choices(mesh, others, (R, S0)):
            module = module_of(mesh, placements, rows)
            dims = fsdp.DataParallelMeshDims(names[shard], names[replicate] if replicate >= 0 else None)
            fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
            how = f"axis {shard} and {replicate}, {placements}"
            made |= {f"{how}: {name}": made for name, made in module.named_parameters()}
    return made


def module_of(mesh: DeviceMesh, placements: Sequence[Any], rows: Sequence[int]) -> torch.nn.Module:
    module = torch.nn.Module()
    for size in rows:
        tensor = distribute(numbered(size), mesh, placements)
        module.register_parameter(f"{size} rows", torch.nn.Parameter(tensor))
    return module


def orders(mesh: DeviceMesh) -> Iterator[tuple[int, ...]]:
    """All orders of some of the axes; those of size 1, which cut nothing, come first or not at all."""
    trivial = tuple(axis for axis in range(mesh.ndim) if mesh.size(axis) == 1)
    others = [axis for axis in range(mesh.ndim) if axis not in trivial]
    for count in range(len(others) + 1):
        for order in itertools.permutations(others, count):
            yield from {order, trivial + order}


def in_order(mesh: DeviceMesh, rows: Sequence[int]) -> Tensors:
    """Axes in any order, cut in that order by torch's chunks, which is what redistribute() does."""
    made: Tensors = {}
    for size, order in itertools.product(rows, orders(mesh)):
        local = numbered(size)
        for axis in order:
            local = Shard(0)._split_tensor(local, mesh.size(axis), with_padding=False)[0][mesh.get_local_rank(axis)]
        made[f"{order}: {size} rows"] = DTensor.from_local(
            local.clone(), mesh, strided(mesh, order), run_check=False, shape=(size, 1), stride=(1, 1)
        )
    return made


def redistributed(mesh: DeviceMesh, rows: Sequence[int]) -> Tensors:
    """Likewise, by redistribute() itself, which takes long to plan."""
    made: Tensors = {}
    for size in rows:
        whole = distribute(numbered(size), mesh, [R] * mesh.ndim)
        for order in orders(mesh):
            made[f"{order}: {size} rows"] = whole.redistribute(placements=strided(mesh, order))
    return made


def distributed(mesh: DeviceMesh, rows: Sequence[int]) -> Tensors:
    """The same placements, by distribute_tensor(): it takes them one by one, and cuts uneven rows otherwise."""
    return {
        f"{order}: {size} rows": distribute(numbered(size), mesh, strided(mesh, order))
        for size in rows
        for order in orders(mesh)
    }


def not_an_order(mesh: DeviceMesh, rows: Sequence[int]) -> Tensors:
    """_StridedShards that stand for themselves, which is how torch describes views: with any factor."""
    made: Tensors = {}
    kinds = [S0, _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]
    for size, placements in itertools.product(rows, choices(mesh, range(mesh.ndim), kinds)):
        tensor = distribute(numbered(size), mesh, placements)
        tensor._spec.use_strided_shard_as_shard_order = False
        tensor._spec.shard_order = tensor._spec.compute_default_shard_order(tensor._spec.placements)
        made[f"{placements}: {size} rows"] = tensor
    return made


# --- the search


class OfRank:
    """The tensors of a rank, and which rows they hold."""

    def __init__(self, rank: int, tensors: Tensors) -> None:
        self.rank = rank
        self.rows = {name: tensor._local_tensor.flatten().int().tolist() for name, tensor in tensors.items()}
        self.registration = Registration.collect(
            tensors, keep=lambda name: True, rank=rank, fallback=None, missing_ok=False
        )
        self.told = self.registration.to_gather()

    def read(self, told: Sequence[str]) -> dict[str, tuple[tessera.Layout, list[int]]]:
        """The layout of each tensor, and the rows that it gives this rank."""
        self.registration.agree(told)
        found = {}
        for name, piece in self.registration._pieces.items():
            layout = piece.location.layout
            assert layout is not None
            owned = layout.owned(piece.shape, self.rank)
            rows = [] if owned is None else [row for begin, end in owned[0] for row in range(begin, end)]
            found[name] = layout, rows
        return found


def ranks_of(sizes: Sizes, way: Way, rows: Sequence[int]) -> list[OfRank]:
    world = math.prod(sizes)
    ranks = []
    for rank in range(world):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            # Torch's caches take meshes of equal ranks and names for one: one rank's for another's. A layout has no
            # names with spaces.
            made = next(MESHES)
            names = tuple(f"{axis} of mesh {made}" for axis in range(len(sizes)))
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            with torch.no_grad():
                ranks.append(OfRank(rank, way(mesh, rows)))
        finally:
            torch.distributed.destroy_process_group()
    return ranks


def misread(ranks: Sequence[OfRank]) -> dict[str, str]:
    """The tensors of which a rank's layout names other rows than it holds."""
    told = [rank.told for rank in ranks]
    wrong: dict[str, str] = {}
    layouts: dict[str, set[tessera.Layout]] = {}
    for rank in ranks:
        for name, (layout, rows) in rank.read(told).items():
            layouts.setdefault(name, set()).add(layout)
            if rows != rank.rows[name]:
                wrong.setdefault(name, f"{name}: rank {rank.rank} holds {rank.rows[name]}, {layout} gives it {rows}")
    assert all(len(of_tensor) == 1 for of_tensor in layouts.values())
    return wrong


def search(sizes: Sizes, rows: Sequence[int]) -> list[str]:
    """Everything that is misread."""
    ways: list[Way] = [sharded_by_fsdp, in_order, not_an_order]
    if hasattr(fsdp, "DataParallelMeshDims"):  # torch 2.12 and later
        ways.append(sharded_in_one_mesh)
    wrong: list[str] = []
    ranks = {way: ranks_of(sizes, way, rows) for way in [*ways, distributed]}
    for way in ways:
        wrong += [f"{way.__name__} over {sizes}: {text}" for text in misread(ranks[way]).values()]
    for name, text in misread(ranks[distributed]).items():
        pairs = zip(ranks[distributed], ranks[in_order], strict=True)
        if any(len(placed.rows[name]) != len(ordered.rows[name]) for placed, ordered in pairs):
            wrong.append(f"distributed over {sizes}: {text}")
        # Otherwise nothing tells the two apart, and torch's own full_tensor() takes it as cut in order.
    return wrong


# Nine rows over (2, 2, 3) have equal local shapes, and other rows, by either reading.
SAMPLE = [((2,), [1, 2, 5]), ((2, 3), [1, 4, 6, 7]), ((2, 2, 3), [5, 9, 13]), ((1, 2, 2, 3), [9]), ((2, 2, 1, 2), [11])]

pytestmark = pytest.mark.skipif(not ORDERED, reason="this torch cuts even rows only")


@pytest.mark.parametrize(("sizes", "rows"), SAMPLE)
def test_rows_of_a_sample(sizes: Sizes, rows: list[int]) -> None:
    assert search(sizes, rows) == []


def rows_for(sizes: Sizes) -> list[int]:
    """All up to two for each rank, and some more; a few for a mesh with axes that cut nothing."""
    ranks = math.prod(sizes)
    return [*range(2 * ranks + 3)] if min(sizes) > 1 else [1, max(ranks - 3, 2), ranks + 1, ranks + 3]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 13))
def test_rows_of_all_meshes(ranks: int) -> None:
    assert [text for sizes in meshes(ranks) for text in search(sizes, rows_for(sizes))] == []


@pytest.mark.parametrize("sizes", [(3, 2), (2, 2, 2)])
def test_redistribute_cuts_in_order(sizes: Sizes) -> None:
    rows = [1, 4, 9, 12, 13]
    for ordered, moved in zip(ranks_of(sizes, in_order, rows), ranks_of(sizes, redistributed, rows), strict=True):
        assert moved.rows == ordered.rows
