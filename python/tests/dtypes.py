"""Every element type, as Tessera and other libraries name it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy
import torch

# Tessera's name, NumPy's or ml_dtypes' type if there is one, torch's.
DTYPES: list[tuple[str, Any, torch.dtype]] = [
    ("f64", numpy.float64, torch.float64),
    ("f32", numpy.float32, torch.float32),
    ("f16", numpy.float16, torch.float16),
    ("bf16", ml_dtypes.bfloat16, torch.bfloat16),
    ("f8_e4m3", ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    ("f8_e5m2", ml_dtypes.float8_e5m2, torch.float8_e5m2),
    ("f8_e8m0", ml_dtypes.float8_e8m0fnu, torch.float8_e8m0fnu),
    ("f4", None, torch.float4_e2m1fn_x2),
    ("i64", numpy.int64, torch.int64),
    ("i32", numpy.int32, torch.int32),
    ("i16", numpy.int16, torch.int16),
    ("i8", numpy.int8, torch.int8),
    ("u64", numpy.uint64, torch.uint64),
    ("u32", numpy.uint32, torch.uint32),
    ("u16", numpy.uint16, torch.uint16),
    ("u8", numpy.uint8, torch.uint8),
    ("bool", numpy.bool_, torch.bool),
    ("c64", numpy.complex64, torch.complex64),
]
NAMES = [name for name, _, _ in DTYPES]
