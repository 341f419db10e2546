"""simulate(): its arguments and errors, and that a plan moves what its layouts mean."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy
import pytest
import tessera
import torch
from dtypes import DTYPES, NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from tessera import InvalidArgumentError, Layout, Mesh, Partial, plan, simulate


def noise(name: str, count: int) -> bytes:
    """`count` elements with random bits that the type may hold."""
    bits = numpy.random.default_rng(7).integers(0, 256, tessera._core.bits_of(name) * count // 8, dtype=numpy.uint8)
    return bytes((bits & 1 if name == "bool" else bits).tobytes())


def torch_from(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def torch_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


@pytest.fixture
def rows_to_columns() -> tessera.Plan:
    """Ranks 0 and 1 have two rows each, ranks 1 to 3 want two columns each."""
    return plan((4, 6), "f32", "2:S0", "3@1-3:S1")


@pytest.mark.parametrize(("name", "numpy_type", "torch_type"), DTYPES, ids=NAMES)
def test_every_dtype_moves_bit_for_bit(name: str, numpy_type: Any, torch_type: torch.dtype) -> None:
    """8x12 elements, from rows to columns, which are cut at even places."""
    made = plan((8, 12), name, "2:S0", "3@2-4:S1")
    data = noise(name, 96)
    width = 6 if name == "f4" else 12  # torch counts pairs
    whole = torch_from(data, torch_type, (8, width))
    moved = simulate(made, {0: whole[:4], 1: whole[4:]})
    assert sorted(moved) == [2, 3, 4]
    for place, rank in enumerate(moved):
        assert isinstance(moved[rank], torch.Tensor)
        assert moved[rank].dtype == torch_type
        assert moved[rank].shape == (8, width // 3)
        columns = slice(place * width // 3, (place + 1) * width // 3)
        assert torch_bytes(moved[rank]) == torch_bytes(
            whole.view(torch.uint8).reshape(8, -1)[
                :, columns.start * torch_type.itemsize : columns.stop * torch_type.itemsize
            ]
        )
    if numpy_type is None:
        return
    array = numpy.frombuffer(data, dtype=numpy_type).reshape(8, 12)
    arrays = simulate(made, {0: array[:4], 1: array[4:]})
    for place, rank in enumerate(arrays):
        assert isinstance(arrays[rank], numpy.ndarray)
        assert arrays[rank].dtype == numpy_type
        assert arrays[rank].tobytes() == array[:, 4 * place : 4 * place + 4].tobytes()
        assert arrays[rank].flags.writeable
        assert arrays[rank].flags.c_contiguous


def test_arrays_need_not_be_contiguous() -> None:
    made = plan((4, 6), "i32", "2:S0", "1@2:R")
    whole = numpy.arange(24, dtype=numpy.int32).reshape(4, 6)
    padded = numpy.zeros((8, 7), numpy.int32)
    padded[::2, :6] = whole
    (moved,) = simulate(made, {0: padded[:4:2, :6], 1: whole[2:].T.copy().T}).values()
    assert numpy.array_equal(moved, whole)
    turned = torch.from_numpy(whole.T.copy()).t()
    assert not turned.is_contiguous()
    (moved,) = simulate(made, {0: turned[:2], 1: turned[2:].requires_grad_(False)}).values()
    assert torch.equal(moved, torch.from_numpy(whole))


def test_scalars_and_empty_tensors() -> None:
    assert simulate(plan((), "f32", "1:R", "2@1-2:R"), {0: numpy.float32(2.5)}) == {1: 2.5, 2: 2.5}
    empty = simulate(plan((0, 3), "bf16", "2:S0", "2:S1"), {rank: torch.zeros(0, 3).bfloat16() for rank in (0, 1)})
    assert [tuple(empty[rank].shape) for rank in (0, 1)] == [(0, 2), (0, 1)]
    short = simulate(plan((2,), "i64", "1:R", "3@1-3:S0"), {0: torch.tensor([5, 6])})
    assert [short[rank].tolist() for rank in (1, 2, 3)] == [[5], [6], []]


@pytest.mark.parametrize("target", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("source", ["f64", "f32", "f16", "bf16"])
def test_casts_are_torchs(source: str, target: str) -> None:
    table = {name: dtype for name, _, dtype in DTYPES}
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, generator=generator, dtype=torch.float64)
    values *= torch.randint(-40, 40, (64,), generator=generator).double().exp2()
    whole = torch.cat([values, torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 65519.9, 65520.0])]).to(
        table[source]
    )
    made = plan(whole.shape, source, "1:R", "2@1-2:S0")
    for dtype in (target, table[target]):
        moved = simulate(made, {0: whole}, dtype)
        assert moved[1].dtype == table[target]
        assert torch_bytes(torch.cat([moved[1], moved[2]])) == torch_bytes(whole.to(table[target]))


def test_casts_to_8_bit_floats_saturate() -> None:
    (moved,) = simulate(plan((4,), "f32", "1:R", "1:R"), {0: torch.tensor([1e9, -1e9, 0.3, 447.0])}, "f8_e4m3").values()
    assert moved.float().tolist() == [448.0, -448.0, 0.3125, 448.0]


def test_partial_floats_are_added_in_rank_order_and_rounded_once() -> None:
    """Of bf16 256, 1, 1 and 1 is 256 if each step is rounded."""
    made = plan((1,), "bf16", (Mesh((4,), ranks=[3, 1, 2, 0]), [Partial()]), "1@4:R")
    terms = {0: 256.0, 1: 1.0, 2: 1.0, 3: 1.0}
    moved = simulate(made, {rank: torch.tensor([value]).bfloat16() for rank, value in terms.items()})
    assert moved[4].tolist() == [260.0]  # 259 is between 258 and 260, whose last bit is even
    order = {0: 2.0**24, 1: 1.0, 2: -(2.0**24), 3: 1.0}  # by rank 1, by place in the mesh 2
    made = plan((1,), "f32", (Mesh((4,), ranks=[3, 1, 2, 0]), [Partial()]), "1@4:R")
    moved = simulate(made, {rank: numpy.array([value], numpy.float32) for rank, value in order.items()})
    assert moved[4].tolist() == [1.0]


@pytest.mark.parametrize(
    ("op", "dtype", "terms", "result"),
    [
        ("sum", numpy.int8, (100, 100, 1), -55),
        ("sum", numpy.uint64, (2**63, 2**63, 5), 5),
        ("product", numpy.int16, (-3, 4, 5), -60),
        ("min", numpy.uint8, (7, 3, 200), 3),
        ("max", numpy.int64, (-7, -3, -5), -3),
        ("avg", numpy.float32, (1.0, 1.0, 2.0), numpy.float32(4) / numpy.float32(3)),
        ("avg", numpy.float16, (60000.0, 60000.0, 60000.0), 60000.0),  # the sum would not fit
        ("max", numpy.float64, (1.0, 2.0, -1.0), 2.0),
        ("product", numpy.complex64, (1j, 1j, 2 + 1j), -2 - 1j),
    ],
)
def test_reductions(op: str, dtype: Any, terms: tuple[Any, ...], result: Any) -> None:
    made = plan((2,), dtype, (Mesh((3,)), [Partial(op)]), "1@1:R")
    moved = simulate(made, {rank: numpy.full(2, value, dtype) for rank, value in enumerate(terms)})
    assert moved[1].tolist() == [dtype(result)] * 2


def test_a_reduction_is_rounded_before_it_is_cast() -> None:
    terms = {0: torch.tensor([1.0]).bfloat16(), 1: torch.tensor([2.0**-9]).bfloat16()}
    moved = simulate(plan((1,), "bf16", "2:Psum", "1@2:R"), terms, torch.float32)
    assert moved[2].tolist() == [1.0]


def _rows(**changed: Any) -> dict[int, Any]:
    arrays = {rank: numpy.ones((2, 6), numpy.float32) for rank in (0, 1)}
    return {**arrays, 1: changed["second"]} if "second" in changed else arrays


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (numpy.ones((2, 5), numpy.float32), "rank 1: its array has shape (2, 5); 2:S0 gives it (2, 6)"),
        (numpy.ones(12, numpy.float32), "rank 1: its array has shape (12,)"),
        (numpy.ones((2, 6)), "rank 1: its array is float64, the plan moves f32"),
        (torch.ones(2, 6, dtype=torch.int32), "rank 1: its array is torch.int32, the plan moves f32"),
        (numpy.ones((2, 6), ">f4"), "rank 1: its elements are not in this machine's byte order (>f4)"),
        ([[1.0] * 6] * 2, "rank 1: a builtins.list is not an array"),
        (None, "rank 1: a builtins.NoneType is not an array"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(rows_to_columns: tessera.Plan, second: Any, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(said)):
        simulate(rows_to_columns, _rows(second=second))


def test_missing_and_further_arrays_are_refused(rows_to_columns: tessera.Plan) -> None:
    with pytest.raises(InvalidArgumentError, match="no array for source rank 1"):
        simulate(rows_to_columns, {0: numpy.ones((2, 6), numpy.float32)})
    with pytest.raises(InvalidArgumentError, match="rank 2: its array has shape"):
        simulate(rows_to_columns, {**_rows(), 2: numpy.ones((2, 6), numpy.float32)})


def test_casts_that_are_none_are_refused(rows_to_columns: tessera.Plan) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot cast f32 to i32"):
        simulate(rows_to_columns, _rows(), "i32")


def test_views_whose_memory_holds_other_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    (moved,) = simulate(plan((2,), "c64", "1:R", "1:R"), {0: value.conj()}).values()
    assert moved.tolist() == [1 - 2j, 3 + 4j]
    (moved,) = simulate(plan((2,), "f32", "1:R", "1:R"), {0: value.conj().imag}).values()
    assert moved.tolist() == [-2.0, 4.0]


def test_what_comes_is_a_copy() -> None:
    array = numpy.zeros(4, numpy.float32)
    moved = simulate(plan((4,), "f32", "1:R", "1:R"), {0: array})
    moved[0][:] = 1
    assert not array.any()


# --- any plan

SIZES = st.sampled_from([0, 1, 2, 3, 5, 8, 9, 12])


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    axes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks = draw(st.permutations(range(math.prod(axes) + 2)))[: math.prod(axes)]
    placements: list[str] = []
    cut: set[int] = set()
    for size in axes:
        kind = draw(st.sampled_from(["R", "S", "strided", "ragged"] if shape else ["R"]))
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
        if kind == "ragged" and dim not in cut:  # it must be the outermost on its dim
            inner = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=size - 1, max_size=size - 1)))
            placements.append(f"G{dim}[{';'.join(map(str, [0, *inner, shape[dim]]))}]")
        elif kind == "strided":
            placements.append(f"S{dim}*{draw(st.integers(1, 4))}")
        else:
            placements.append("R" if kind == "R" else f"S{dim}")
        if kind != "R":
            cut.add(dim)
    return Layout(f"{','.join(map(str, axes))}@{','.join(map(str, ranks))}:{','.join(placements)}")


@st.composite
def plans(draw: st.DrawFn) -> tessera.Plan:
    shape = tuple(draw(st.lists(SIZES, max_size=4)))
    return plan(shape, draw(st.sampled_from(["i32", "f64", "u8"])), draw(layouts(shape)), draw(layouts(shape)))


def sliced(whole: Any, layout: Layout, rank: int) -> Any:
    """The part of `whole` that `rank` owns, computed from the layout's intervals only."""
    owned = layout.owned(whole.shape, rank)
    if owned is None:
        return numpy.zeros(layout.local_shape(whole.shape, rank), whole.dtype)
    if not owned:
        return whole
    return whole[numpy.ix_(*[list(itertools.chain(*(range(*interval) for interval in dim))) for dim in owned])]


