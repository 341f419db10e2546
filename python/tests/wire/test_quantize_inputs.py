"""Inputs of tessera.quantize() and tessera.amax(): strides, stacks, amaxes, histories, seeds; and errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import tessera
from tessera import _core

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")
FORMATS = _core.formats()


def numbers(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def contents(q: tessera.QuantizedTensor) -> list[bytes]:
    found = [getattr(q, name) for name in q.planes]
    arrays = [array for plane in found for array in (plane.codes, plane.scales, plane.amax) if array is not None]
    return [
        (a.view(torch.uint8).numpy() if isinstance(a, torch.Tensor) and a.ndim else np.asarray(a)).tobytes()
        for a in arrays
    ]


def unaligned(array: Any) -> Any:
    room = np.zeros(array.nbytes + 1, np.uint8)
    made = room[1:].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


# --- memory layouts

LAID_OUT: dict[str, Callable[[Any], Any]] = {
    "packed": np.ascontiguousarray,
    "columns": np.asfortranarray,
    "rows of a wider one": lambda x: np.concatenate([x, x], -1)[..., : x.shape[-1]],
    "every second column": lambda x: x.repeat(2, -1)[..., ::2],
    "every second row": lambda x: x.repeat(2, -2)[..., ::2, :],
    "backwards": lambda x: x[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
    "the stack transposed": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    "the stack backwards": lambda x: x[::-1].copy()[::-1],
    "big-endian": lambda x: x.astype(">f4"),
    "unaligned": unaligned,
    "a field of records": lambda x: np.rec.fromarrays([x, x.astype("i1")], names="a,b")["a"],
    "read-only": lambda x: np.broadcast_to(x, x.shape),
}


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", LAID_OUT)
def test_arrays_of_numpy_lie_as_they_like(layout: str, format: str) -> None:
    for shape in ((3, 34, 66), (34, 66)):
        x = numbers(*shape)
        laid_out = LAID_OUT[layout](x)
        assert contents(tessera.quantize(laid_out, format)) == contents(tessera.quantize(x, format))
        assert tessera.amax(laid_out) == np.abs(x).max()


@pytest.mark.parametrize("format", ["fp8_e5m2", "mxfp8_e5m2", "nvfp4"])
def test_tensors_of_torch_lie_as_they_like(format: str) -> None:
    x = torch.from_numpy(numbers(3, 34, 66)).bfloat16()
    expected = contents(tessera.quantize(x, format))
    for laid_out in (
        torch.cat([x, x], -1)[..., :66],
        x.mT.contiguous().mT,
        x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.nn.Parameter(x),
        (torch.nn.Parameter(x) * 1),  # in the middle of a graph
    ):
        q = tessera.quantize(laid_out, format)
        assert contents(q) == expected and not q.dequantize().requires_grad
        assert tessera.amax(laid_out) == float(x.abs().max())
    assert contents(tessera.quantize(x[:, :1].expand(3, 34, 66), format)) == contents(
        tessera.quantize(x[:, :1].repeat(1, 34, 1), format)
    )


def test_dense_rows_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(256, dtype=torch.float32)
    views = [
        x.view(4, 64)[:, :32],
        x.view(2, 2, 64)[:, :, 3:35],
        x.view(4, 2, 32).transpose(0, 1),
        x.view(8, 32)[None].expand(5, 8, 32),
        x.view(8, 32).numpy()[None, ::-1].transpose(1, 0, 2),
        x[None, :],
        x[:, None],
    ]
    expected = [float(view.max()) for view in views]

    def copied(view: Any) -> Any:
        raise AssertionError(f"copied: shape {view.shape}")

    monkeypatch.setattr(tessera._tensors.stacks, "_packed", copied)
    assert tessera.amax(views) == expected
    for view in views:
        assert tessera.quantize(view, "mxfp8", planes="row").dequantize().max() >= 32
    with pytest.raises(AssertionError, match="copied"):
        tessera.quantize(x.view(8, 32).T, "mxfp8")


def test_rows_that_overlap_are_copied_first() -> None:
    x = torch.as_strided(torch.arange(64.0), (3, 16), (8, 1))
    assert tessera.amax(x) == 31
    assert contents(tessera.quantize(x, "mxfp8")) == contents(tessera.quantize(x.clone(), "mxfp8"))


@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (0, 4, 8), (2, 0, 8), (3, 0, 2, 2)])
@pytest.mark.parametrize("format", FORMATS)
def test_nothing(format: str, shape: tuple[int, ...], of_torch: bool) -> None:
    x = np.zeros(shape, np.float32)
    q = tessera.quantize(torch.from_numpy(x) if of_torch else x, format)
    for name in q.planes:
        assert tuple(q.dequantize(name).shape) == shape
        getattr(q, name).gemm_scales()
        if q.row.amax is not None:
            assert tuple(getattr(q, name).amax.shape) == shape[:-2]
    assert tessera.amax(x) == 0


def test_many_threads_and_calls_side_by_side_give_the_bytes_of_one() -> None:
    x = numbers(1030, 2048)
    with ThreadPoolExecutor(3) as pool:
        for format in FORMATS:
            options: dict[str, Any] = {"amax": 5} if format in ("fp8_e4m3", "fp8_e5m2", "nvfp4") else {}
            quantize = partial(tessera.quantize, format=format, planes="row", **options)
            slabs = pool.map(quantize, [x[i : i + 128] for i in range(0, 1030, 128)])
            codes = np.concatenate([slab.row.codes.view(np.uint8) for slab in slabs])
            assert (codes == quantize(x).row.codes.view(np.uint8)).all()


def test_stacks_of_few_large_and_of_many_small_matrices() -> None:
    for shape in ((2, 2048, 2304), (300, 32, 32)):
        x = numbers(*shape)
        q = tessera.quantize(x, "nvfp4", scaling="1x16", rounding="stochastic", seed=1)
        i = shape[0] - 1
        alone = tessera.quantize(x[i], "fp8_e4m3")
        assert q.row.amax.shape == (shape[0],) and q.row.amax[i] == alone.row.amax
        assert np.abs(q.dequantize()[i] - x[i]).max() <= np.abs(x[i]).max() / 3


# --- amaxes


def test_amax_of_anything() -> None:
    x = numbers(4, 5)
    assert tessera.amax(x) == np.abs(x).max() and type(tessera.amax(x)) is float
    values = [x, torch.tensor(-7.0), np.float16([1, -2]), torch.zeros(0), torch.full((2, 3, 4), 0.5).bfloat16()]
    assert tessera.amax(values) == [np.abs(x).max(), 7, 2, 0, 0.5]
    assert tessera.amax(iter(values)) == tessera.amax(tuple(values))
    assert tessera.amax([]) == []
    assert tessera.amax(np.array([np.nan, -3, 2], np.float32)) == 3
    assert tessera.amax(np.array([np.nan, -np.inf], np.float32)) == np.inf
    assert tessera.amax(np.array([np.nan], np.float32)) == 0


@pytest.mark.parametrize("count", [65535, 65536, 65537, 1_000_003])
def test_amax_of_a_long_row(count: int) -> None:
    for place in (0, count // 2, count - 1):
        x = torch.zeros(count)
        x[place] = -3
        assert tessera.amax(x) == 3
        assert tessera.amax(x[: count - 1]) == (0 if place == count - 1 else 3)


def test_a_given_amax_takes_the_place_of_the_tensors() -> None:
    x = numbers(3, 32, 32)
    whole = [float(np.abs(x).max())] * 3
    expected = contents(tessera.quantize(x, "nvfp4", amax=whole))
    for amax in (
        whole[0],
        np.float32(whole[0]),
        np.array(whole),
        torch.tensor(whole).bfloat16().new_tensor(whole, dtype=torch.float64),
    ):
        assert contents(tessera.quantize(x, "nvfp4", amax=amax)) == expected
    shards = [tessera.quantize(np.ascontiguousarray(part), "nvfp4", amax=whole[0]) for part in np.split(x, 2, 1)]
    q = tessera.quantize(x, "nvfp4", amax=whole[0])
    assert (np.concatenate([shard.row.codes for shard in shards], 1) == q.row.codes).all()
    assert contents(tessera.quantize(x, "fp8_e4m3", amax={"row": 2, "column": [1, 2, 3]})) != expected


def test_a_hadamard_transform_has_an_amax_for_each_plane() -> None:
    x = torch.from_numpy(numbers(32, 32)).bfloat16()
    q = tessera.quantize(x, "nvfp4", hadamard=True)
    given = {"row": q.row.amax, "column": q.column.amax}
    assert contents(tessera.quantize(x, "nvfp4", hadamard=True, amax=given)) == contents(q)
    alone = tessera.quantize(x, "nvfp4", hadamard=True, planes="column", amax=q.column.amax)
    assert torch.equal(alone.column.codes, q.column.codes)


def test_delayed_scaling() -> None:
    history = tessera.AmaxHistory(length=2)
    steps = [np.full((4, 4), value, np.float32) for value in (3, 1, 0.5, 0.25)]
    scales = []
    for x in steps:
        q = tessera.quantize(x, "fp8_e4m3", history=history)
        scales.append(float(np.float32(1) / q.row.scales[0, 0]))
        assert (q.row.scales == q.column.scales).all()
    # of none; of 3; of 3 and 1; of 1 and 0.5
    assert scales == pytest.approx([1, 448 / 3, 448 / 3, 448])
    assert history.values == [0.25, 0.5] and history.amax == 0.5
    again = pickle.loads(pickle.dumps(history))
    assert (again.values, again.length, again.algorithm, again.margin) == ([0.25, 0.5], 2, "max", 0)
    newest = tessera.AmaxHistory(algorithm="most_recent", margin=1)
    newest.push(4)
    newest.push(2)
    q = tessera.quantize(np.ones((2, 3, 4), np.float32), "fp8_e5m2", history=newest)
    assert q.row.scales.reshape(-1).tolist() == pytest.approx([2 / (57344 / 2)] * 2)
    assert newest.values == [1, 2, 4] and q.row.amax.tolist() == [2, 2]


def test_a_history_keeps_to_what_it_had_if_a_tensor_is_refused() -> None:
    history = tessera.AmaxHistory()
    with pytest.raises(tessera.InvalidArgumentError, match="1 of 4 elements"):
        tessera.quantize(np.array([[1, 2], [np.nan, 3]], np.float32), "fp8_e4m3", history=history)
    assert history.values == []
    tessera.quantize(np.array([[1, 2], [np.nan, 3]], np.float32), "fp8_e4m3", history=history, nonfinite="propagate")
    assert history.values == [3]


# --- results


def test_an_empty_one_is_filled_with_codes_from_elsewhere() -> None:
    x = torch.from_numpy(numbers(2, 32, 64))
    for format in FORMATS:
        q = tessera.quantize(x, format)
        room = tessera.QuantizedTensor.empty((2, 32, 64), format, planes=("column", "row"))
        assert room.planes == ("row", "column") and not room.dequantize("column").any()
        for name in q.planes:
            source, target = getattr(q, name), getattr(room, name)
            assert _core.in_shared_memory(target.codes.data_ptr(), target.codes.nbytes)
            target.codes.view(torch.uint8).copy_(source.codes.view(torch.uint8))
            target.scales.copy_(source.scales)
            if source.amax is not None:
                target.amax.copy_(source.amax)
            assert torch.equal(room.dequantize(name), q.dequantize(name))
    assert tessera.QuantizedTensor.empty((4, 32), "nvfp4", scaling="1x16").planes == ("row",)


def test_what_a_quantised_tensor_says_of_itself() -> None:
    q = tessera.quantize(numbers(2, 32), "NVFP4", scaling="1x16", planes=["row"])
    assert (q.shape, q.format, q.dtype, q.planes) == ((2, 32), "nvfp4", np.float32, ("row",))
    assert repr(q) == "QuantizedTensor(shape=(2, 32), format='nvfp4', planes=('row',), scaling='1x16')"
    assert q.row.amax.shape == () and float(q.row.amax) == np.abs(numbers(2, 32)).max()
    t = tessera.quantize(torch.ones(2, 32), "mxfp8", planes=("row", "row"))
    assert t.dtype == torch.float32 and t.row.amax is None
    for each, again in ((q, pickle.loads(pickle.dumps(q))), (q, copy.deepcopy(q)), (t, copy.deepcopy(t))):
        assert repr(again) == repr(each) and contents(again) == contents(each)
        assert bool((again.dequantize() == each.dequantize()).all())


def test_torchs_own_dtypes_read_the_codes_and_scales() -> None:
    x = torch.from_numpy(numbers(64, 96))
    mx = tessera.quantize(x, "mxfp8")
    for name, blocks in (("row", (1, 32)), ("column", (32, 1))):
        plane = getattr(mx, name)
        scales = plane.scales.view(torch.float8_e8m0fnu).float()
        values = plane.codes.float() * scales.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
        assert torch.equal(values, mx.dequantize(name))
    fp8 = tessera.quantize(x, "fp8_e5m2")
    assert torch.equal(fp8.row.codes.float() * fp8.row.scales, fp8.dequantize())
    nv = tessera.quantize(x, "nvfp4")
    assert nv.row.codes.view(torch.float4_e2m1fn_x2).shape == (64, 48)
    assert nv.row.scales.view(torch.float8_e4m3fn).float().max() == 448
