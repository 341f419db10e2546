"""tessera.quantize() and tessera.amax()."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from .. import _core
from .._arguments import flag, text
from .._errors import InvalidArgumentError
from .._tensors.foreign import type_name
from .._tensors.stacks import Stack, array_of, new_array, stack_of
from .._tensors.torch import is_torch_tensor
from .quantized import PLANES, QuantizedTensor, new_plane, plane_names, refuse_for, spec_of


def quantize(
    x: Any,
    format: str,
    *,
    planes: str | Iterable[str] = PLANES,
    amax: Any = None,
    scaling: str | None = None,
    hadamard: bool = False,
    rounding: str = "nearest",
    seed: int | None = None,
    eps: float = 0.0,
    power_of_two: bool | None = None,
    history: _core.AmaxHistory | None = None,
    nonfinite: str = "error",
) -> QuantizedTensor:
    """Quantises a matrix [M, K], or each of a stack of them [..., M, K], to 8- or 4-bit floats with scales.

    docs/formats/quantized.md states the formulas, which are TransformerEngine's: the bytes are the same on any machine,
    with any number of threads. The call releases the GIL and uses all CPUs that the process may.

    Args:
        x: A NumPy array (bf16 from ml_dtypes) or a torch tensor on the CPU, of f32, f16 or bf16; the result's arrays
            are of the same library. Dense rows are read where they lie; otherwise, as in a transposed view, a copy
            is made first. Autograd does not see it: a tensor that requires a gradient is detached.
        format: "fp8_e4m3", "fp8_e5m2" (one scale), "fp8_block_1x128", "fp8_block_128x128", "mxfp8", "mxfp8_e5m2" or
            "nvfp4".
        planes: "row" has blocks along K, "column" along M; a tensor that is read in both directions needs both. nvfp4
            packs pairs of codes along a plane's rows: K must be even for "row", M for "column".
        amax: fp8 with one scale, and nvfp4: the largest magnitude, if it is known or shared with other shards: one
            for all matrices, or an array with one for each. {"row": ..., "column": ...} if they differ, as they do
            with a Hadamard transform. By default it is computed for each matrix.
        scaling: nvfp4: one scale for "16x16" elements (weights; the default) or for "1x16" (activations, gradients).
        hadamard: nvfp4 of bf16: 16 elements along M go through a random Hadamard transform on their way to the column
            plane; M is a multiple of 16. That plane cannot be dequantised.
        rounding: nvfp4: "nearest", or "stochastic" by `seed` and an element's place in the stack.
        seed: 0 to 2^64 - 1; for stochastic rounding.
        eps: fp8: smaller amaxes count as this.
        power_of_two: fp8: whether scales are powers of two; by default only those of blocks are.
        history: fp8 with one scale: *delayed* scaling. The scale follows from the amaxes that were pushed before, and
            this tensor's amax is pushed once it is quantised; for a stack, whose matrices share the scale, the largest.
        nonfinite: "error" refuses NaN, infinity, and for nvfp4 amaxes outside of [7.9e-36, 7.5e35] but 0; "propagate"
            takes them through the formulas.

    Raises:
        InvalidArgumentError: For NaN and infinity the error gives their number and the place of the first.
        UnimplementedError: The tensor is on another device.
    """
    stack = stack_of("given to quantize()", x)
    names = plane_names(planes)
    spec = spec_of(
        format,
        scaling=scaling,
        hadamard=flag("hadamard", hadamard),
        rounding=text("rounding", str(rounding)),
        seed=_seed(seed, rounding),
        eps=_number("eps", eps),
        power_of_two=None if power_of_two is None else flag("power_of_two", power_of_two),
        margin=_margin(history),
        nonfinite=text("nonfinite", str(nonfinite)),
    )
    new = partial(new_array, stack.of_torch)
    matrices = stack.shape[:-2]
    amaxes = _amaxes(stack, spec, names, amax, history)
    made = {
        name: new_plane(
            spec,
            name,
            stack.shape,
            new,
            array_of(stack.of_torch, amaxes[name], matrices) if spec.needs_amax else None,
        )
        for name in names
    }
    row, column = (made[name]._addresses() if name in made else None for name in PLANES)
    _core.quantize(stack.matrices, spec, row, column)
    if history is not None:
        history.push(max(_core.matrix_amaxes(stack.matrices), default=0.0))
    return QuantizedTensor(spec, stack.shape, made)


def amax(x: Any) -> Any:
    """The largest magnitude of a tensor, as a float; for a list of tensors a list of floats, in one pass on all CPUs.

    A tensor is NumPy's (bf16 from ml_dtypes) or torch's on the CPU, of f32, f16 or bf16 and of any shape. NaN does not
    count, infinity does. An empty tensor, or one of only NaN, gives 0.
    """
    if (
        is_torch_tensor(x)
        or hasattr(x, "__array__")
        or not isinstance(x, Iterable)
        or isinstance(x, str | bytes | Mapping)
    ):
        return _core.tensor_amaxes([stack_of("given to amax()", x, any_dims=True).matrices])[0]
    stacks = [stack_of(f"{i} given to amax()", each, any_dims=True) for i, each in enumerate(x)]
    return _core.tensor_amaxes([stack.matrices for stack in stacks])


def _seed(seed: Any, rounding: str) -> int:
    if rounding != "stochastic":
        if seed is not None:
            raise InvalidArgumentError(
                f"seed={seed!r} is only for stochastic rounding: set rounding='stochastic', or leave it out"
            )
        return 0
    if seed is None:
        raise InvalidArgumentError("stochastic rounding: give a seed=, another one at every step")
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise InvalidArgumentError(f"seed={seed!r}: give a whole number from 0 to 2^64 - 1")
    return number


def _number(what: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(f"{what}={value!r}: give a number") from None


def _margin(history: Any) -> int:
    if history is None:
        return 0
    if not isinstance(history, _core.AmaxHistory):
        raise InvalidArgumentError(f"history: give a tessera.AmaxHistory, not a {type_name(history)}")
    return history.margin


def _amaxes(
    stack: Stack, spec: _core.QuantSpec, planes: tuple[str, ...], amax: Any, history: _core.AmaxHistory | None
) -> dict[str, list[float]]:
    """By plane, one for each matrix, if the format needs them."""
    count = math.prod(stack.shape[:-2])
    if history is not None:
        if not spec.format.startswith("fp8") or not spec.needs_amax:
            refuse_for(spec, "history", "fp8 with one scale")
        if amax is not None:
            raise InvalidArgumentError("amax= and history=: give one of them, a history has its own")
        return dict.fromkeys(planes, [history.amax] * count)
    if not spec.needs_amax:
        if amax is not None:
            refuse_for(spec, "amax", "nvfp4 and fp8 with one scale")
        return {}
    if amax is not None:
        return _given_amaxes(stack, spec, planes, amax)
    found = {name: spec.hadamard and name == "column" for name in planes}
    computed = {hadamard: _core.matrix_amaxes(stack.matrices, hadamard) for hadamard in set(found.values())}
    return {name: computed[hadamard] for name, hadamard in found.items()}


def _given_amaxes(stack: Stack, spec: _core.QuantSpec, planes: tuple[str, ...], amax: Any) -> dict[str, list[float]]:
    by_plane = amax if isinstance(amax, Mapping) else dict.fromkeys(planes, amax)
    if spec.hadamard and len(planes) > 1 and by_plane is not amax:
        raise InvalidArgumentError(
            "amax= under a Hadamard transform: the planes have one each, give {'row': ..., 'column': ...}"
        )
    if missing := [name for name in planes if name not in by_plane]:
        raise InvalidArgumentError(f"amax={amax!r} lacks that of the {missing[0]} plane")
    return {name: _amax_values(by_plane[name], stack.shape[:-2]) for name in planes}


def _amax_values(amax: Any, shape: tuple[int, ...]) -> list[float]:
    """One value for each matrix of a stack of that shape."""
    import numpy

    if is_torch_tensor(amax):
        amax = amax.detach().double().cpu().numpy()
    try:
        with numpy.errstate(over="ignore"):  # the core refuses infinity
            values = numpy.asarray(amax, dtype=numpy.float32)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"amax={amax!r}: give a number, or an array of one for each matrix") from None
    if values.shape not in ((), shape):
        raise InvalidArgumentError(
            f"amax has shape {values.shape}, the stack {shape}: give one for each matrix, or one for all"
        )
    return [float(value) for value in numpy.broadcast_to(values, shape).reshape(-1)]
