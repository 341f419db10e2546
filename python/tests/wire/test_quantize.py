"""tessera.quantize() compared with independent formulas: codes, scales and values of every format, bit by bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera
from tessera import _core

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")
import quantize_oracle as oracle  # noqa: E402

FORMATS = ["fp8_e4m3", "fp8_e5m2", "fp8_block_1x128", "fp8_block_128x128", "mxfp8", "mxfp8_e5m2", "nvfp4"]
SHAPES = [(1, 2), (3, 37), (2, 2), (16, 32), (34, 70), (128, 128), (130, 260), (258, 36), (66, 1030)]
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def test_all_formats_are_here() -> None:
    assert _core.formats() == FORMATS


def random_matrix(shape: tuple[int, ...], dtype: str = "f32", seed: int = 0, spread: float = 3) -> Any:
    """Magnitudes that differ from place to place, with some zeros."""
    draw = np.random.default_rng(seed + sum(shape))
    x = draw.standard_normal(shape) * np.exp2(draw.uniform(-spread, spread, shape)) * (draw.random(shape) < 0.97)
    return x.astype(np.float32).astype(DTYPES[dtype])


def of_library(library: str, x: Any) -> Any:
    if library == "numpy":
        return x
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def as_bytes(codes: Any) -> Any:
    return codes.view(torch.uint8).numpy() if isinstance(codes, torch.Tensor) else codes.view(np.uint8)


def as_f32(values: Any) -> Any:
    return values.float().numpy() if isinstance(values, torch.Tensor) else values.astype(np.float32)


def planes_of(format: str, shape: tuple[int, int]) -> list[str]:
    """The possible planes: nvfp4 packs pairs."""
    rows, columns = shape
    return [name for name, size in (("row", columns), ("column", rows)) if format != "nvfp4" or size % 2 == 0]


def assert_plane(q: tessera.QuantizedTensor, name: str, expected: oracle.Plane) -> None:
    plane = getattr(q, name)
    codes = oracle.pack(expected.codes) if q.format == "nvfp4" else expected.codes
    np.testing.assert_array_equal(np.asarray(plane.scales), expected.scales)
    np.testing.assert_array_equal(as_bytes(plane.codes), codes)
    values = as_f32(q.dequantize(name))
    transposed = name == "column" and not q.format.startswith("mx")
    np.testing.assert_array_equal(values, expected.values.T if transposed else expected.values)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_scales_and_values(format: str, dtype: str, library: str) -> None:
    for shape in SHAPES:
        x, names = random_matrix(shape, dtype), planes_of(format, shape)
        expected = oracle.planes(x.astype(np.float32), format)
        q = tessera.quantize(of_library(library, x), format, planes=names) if names else None
        for name in names:
            assert q is not None
            assert_plane(q, name, expected[name])
            alone = tessera.quantize(of_library(library, x), format, planes=(name,))
            assert alone.planes == (name,)
            assert_plane(alone, name, expected[name])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_nvfp4_with_a_scale_for_each_row(library: str) -> None:
    for shape in SHAPES:
        x = random_matrix(shape, "bf16")
        expected = oracle.planes(x.astype(np.float32), "nvfp4", scaling="1x16")
        for name in planes_of("nvfp4", shape):
            q = tessera.quantize(of_library(library, x), "nvfp4", planes=name, scaling="1x16")
            assert_plane(q, name, expected[name])


def test_square_blocks_of_nvfp4_are_the_same_in_both_planes() -> None:
    q = tessera.quantize(random_matrix((66, 100)), "nvfp4")
    codes = q.row.codes[..., None] >> np.array([0, 4], np.uint8) & 15
    assert (oracle.pack(codes.reshape(66, 100).T) == q.column.codes).all()
    np.testing.assert_array_equal(q.dequantize("row"), q.dequantize("column"))


@pytest.mark.parametrize("format", FORMATS)
def test_magnitudes_of_the_whole_range(format: str) -> None:
    """Subnormal scales, scales that overflow, blocks that vanish beside others."""
    x = random_matrix((64, 256), spread=120)
    if format == "nvfp4":
        x = np.clip(x, np.float32(-7e35), np.float32(7e35))
    expected = oracle.planes(x, format)
    q = tessera.quantize(x, format)
    for name in ("row", "column"):
        assert_plane(q, name, expected[name])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_and_zero(format: str, dtype: str) -> None:
    largest = np.float32(ml_dtypes.finfo(DTYPES[dtype]).max)
    for value in (0.0, 2.0**-24, 2.0**-100, 2.0**-115, 2.0**-133):
        x = np.full((32, 64), value, np.float32).astype(DTYPES[dtype])
        expected = oracle.planes(x.astype(np.float32), format, largest_input=largest)
        q = tessera.quantize(x, format, nonfinite="propagate")
        for name in ("row", "column"):
            assert_plane(q, name, expected[name])


@pytest.mark.parametrize("format", [format for format in FORMATS if format.startswith("fp8")])
@pytest.mark.parametrize("options", [{"eps": 0.5}, {"power_of_two": True}, {"power_of_two": False, "eps": 1e-3}])
def test_options_of_fp8(format: str, options: dict[str, Any]) -> None:
    x = random_matrix((130, 132), "bf16", spread=12)
    expected = oracle.planes(x.astype(np.float32), format, **options)
    q = tessera.quantize(x, format, **options)
    for name in ("row", "column"):
        assert_plane(q, name, expected[name])


GOLDEN = np.array([[0, 0.125, -0.25, 0.375, -0.5, 0.625, -0.75, 0.875, -1, 1.25, -1.5, 2, -2.5, 3, -4, 5]], np.float32)


def test_the_golden_values_of_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "formats" / "quantized.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([0-9a-f]+)` \| `([0-9a-f]+)` \|$", page, re.MULTILINE)
    assert [name for name, _, _ in rows] == FORMATS
    for format, scale, codes in rows:
        q = tessera.quantize(GOLDEN, format, scaling="1x16" if format == "nvfp4" else None, planes="row")
        assert q.row.scales.astype(q.row.scales.dtype.newbyteorder(">")).tobytes().hex() == scale
        assert q.row.codes.tobytes().hex() == codes
    q = tessera.quantize(GOLDEN, "nvfp4", scaling="1x16", planes="row", rounding="stochastic", seed=1)
    column = tessera.quantize(GOLDEN.T.astype(ml_dtypes.bfloat16), "nvfp4", planes="column", hadamard=True).column
    assert f"its codes are `{q.row.codes.tobytes().hex()}`" in page
    transformed = f"amax {column.amax}, scale `{column.scales.tobytes().hex()}`, codes `{column.codes.tobytes().hex()}`"
    assert transformed in page


@pytest.mark.parametrize(("v", "e"), [(0x00400000, 0), (0x00400001, 1), (0x3F800000, 127), (0x3F800001, 128)])
def test_golden_scales_of_mxfp8(v: int, e: int) -> None:
    """By amaxes whose 448th part is rounded to `v`."""
    bits = np.arange(-4, 5) + np.frombuffer(np.float32(np.uint32(v).view(np.float32)) * np.float32(448), np.uint32)
    amax = bits.astype(np.uint32).view(np.float32)
    hits = amax[(amax * (np.float32(1) / np.float32(448))).view(np.uint32) == v]
    assert len(hits)
    assert tessera.quantize(hits[:, None], "mxfp8").row.scales.tolist() == [[e]] * len(hits)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("format", FORMATS)
def test_each_matrix_of_a_stack_is_on_its_own(format: str, library: str) -> None:
    x = np.stack([random_matrix((3, 34, 70), "bf16", seed=i) * DTYPES["bf16"](2.0**i) for i in range(2)])
    q = tessera.quantize(of_library(library, x), format)
    assert q.shape == (2, 3, 34, 70)
    for i, j in np.ndindex(2, 3):
        alone = tessera.quantize(of_library(library, x[i, j]), format)
        for name in ("row", "column"):
            plane, of_one = getattr(q, name), getattr(alone, name)
            assert (as_bytes(plane.codes[i, j]) == as_bytes(of_one.codes)).all()
            assert (plane.scales[i, j] == of_one.scales).all()
            assert (plane.gemm_scales()[i, j] == of_one.gemm_scales()).all()
            assert (q.dequantize(name)[i, j] == alone.dequantize(name)).all()
            assert plane.amax is None if of_one.amax is None else plane.amax[i, j] == of_one.amax


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(2, 2), (34, 70), (258, 140)])
@pytest.mark.parametrize("format", FORMATS)
def test_scales_for_gemms(format: str, shape: tuple[int, int], library: str) -> None:
    q = tessera.quantize(of_library(library, random_matrix(shape)), format)
    for name in ("row", "column"):
        compact, gemm = (np.asarray(each) for each in (getattr(q, name).scales, getattr(q, name).gemm_scales()))
        if compact.dtype == np.float32:
            columns = 1 if compact.shape == (1, 1) and "block" not in format else -(-compact.shape[1] // 4) * 4
            assert gemm.shape == (compact.shape[0], columns)
            assert (gemm[:, : compact.shape[1]] == compact).all() and not gemm[:, compact.shape[1] :].any()
        elif format == "nvfp4" or name == "row":
            np.testing.assert_array_equal(gemm, oracle.tiles(compact))
        else:
            assert gemm.shape == oracle.tiles(compact.T).shape[::-1]
            assert gemm.tobytes() == oracle.tiles(compact.T).tobytes()


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("format", FORMATS)
def test_dequantised_into_a_smaller_dtype_is_rounded_once(format: str, library: str, dtype: str) -> None:
    q = tessera.quantize(of_library(library, random_matrix((32, 64))), format)
    exact, rounded = q.dequantize(), q.dequantize(dtype=dtype)
    if library == "torch":
        assert torch.equal(rounded, exact.to(rounded.dtype)) and tessera._tensors.foreign.dtype(rounded.dtype) == dtype
    else:
        assert rounded.dtype == DTYPES[dtype] and (rounded == exact.astype(DTYPES[dtype])).all()


@pytest.mark.parametrize("scaling", ["1x16", "16x16"])
def test_stochastic_rounding_draws_by_the_place_in_the_stack(scaling: str) -> None:
    x, seed = random_matrix((3, 34, 70)), 0xFEDCBA9876543210
    q = tessera.quantize(x, "nvfp4", scaling=scaling, rounding="stochastic", seed=seed)
    for i, matrix in enumerate(x):
        for number, (name, values) in enumerate({"row": matrix, "column": np.ascontiguousarray(matrix.T)}.items()):
            random = oracle.philox_bytes(seed, number, i * matrix.size, matrix.size).reshape(values.shape)
            high = 16 if scaling == "16x16" else 1
            expected = oracle.nvfp4(values, np.abs(matrix).max(), high, random)
            assert (getattr(q, name).codes[i] == oracle.pack(expected.codes)).all()


def test_stochastic_rounding_is_right_on_average() -> None:
    x = np.full((512, 64), 0.7, np.float32)
    x[:, 0] = 6
    values = [
        tessera.quantize(x, "nvfp4", scaling="1x16", planes="row", rounding="stochastic", seed=seed).dequantize()[:, 1:]
        for seed in range(2)
    ]
    assert (values[0] != values[1]).any()
    assert all(abs(each.mean() - 0.7) < 0.01 for each in values)


def test_the_hadamard_transform() -> None:
    x = random_matrix((2, 48, 70), "bf16")
    q = tessera.quantize(of_library("torch", x), "nvfp4", scaling="1x16", hadamard=True)
    for i, matrix in enumerate(x.astype(np.float32)):
        transformed = np.ascontiguousarray(oracle.hadamard(matrix).T)
        expected = oracle.nvfp4(transformed, np.abs(transformed).max(), 1)
        assert q.column.amax[i] == np.abs(transformed).max() and q.row.amax[i] == np.abs(matrix).max()
        assert (q.column.scales[i].numpy() == expected.scales).all()
        assert (q.column.codes[i].numpy() == oracle.pack(expected.codes)).all()
        assert (q.row.codes[i].numpy() == oracle.pack(oracle.nvfp4(matrix, np.abs(matrix).max(), 1).codes)).all()
    with pytest.raises(tessera.InvalidArgumentError, match="the column plane holds the Hadamard transform"):
        q.dequantize("column")


@pytest.mark.parametrize("format", FORMATS)
def test_nonfinite_values_go_through_if_asked_to(format: str) -> None:
    x = random_matrix((32, 64))
    x[3, 5] = np.nan
    q = tessera.quantize(x, format, nonfinite="propagate")
    expected = oracle.planes(x, format)
    for name in ("row", "column"):
        assert (np.asarray(getattr(q, name).scales) == expected[name].scales).all()
        codes = oracle.pack(expected[name].codes) if format == "nvfp4" else expected[name].codes
        assert (as_bytes(getattr(q, name).codes) == codes).all()
