"""Quantised formats again, written from docs/formats/quantized.md on whole arrays: exponents by frexp() where the core
uses bits, tables where it computes, torch's casts for 8-bit floats. Matrices are f32."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

F32 = np.float32
Array = np.ndarray[Any, Any]
FLT_MAX = np.finfo(F32).max
FP8 = {"e4m3": (torch.float8_e4m3fn, F32(448)), "e5m2": (torch.float8_e5m2, F32(57344))}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)


@dataclass
class Plane:
    codes: Array  # one uint8 each, of nvfp4 too
    scales: Array  # f32 or uint8
    values: Array  # dequantised, in the direction of the codes


def code_format(format: str) -> str:
    return "e5m2" if format.endswith("e5m2") else "e4m3"


def fp8(x: Array, kind: str) -> Array:
    """Codes, saturated."""
    dtype, largest = FP8[kind]
    clamped = torch.from_numpy(np.clip(x, -largest, largest))  # a NaN stays
    return np.where(np.isnan(x), np.uint8(0x7F), clamped.to(dtype).view(torch.uint8).numpy())


def fp8_values(codes: Array, kind: str) -> Array:
    return torch.from_numpy(np.ascontiguousarray(codes)).view(FP8[kind][0]).float().numpy()


def e2m1(x: Array) -> Array:
    """To the nearest; ties are listed."""
    ties = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5, 6)]
    a = np.abs(x)
    codes = np.searchsorted([tie for tie, _ in ties], a, side="right").astype(np.uint8)
    for tie, code in ties:
        codes = np.where(a == F32(tie), np.uint8(code), codes)
    return np.where(np.isnan(x), np.uint8(7), codes | np.where(np.signbit(x), 8, 0).astype(np.uint8))


def e2m1_values(codes: Array) -> Array:
    return np.where(codes & 8, F32(-1), F32(1)) * E2M1[codes & 7]


def pack(codes: Array) -> Array:
    return codes[..., ::2] | codes[..., 1::2] << 4


def block_amax(x: Array, rows: int, columns: int) -> Array:
    """Of blocks that are clipped at the ends; NaN does not count."""
    down, across = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    amaxes = np.zeros((down, across), F32)
    for i, j in itertools.product(range(down), range(across)):
        block = np.abs(x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns])
        amaxes[i, j] = np.max(block, initial=0, where=~np.isnan(block))
    return amaxes


def spread(blocks: Array, rows: int, columns: int, shape: tuple[int, ...]) -> Array:
    return blocks.repeat(rows, 0).repeat(columns, 1)[: shape[0], : shape[1]]


def e8m0_round_up(v: Array) -> Array:
    """The exponent of the smallest power of two that is not less, from 2^-127 on."""
    mantissa, exponent = np.frexp(v)
    power = np.where(mantissa == 0.5, exponent - 1, exponent)
    codes = np.clip(power + 127, 0, 254)
    return np.where(v == 0, 0, np.where(np.isinf(v), 254, codes)).astype(np.uint8)


def fp8_scale(amax: Array, largest: F32, eps: float, power_of_two: bool, overflow: Any) -> Array:
    amax = np.maximum(amax, F32(eps))
    usable = (amax > 0) & np.isfinite(amax)
    with np.errstate(over="ignore"):
        scale = largest / np.where(usable, amax, F32(1))
    scale = np.where(np.isinf(scale), F32(overflow), scale)
    if power_of_two:
        scale = np.ldexp(F32(1), np.frexp(scale)[1] - 1)
    return np.where(usable, scale, F32(1)).astype(F32)


def one_scale(x: Array, kind: str, amax: Any, eps: float = 0, power_of_two: bool = False, margin: int = 0) -> Plane:
    scale = fp8_scale(np.array([[amax]], F32), np.ldexp(FP8[kind][1], -margin), eps, power_of_two, FLT_MAX)
    codes = fp8(x * scale, kind)
    stored = F32(1) / scale
    return Plane(codes, stored, fp8_values(codes, kind) * stored)


def fp8_blocks(x: Array, rows: int, columns: int, overflow: Any, eps: float = 0, power_of_two: bool = True) -> Plane:
    scale = fp8_scale(block_amax(x, rows, columns), F32(448), eps, power_of_two, overflow)
    codes = fp8(x * spread(scale, rows, columns, x.shape), "e4m3")
    stored = F32(1) / scale
    return Plane(codes, stored, fp8_values(codes, "e4m3") * spread(stored, rows, columns, x.shape))


def mx(x: Array, kind: str) -> Plane:
    e = e8m0_round_up(block_amax(x, 1, 32) * (F32(1) / FP8[kind][1]))
    codes = fp8(x * spread(np.ldexp(F32(1), 127 - e.astype(int)), 1, 32, x.shape), kind)
    back = np.ldexp(F32(1), e.astype(int) - 127)
    return Plane(codes, e, fp8_values(codes, kind) * spread(back, 1, 32, x.shape))


def nvfp4(x: Array, amax: Any, rows: int = 16, random: Array | None = None) -> Plane:
    """random: a byte for each element, of stochastic rounding."""
    amax = F32(amax)
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.minimum(F32(2688) / amax, FLT_MAX)
    if amax == 0 or encode == 0:
        encode = F32(1)
    decode = F32(1) / encode
    blocks = block_amax(x, rows, 16)
    with np.errstate(over="ignore", divide="ignore"):
        d8 = fp8(np.minimum(blocks * (encode * (F32(1) / F32(6))), FLT_MAX), "e4m3")
        multiplier = np.minimum(F32(1) / (fp8_values(d8, "e4m3") * decode), FLT_MAX)
        y = np.clip(x * spread(multiplier, rows, 16, x.shape), F32(-6), F32(6))
    codes = e2m1(y if random is None else stochastic(y, random))
    back = (fp8_values(d8, "e4m3") * amax) * (F32(1) / F32(2688))
    values = e2m1_values(codes) * spread(back, rows, 16, x.shape)
    return Plane(codes, d8.repeat(rows, 0)[: x.shape[0]], values)


def stochastic(y: Array, random: Array) -> Array:
    """In f64, in which none of it is rounded; the result is a value of E2M1."""

    def step(a: Array) -> Array:
        return np.where(a >= 4, 2.0, np.where(a >= 2, 1.0, 0.5))

    a = np.abs(y).astype(np.float64)
    t = (random / 256 * step(a) + a).astype(F32).astype(np.float64)
    return np.copysign(np.minimum(np.floor(t / step(t)) * step(t), 6), y).astype(F32)


def philox_bytes(seed: int, plane: int, first: int, count: int) -> Array:
    """Of elements `first` on: byte g % 16 of Philox4x32-10 (Salmon et al., 2011) of counter (g / 16, plane, 0)."""
    groups = np.arange(first // 16, (first + count - 1) // 16 + 1, dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    word = [groups & low, groups >> np.uint64(32), np.full_like(groups, plane), np.zeros_like(groups)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        left, right = word[0] * np.uint64(0xD2511F53), word[2] * np.uint64(0xCD9E8D57)
        word = [
            right >> np.uint64(32) ^ word[1] ^ np.uint64(key[0]),
            right & low,
            left >> np.uint64(32) ^ word[3] ^ np.uint64(key[1]),
            left & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    drawn = np.stack(word, -1).astype("<u4").view(np.uint8).reshape(-1)
    return drawn[first % 16 :][:count]


def hadamard(x: Array) -> Array:
    """What 16 rows each become, in bf16."""
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], F32)
    matrix = np.array([[1.0]], F32)
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    groups = x.reshape(-1, 16, x.shape[1])
    total = np.zeros_like(groups)
    for i in range(16):
        total = total + groups[:, i : i + 1] * (signs[i] * matrix[i] * F32(0.25))[None, :, None]
    return torch.from_numpy(total.reshape(x.shape)).bfloat16().float().numpy()


def planes(
    x: Array, format: str, amax: Any = None, largest_input: Any = FLT_MAX, scaling: str = "16x16", **options: Any
) -> dict[str, Plane]:
    """Both of a matrix."""
    amax = block_amax(x, *x.shape)[0, 0] if amax is None and x.size else 0 if amax is None else amax

    def of(x: Array) -> Plane:
        if format == "nvfp4":
            return nvfp4(x, amax, 16 if scaling == "16x16" else 1, **options)
        if format.startswith("mx"):
            return mx(x, code_format(format))
        if format.startswith("fp8_block"):
            rows = 128 if "128x" in format else 1
            return fp8_blocks(x, rows, 128, largest_input, **options)
        return one_scale(x, code_format(format), amax, **options)

    column = of(np.ascontiguousarray(x.T))
    if format.startswith("mx"):
        column = Plane(column.codes.T, column.scales.T, column.values.T)
    return {"row": of(x), "column": column}


def tiles(scales: Array) -> Array:
    """The order in which tensor cores read scales of one byte: 128 rows by 4 columns, 512 bytes a tile."""
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    padded = np.zeros((rows, columns), np.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return padded.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4).reshape(rows, columns)
