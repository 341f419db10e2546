"""What tessera.quantize(), tessera.amax() and similar calls refuse, and their messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tessera
from tessera import _core

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")
FORMATS = _core.formats()


def random(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


X = np.zeros((4, 32), np.float32)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "f64": (
        lambda: tessera.quantize(X.astype(float), "mxfp8"),
        "tensor given to quantize.*: its dtype is float64: cast",
    ),
    "ints": (lambda: tessera.quantize(torch.ones(2, 2, dtype=torch.int32), "mxfp8"), "its dtype is torch.int32"),
    "c128": (lambda: tessera.amax([X, X.astype(complex)]), r"tensor 1 given to amax\(\): its dtype is complex128"),
    "fp8": (lambda: tessera.quantize(X.astype(ml_dtypes.float8_e4m3fn), "mxfp8"), "its dtype is float8_e4m3fn"),
    "objects": (lambda: tessera.quantize(X.astype(object), "mxfp8"), "its dtype is object"),
    "one dim": (lambda: tessera.quantize(X[0], "mxfp8"), r"its shape is \(32,\): give a matrix, or a stack"),
    "no dim": (lambda: tessera.quantize(torch.tensor(1.0), "mxfp8"), r"its shape is \(\)"),
    "a list": (lambda: tessera.quantize([[1.0]], "mxfp8"), "a builtins.list: give a NumPy array or a tensor of torch"),
    "numbers": (lambda: tessera.amax([1.0]), r"tensor 0 given to amax\(\): a builtins.float"),
    "nothing at all": (lambda: tessera.amax(None), "a builtins.NoneType"),
    "masked": (lambda: tessera.quantize(np.ma.masked_array(X, X > 1), "mxfp8"), "a masked array: its mask would be"),
    "sparse": (lambda: tessera.quantize(torch.zeros(2, 2).to_sparse(), "mxfp8"), "torch.sparse_coo tensors"),
    "meta": (lambda: tessera.quantize(torch.zeros(2, 2, device="meta"), "mxfp8"), "meta device"),
    "a format": (lambda: tessera.quantize(X, "fp4"), "unknown format 'fp4': use one of fp8_e4m3, .*nvfp4"),
    "no format": (lambda: tessera.quantize(X, None), "unknown format 'None'"),  # type: ignore[arg-type]
    "a plane": (lambda: tessera.quantize(X, "mxfp8", planes=("rows",)), r"planes \('rows',\): give 'row', 'column' or"),
    "no plane": (lambda: tessera.quantize(X, "mxfp8", planes=()), r"planes \(\): give"),
    "None": (lambda: tessera.quantize(X, "mxfp8", planes=None), "planes None: give"),  # type: ignore[arg-type]
    "scaling": (lambda: tessera.quantize(X, "nvfp4", scaling="16"), "scaling '16': '1x16' and '16x16' are possible"),
    "scaling of mx": (
        lambda: tessera.quantize(X, "mxfp8", scaling="1x16"),
        "scaling is only for nvfp4: leave it out for",
    ),
    "hadamard": (
        lambda: tessera.quantize(X, "mxfp8", hadamard=True),
        "hadamard is only for nvfp4: leave it out for mxfp8",
    ),
    "hadamard f32": (
        lambda: tessera.quantize(np.ones((16, 4), "f4"), "nvfp4", hadamard=True),
        "transform of f32: it is def",
    ),
    "hadamard rows": (
        lambda: tessera.quantize(torch.ones(4, 2).bfloat16(), "nvfp4", hadamard=True),
        "transform of 4 rows: it takes whole groups",
    ),
    "rounding": (lambda: tessera.quantize(X, "nvfp4", rounding="up"), "rounding 'up': 'nearest' and 'stochastic'"),
    "no seed": (lambda: tessera.quantize(X, "nvfp4", rounding="stochastic"), "stochastic rounding: give a seed="),
    "a seed": (lambda: tessera.quantize(X, "nvfp4", seed=3), "seed=3 is only for stochastic rounding: set rounding="),
    "a large seed": (lambda: tessera.quantize(X, "nvfp4", rounding="stochastic", seed=2**64), "seed=.*: give a whole"),
    "half a seed": (lambda: tessera.quantize(X, "nvfp4", rounding="stochastic", seed=0.5), "seed=0.5: give a whole"),  # type: ignore[arg-type]
    "stochastic fp8": (
        lambda: tessera.quantize(X, "fp8_e4m3", rounding="stochastic", seed=1),
        "stochastic rounding is only for nvfp4",
    ),
    "eps": (lambda: tessera.quantize(X, "fp8_e4m3", eps=-1), "eps is -1: give a finite number"),
    "eps of mx": (lambda: tessera.quantize(X, "mxfp8", eps=1), "eps is only for fp8: leave it out for mxfp8"),
    "a power": (lambda: tessera.quantize(X, "nvfp4", power_of_two=False), "power_of_two is only for fp8"),
    "nonfinite": (lambda: tessera.quantize(X, "mxfp8", nonfinite="warn"), "nonfinite 'warn': 'error' and 'propagate'"),
    "an amax of mx": (lambda: tessera.quantize(X, "mxfp8", amax=1), "amax is only for nvfp4 and fp8 with one scale"),
    "amaxes": (lambda: tessera.quantize(X, "nvfp4", amax=[1, 2]), r"amax has shape \(2,\), the stack \(\): give one"),
    "a text": (lambda: tessera.quantize(X, "nvfp4", amax="large"), "amax='large': give a number, or"),
    "less than 0": (lambda: tessera.quantize(X, "fp8_e4m3", amax=-1), "the row plane's amax is -1: it is a magnitude"),
    "infinite": (lambda: tessera.quantize(X, "fp8_e4m3", amax=np.inf), "the row plane's amax is infinite"),
    "half of them": (lambda: tessera.quantize(X, "nvfp4", amax={"row": 1}), "lacks that of the column plane"),
    "of hadamard": (
        lambda: tessera.quantize(torch.ones(16, 2).bfloat16(), "nvfp4", hadamard=True, amax=1),
        "amax= under a Hadamard transform: the planes have one each",
    ),
    "too small": (
        lambda: tessera.quantize(X + np.float32(1e-37), "nvfp4"),
        "amax is 1e-37: nvfp4 takes 0 and 7.9e-36 to",
    ),
    "odd": (lambda: tessera.quantize(X[:3], "nvfp4"), "the column plane of a 3 x 32 matrix in nvfp4 packs pairs along"),
    "a history": (lambda: tessera.quantize(X, "fp8_e4m3", history=[1]), "history: give a tessera.AmaxHistory, not a"),  # type: ignore[arg-type]
    "a history of blocks": (
        lambda: tessera.quantize(X, "fp8_block_1x128", history=tessera.AmaxHistory()),
        "history is only for fp8 with one scale: leave it out for fp8_block_1x128",
    ),
    "both": (
        lambda: tessera.quantize(X, "fp8_e4m3", amax=1, history=tessera.AmaxHistory()),
        "amax= and history=: give one of them",
    ),
    "no history": (lambda: tessera.AmaxHistory(0), "a history of 0 amaxes"),
    "less than none": (lambda: tessera.AmaxHistory(-1), "a history of -1 amaxes: give its length, 1 or more"),
    "an algorithm": (lambda: tessera.AmaxHistory(algorithm="mean"), "algorithm 'mean': 'max' and 'most_recent'"),
    "a margin": (lambda: tessera.AmaxHistory(margin=65), "margin is 65: give -64 to 64"),
    "pushed": (lambda: tessera.AmaxHistory().push(-1), "amax -1 in a history: it is a magnitude"),
    "the other plane": (lambda: tessera.quantize(X, "mxfp8", planes="row").column, "was quantised to row: give it in"),
    "no such plane": (lambda: tessera.quantize(X, "mxfp8").dequantize("rows"), "plane 'rows': 'row' and 'column' are"),
    "into ints": (
        lambda: tessera.quantize(X, "mxfp8").dequantize(dtype="i8"),
        r"dtype i8: dequantize\(\) gives float32",
    ),
    "empty": (lambda: tessera.QuantizedTensor.empty((3,), "mxfp8"), r"shape \(3,\): give that of a matrix"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    call, why = REFUSED[case]
    with pytest.raises(tessera.InvalidArgumentError, match=why):
        call()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("stack", [(), (2, 3)])
def test_nan_and_infinity_are_counted_and_found(format: str, stack: tuple[int, ...]) -> None:
    x = random(*stack, 8, 64)
    x[..., 5, 7] = np.nan
    x[..., 6, 0] = -np.inf
    x.reshape(-1, 8, 64)[0, 5, 7] = 0 if stack else np.nan
    count, first = (11, "0, 0, 6, 0") if stack else (2, "5, 7")
    with pytest.raises(
        tessera.InvalidArgumentError,
        match=rf"{count} of {x.size} elements are NaN or infinite, the first at \[{first}\]: fix the tensor, or pass",
    ):
        tessera.quantize(x, format)


def test_an_amax_that_does_not_do_says_of_which_matrix() -> None:
    x = random(2, 3, 4, 4)
    x[1, 2] = 1e-37
    with pytest.raises(
        tessera.InvalidArgumentError, match=r"matrix \[1, 2\] of the stack: the row plane's amax is 1e-37"
    ):
        tessera.quantize(x, "nvfp4")


def test_other_devices_are_not_built() -> None:
    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 1)

    for call in (lambda x: tessera.quantize(x, "mxfp8"), tessera.amax):
        with pytest.raises(
            tessera.UnimplementedError, match=r"it is on cuda:1; this build computes on the CPU: give x\.cpu\(\)"
        ):
            call(torch.zeros(2, 2).as_subclass(OnGpu))


def test_shards_have_an_amax_in_common() -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        x = DTensor.from_local(torch.ones(4, 32), init_device_mesh("cpu", (2,)), [Shard(0)])
        for call in (lambda: tessera.quantize(x, "nvfp4"), lambda: tessera.amax([x])):
            with pytest.raises(
                tessera.InvalidArgumentError, match=r"a DTensor: its shards share an amax; give its to_lo"
            ):
                call()
    finally:
        torch.distributed.destroy_process_group()


def test_without_ml_dtypes_there_is_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert tessera.quantize(X, "nvfp4").row.codes.dtype == np.uint8
    with pytest.raises(tessera.InvalidArgumentError, match="NumPy has no float8_e4m3fn: `pip install ml_dtypes`"):
        tessera.quantize(X, "mxfp8")
