"""What is seen of tensors, and how it is compared with plain torch's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

RELATIVE = 1e-5  # of an element
OF_LARGEST = 1e-6  # of the largest finite element: sums over ranks cancel, and are added in another order


class Mismatch(Exception):
    """Something is not as in plain torch."""


@dataclass(frozen=True)
class Snapshot:
    """What a user sees of a tensor, and a copy of the whole of its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: torch.Tensor


def take_snapshot(value: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a Snapshot of a tensor, and anything else as it is. Collective if `whole` is."""
    if not isinstance(value, torch.Tensor):
        return value
    shape, dtype = tuple(value.shape), value.dtype
    with torch.no_grad():
        plain = whole(value).detach()
        plain = plain.clone() if plain.layout is torch.strided else plain.to_dense().clone()
    return Snapshot(shape, dtype, plain.resolve_conj().resolve_neg())


def shapes_of(values: Sequence[Any]) -> list[tuple[int, ...] | None]:
    return [tuple(value.shape) if isinstance(value, torch.Tensor | Snapshot) else None for value in values]


def require_equal(what: str, actual: Sequence[Any], expected: Sequence[Any], has_values: bool = True) -> bool:
    """Return whether all bits are equal.

    Raises:
        Mismatch: A shape, a dtype or a value differs by more than rounding.
    """
    if len(actual) != len(expected):
        raise Mismatch(f"{what}: {len(actual)} results for {len(expected)}")
    exact = [_same(what, *pair, has_values) for pair in zip(actual, expected, strict=True)]  # all are compared
    return all(exact)


def _same(what: str, actual: Any, expected: Any, has_values: bool) -> bool:
    if not isinstance(expected, Snapshot):
        if type(actual) is type(expected) is float:
            return _same_values(what, torch.tensor(actual), torch.tensor(expected))
        if has_values and (type(actual) is not type(expected) or actual != expected):
            raise Mismatch(f"{what}: {str(actual)[:60]} for {str(expected)[:60]}")
        return True
    if not isinstance(actual, Snapshot):
        raise Mismatch(f"{what}: {type(actual).__name__} for a tensor")
    for shape in (actual.shape, tuple(actual.value.shape)):
        if shape != expected.shape:
            raise Mismatch(f"{what}: shape {shape} for {expected.shape}")
    for dtype in (actual.dtype, actual.value.dtype):
        if dtype != expected.dtype:
            raise Mismatch(f"{what}: {dtype} for {expected.dtype}")
    return not has_values or _same_values(what, actual.value, expected.value)


def _same_values(what: str, actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if bool(((actual == expected) | ((actual != actual) & (expected != expected))).all()):
        return True
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    if not actual.is_floating_point():
        raise Mismatch(f"{what}: {int((actual != expected).sum())} of {actual.numel()} values differ")
    actual, expected = actual.double(), expected.double()
    finite = expected[expected.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    if not torch.allclose(actual, expected, rtol=RELATIVE, atol=OF_LARGEST * largest, equal_nan=True):
        difference = float((actual - expected).abs().nan_to_num(nan=float("inf")).max())
        raise Mismatch(f"{what}: values differ by up to {difference:.3g}, the largest is {largest:.3g}")
    return False


def same_bits(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether values are equal, whatever they are."""
    try:
        return require_equal("", first, second)
    except Mismatch:
        return False


def add_to_digest(digest: Any, values: Sequence[Any], has_values: bool) -> None:
    """Add values to a hash of hashlib."""
    for value in values:
        if isinstance(value, Snapshot):
            digest.update(repr((value.shape, value.dtype)).encode())
            if has_values:
                # A copy, since contiguous() keeps any stride of one element, and view(dtype) does not take that.
                flat = torch.empty(value.value.numel(), dtype=value.value.dtype).copy_(value.value.flatten())
                digest.update(flat.view(torch.uint8).numpy().tobytes())
        elif has_values:
            digest.update(repr(value).encode())


def new_digest() -> Any:
    return hashlib.sha256()
