"""tessera.quantize() beside torchao's MX, NVFP4 and float8 code: equal where the rule is the same, and where it is not,
as far off as docs/formats/quantized.md says."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import tessera

torch = pytest.importorskip("torch")
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [*sys.path, f"{sys.prefix}/peers"])  # where scripts/lib.sh puts it
    pytest.importorskip("torchao")
    from torchao.float8 import float8_utils
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix
    from torchao.prototype.mx_formats import nvfp4_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.prototype.mx_formats.utils import to_blocked

MX = {"mxfp8": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=draw) * torch.exp2(6 * torch.rand(shape, generator=draw) - 3)
    return x.to(dtype)


def rceil(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    scales, codes = to_mx(x, MX[format], 32, ScaleCalculationMode.RCEIL)
    return scales.view(torch.uint8), codes.view(torch.uint8)


# --- MX


@pytest.mark.parametrize("shape", [(128, 256), (3, 34, 96)])
@pytest.mark.parametrize("format", MX)
def test_mx_of_bf16_is_equal(format: str, shape: tuple[int, ...]) -> None:
    x = random(*shape)
    q = tessera.quantize(x, format, planes="row")
    scales, codes = rceil(x, format)
    assert torch.equal(q.row.scales, scales)
    assert torch.equal(q.row.codes.view(torch.uint8), codes)
    values = to_dtype(q.row.codes, q.row.scales.view(torch.float8_e8m0fnu), MX[format], 32, torch.float32)
    assert torch.equal(q.dequantize(), values)


@pytest.mark.parametrize("format", MX)
def test_the_column_plane_of_mx_is_that_of_the_transposed_matrix(format: str) -> None:
    x = random(96, 132)
    q = tessera.quantize(x, format, planes="column")
    scales, codes = rceil(x.T.contiguous(), format)
    assert torch.equal(q.column.scales, scales.T)
    assert torch.equal(q.column.codes.view(torch.uint8), codes.T)


@pytest.mark.parametrize("format", MX)
def test_every_amax_that_bf16_has(format: str) -> None:
    """One block for each; the other elements vary in magnitude."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = amax[:, None].float() * torch.linspace(-1, 1, 32)
    x = x.bfloat16()
    x[:, 0] = amax
    q = tessera.quantize(x, format, planes="row")
    scales, codes = rceil(x, format)
    same_rule = scales[:, 0] > 0  # torchao does not scale what has the smallest scale
    assert torch.equal(q.row.scales[same_rule], scales[same_rule])
    assert torch.equal(q.row.codes.view(torch.uint8)[same_rule], codes[same_rule])
    assert same_rule.sum() > 30_000
    assert not q.row.scales[~same_rule].any()


def test_mx_of_f32_is_equal_but_a_few_ulps_above_a_power_of_two() -> None:
    """torchao takes a logarithm in f32, which is rounded: of what is 20 ulps above 2^35, to 35."""
    near = torch.arange(-64, 65, dtype=torch.int32)
    bits = torch.tensor([448 * 2.0**k for k in range(-40, 41)]).view(torch.int32)[:, None] + near
    amax = bits.view(torch.float32)
    x = torch.zeros(*amax.shape, 32)
    x[..., 0] = amax
    ours = tessera.quantize(x, "mxfp8", planes="row").row.scales[..., 0]
    theirs = rceil(x, "mxfp8")[0][..., 0]
    different = ours != theirs
    assert different.any() and not different[:, near <= 0].any() and not different[:, near > 20].any()
    assert (ours[different] == theirs[different] + 1).all(), "ours is the larger scale: nothing saturates"
    x = random(256, 512, dtype=torch.float32)
    assert torch.equal(tessera.quantize(x, "mxfp8", planes="row").row.codes.view(torch.uint8), rceil(x, "mxfp8")[1])


# --- NVFP4


def nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    scales, codes = nvfp4_tensor.nvfp4_quantize(x, 16, scale)
    return scales.view(torch.uint8), codes


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def test_nvfp4_is_another_order_of_the_same_products() -> None:
    x = random(512, 1024)
    q = tessera.quantize(x, "nvfp4", scaling="1x16", planes="row")
    scales, codes = nvfp4(x)
    # A scale is never zero at torchao, and not below the smallest normal number of E4M3.
    same_rule = q.row.scales >= 0x08
    assert same_rule.float().mean() > 0.99
    assert ((q.row.scales != scales) & same_rule).float().mean() < 0.01
    assert (q.row.scales.int() - scales.int())[same_rule].abs().max() <= 1
    blocks = (same_rule & (q.row.scales == scales)).repeat_interleave(16, 1)
    ours, theirs = unpacked(q.row.codes)[blocks].int(), unpacked(codes)[blocks].int()
    assert (ours != theirs).float().mean() < 0.005
    assert (ours - theirs).abs().max() <= 1, "neighbours of one sign"


def test_nvfp4_dequantised_by_torchao() -> None:
    x = random(64, 256)
    q = tessera.quantize(x, "nvfp4", scaling="1x16", planes="row")
    scale = nvfp4_tensor.per_tensor_amax_to_scale(q.row.amax)
    theirs = nvfp4_tensor.NVFP4Tensor(q.row.codes, q.row.scales.view(torch.float8_e4m3fn), 16, torch.float32, scale)
    torch.testing.assert_close(theirs.dequantize(), q.dequantize(), rtol=1e-6, atol=0)


def test_the_hadamard_transform_of_whole_numbers() -> None:
    """Of which no sum is rounded, in whatever order."""
    signs = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
    x = torch.randint(-8, 9, (64, 48), generator=torch.Generator().manual_seed(1)).bfloat16()
    matrix = get_rht_matrix(signs, "cpu", torch.bfloat16, 16)
    transformed = (x.T.reshape(-1, 16).float() @ matrix.float()).bfloat16().reshape(48, 64)
    q = tessera.quantize(x, "nvfp4", scaling="1x16", hadamard=True, planes="column")
    expected = tessera.quantize(transformed, "nvfp4", scaling="1x16", planes="row")
    assert q.column.amax == transformed.abs().max()
    assert torch.equal(q.column.codes, expected.row.codes) and torch.equal(q.column.scales, expected.row.scales)


# --- scales as GEMMs read them


@pytest.mark.parametrize("shape", [(128, 256), (34, 96), (300, 1024)])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "nvfp4"])
def test_the_order_of_scales_is_the_same(format: str, shape: tuple[int, int]) -> None:
    q = tessera.quantize(random(*shape), format)
    for plane, scales in (
        (q.row, q.row.scales),
        (q.column, q.column.scales if format == "nvfp4" else q.column.scales.T),
    ):
        assert torch.equal(plane.gemm_scales().flatten(), to_blocked(scales.contiguous()))


# --- FP8 with one scale


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("format", FP8)
def test_fp8_with_one_scale_is_equal(format: str, power_of_two: bool) -> None:
    for seed in range(20):
        x = random(64, 64 + seed, dtype=torch.float32)
        scale = float8_utils.tensor_to_scale(x, FP8[format], round_scales_to_power_of_2=power_of_two)
        codes = float8_utils.to_fp8_saturated(x * scale, FP8[format])
        q = tessera.quantize(x, format, planes="row", power_of_two=power_of_two)
        assert torch.equal(q.row.scales[0, 0], 1 / scale)
        assert torch.equal(q.row.codes.view(torch.uint8), codes.view(torch.uint8))


def test_the_error_of_each_format() -> None:
    """Signal to noise, in dB, of a normal distribution: what each format should reach."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(3))
    floor: dict[str, Any] = {"fp8_e4m3": 31, "fp8_e5m2": 25, "fp8_block_1x128": 31, "fp8_block_128x128": 31}
    floor |= {"mxfp8": 31, "mxfp8_e5m2": 25, "nvfp4": 18}
    for format, least in floor.items():
        q = tessera.quantize(x, format)
        for plane in q.planes:
            error = float(float8_utils.compute_error(x, q.dequantize(plane)))
            assert least < error < least + 4, (format, plane, error)
