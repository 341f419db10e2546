"""DTensors of every kind: uneven, empty, strided, partial, out of order, of every dtype, on meshes of all sorts."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tessera
import torch
import torch.distributed._functional_collectives as collectives
from tessera._tensors.tensors import source_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch_ranks import Held, by_name, check, launch, record

WORLD = 4
R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = [(8, 4), (7, 5), (3, 2), (1, 6), (0, 4), (5, 1)]
PLACED = [(R, R), (R, S0), (S0, R), (S0, S0), (S1, S0), (S0, S1), (S1, R), (_StridedShard(0, split_factor=2), S0)]
# Ways in which torch may cut dims by axes in another order than left to right: mesh, placements, order of axes by dim.
ORDERS = [
    ((2, 2), (S0, S0), {0: (1, 0)}),
    ((2, 2), (S1, S1), {1: (1, 0)}),
    ((2, 1, 2), (S0, S0, S0), {0: (2, 0, 1)}),
    ((2, 1, 2), (S0, S1, S0), {0: (2, 0), 1: (1,)}),
    ((2, 2, 1), (S0, R, S0), {0: (2, 0)}),
    ((1, 2, 2), (R, S1, S1), {1: (2, 1)}),
]
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
]


def numbered(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every byte its own, as far as bytes go."""
    count = torch.Size(shape).numel() * dtype.itemsize
    size = 2 if dtype == torch.bool else 251
    return (torch.arange(count) % size).to(torch.uint8).view(dtype).reshape(tuple(shape))


def distribute(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def reorder(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], order: dict[int, Any]) -> DTensor:
    """The DTensor that torch makes of `whole` when it cuts dims by axes in that order."""
    source = distribute(whole, mesh, [R] * mesh.ndim)
    entries = tuple(ShardOrderEntry(dim, axes) for dim, axes in sorted(order.items()))
    spec = DTensorSpec(mesh, tuple(placements), source._spec.tensor_meta, shard_order=entries)
    local = redistribute_local_tensor(source.to_local(), source._spec, spec)
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    made._spec = spec
    assert torch.equal(made.redistribute(placements=[R] * mesh.ndim).to_local(), whole)  # torch reads it so, too
    return made


# --- on the ranks


def everything(rank: int) -> dict[str, Any]:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {}
    for shape, placements in itertools.product(SHAPES, PLACED):
        found[f"{shape} {placements}"] = record(distribute(numbered(shape), square, placements), numbered(shape))
    for sizes, placements, order in ORDERS:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y", "z")[: len(sizes)])
        for shape in SHAPES:
            whole = numbered(shape)
            found[f"{shape} {placements} {order}"] = record(reorder(whole, mesh, placements, order), whole)
    found.update(dtypes(square))
    found.update(partials(square, rank))
    found.update(meshes())
    found["0-d"] = record(distribute(torch.tensor(3.5), square, [R, R]), torch.tensor(3.5))
    found["transposed"] = record(*transposed(square, rank))
    found["waiting"] = waiting(square, rank)
    found["masked"] = refusal_of_embedding(square)
    return found


def dtypes(mesh: DeviceMesh) -> Iterator[tuple[str, Held]]:
    for dtype in DTYPES:
        whole = numbered((7, 4), dtype)
        bits = distribute(whole.view(torch.uint8), mesh, (R, S0)).to_local()
        made = DTensor.from_local(
            bits.view(dtype), mesh, (R, S0), run_check=False, shape=whole.shape, stride=whole.stride()
        )
        yield str(dtype), record(made, whole)


def partials(mesh: DeviceMesh, rank: int) -> Iterator[tuple[str, Held]]:
    for op in ("sum", "avg", "min", "max", "product"):
        term = numbered((5, 3)) * (rank + 1)
        rows = torch.chunk(term, 2)[mesh.get_local_rank("tp")].clone()
        made = DTensor.from_local(rows, mesh, (Partial(op), S0), run_check=False, shape=(5, 3), stride=(3, 1))
        yield f"partial {op}", record(made, term)


def meshes() -> Iterator[tuple[str, Held]]:
    whole = numbered((5, 3))
    for name, ranks, placements in (
        ("out of order", [[3, 1], [0, 2]], (S0, S1)),
        ("some ranks", [1, 3], (S0,)),
        ("one rank", [2], (S0,)),
    ):
        mesh = DeviceMesh("cpu", ranks)
        yield name, record(distribute(whole, mesh, placements), whole)