@settings(max_examples=300, deadline=None)
@given(plans())
def test_any_plan_moves_what_its_layouts_mean(made: tessera.Plan) -> None:
    dtype = tessera._tensors.foreign.numpy_dtype(made.dtype)
    whole = numpy.arange(math.prod(made.shape)).reshape(made.shape).astype(dtype)
    moved = simulate(made, {rank: sliced(whole, made.src, rank) for rank in made.src.mesh.ranks})
    assert sorted(moved) == sorted(made.dst.mesh.ranks)
    for rank, array in moved.items():
        wanted = sliced(whole, made.dst, rank)
        assert array.shape == wanted.shape
        assert array.tobytes() == wanted.tobytes()
    assert made.stats["bytes_delivered"] == sum(array.nbytes for array in moved.values())
    assert made.stats["bytes_moved"] == made.stats["bytes_lower_bound"]
    assert sum(sent for _, sent in made.egress()) <= made.stats["bytes_moved"]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(0, 9), st.sampled_from(["sum", "min", "max"]), st.data())
def test_any_reduction_is_numpys(terms: int, size: int, op: str, data: st.DataObject) -> None:
    made = plan((size,), "i64", f"{terms},2:P{op},S0", "3@1-3:S0")
    values = st.lists(st.integers(-9, 9), min_size=size, max_size=size)
    given_terms = [numpy.array(data.draw(values), numpy.int64) for _ in range(terms)]
    split = -(-size // 2)
    arrays = {
        2 * term + half: array[half * split : split * (half + 1)]
        for term, array in enumerate(given_terms)
        for half in (0, 1)
    }
    moved = simulate(made, arrays)
    fold = {"sum": numpy.add, "min": numpy.minimum, "max": numpy.maximum}[op]
    assert numpy.array_equal(numpy.concatenate([moved[rank] for rank in (1, 2, 3)]), fold.reduce(given_terms))