def transposed(mesh: DeviceMesh, rank: int) -> tuple[DTensor, torch.Tensor]:
    whole = numbered((6, 5))
    rows = torch.chunk(whole, 2)[mesh.get_local_rank("dp")]
    local = rows.t().contiguous().t()
    assert not local.is_contiguous()
    return DTensor.from_local(local, mesh, (S0, R), run_check=False, shape=whole.shape, stride=whole.stride()), whole


def waiting(mesh: DeviceMesh, rank: int) -> tuple[str, list[float], str, Held]:
    """Results of collectives that may still be under way: a plain one, and a DTensor's."""
    pending = collectives.all_reduce(torch.full((3,), float(rank)), "sum", (mesh, 0))
    kind = type(pending).__name__
    at = source_of("pending", pending).locate()
    moved = distribute(numbered((7, 2)), mesh, (R, S0)).redistribute(placements=(R, R), async_op=True)
    assert type(moved._local_tensor).__name__ == "AsyncCollectiveTensor"
    values = torch.frombuffer(bytearray(ctypes.string_at(at.address, 12)), dtype=torch.float32).tolist()
    return kind, values, at.dtype, record(moved, numbered((7, 2)))


def refusal_of_embedding(mesh: DeviceMesh) -> str:
    """Of what an embedding sharded by rows gives: partial in a way of its own."""
    weight = distribute(numbered((8, 4)), mesh, (R, S0))
    tokens = distribute(torch.tensor([1, 7]), mesh, (R, R))
    with pytest.raises(tessera.InvalidArgumentError) as caught:
        source_of("out", torch.nn.functional.embedding(tokens, weight)).locate()
    return str(caught.value)


# --- in the test


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return launch(everything, WORLD)


@pytest.mark.parametrize(("shape", "placements"), list(itertools.product(SHAPES, PLACED)))
def test_what_torch_distributes(shape: tuple[int, ...], placements: Any, results: list[dict[str, Any]]) -> None:
    held = by_name(results, f"{shape} {placements}")
    check(held)
    assert all(each is not None and each.shape == shape for each in held)


@pytest.mark.parametrize(("sizes", "placements", "order"), ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_axes_that_cut_a_dim_in_another_order(
    shape: tuple[int, ...], sizes: Any, placements: Any, order: Any, results: list[dict[str, Any]]
) -> None:
    held = by_name(results, f"{shape} {placements} {order}")
    check(held)
    layouts = {tessera.Layout(each.layout) for each in held if each is not None}
    assert len(layouts) == 1
    (layout,) = layouts
    assert sorted(layout.mesh.names) == sorted(("x", "y", "z")[: len(sizes)])
    assert layout.mesh.names != ("x", "y", "z")[: len(sizes)]  # they come along as the axes are put in order


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, results: list[dict[str, Any]]) -> None:
    held = by_name(results, str(dtype))
    check(held, holders=2)
    assert {each.dtype for each in held if each is not None} == {tessera._core.dtype(dtype)}


def test_no_dtype_is_left_out() -> None:
    assert {tessera._core.dtype(dtype) for dtype in DTYPES} | {"f4"} == set(tessera._core.dtypes())


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
def test_partial(op: str, results: list[dict[str, Any]]) -> None:
    held = by_name(results, f"partial {op}")
    check(held)
    assert {each.layout for each in held if each is not None} == {f"dp=2,tp=2:P{op},S0"}


@pytest.mark.parametrize(
    ("name", "layout"), [("out of order", "2,2@3,1,0,2:S0,S1"), ("some ranks", "2@1,3:S0"), ("one rank", "1@2:S0")]
)
def test_meshes(name: str, layout: str, results: list[dict[str, Any]]) -> None:
    held = by_name(results, name)
    check(held, holders=1)
    assert {each.layout for each in held if each is not None} == {layout}


@pytest.mark.parametrize("name", ["0-d", "transposed"])
def test_shapes_of_memory(name: str, results: list[dict[str, Any]]) -> None:
    check(by_name(results, name))


def test_results_of_collectives_are_waited_for(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        kind, values, dtype, _ = result["waiting"]
        assert (kind, dtype) == ("AsyncCollectiveTensor", "f32")
        assert values == [[2.0] * 3, [4.0] * 3][rank % 2]  # ranks 0 and 2, 1 and 3
    check([result["waiting"][3] for result in results], holders=WORLD)


def test_a_partial_of_another_kind_is_refused_by_name(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["masked"].startswith("tensor out: placement")
        assert "_MaskPartial" in result["masked"]
        assert "Replicate, Shard, StridedShard" in result["masked"]
