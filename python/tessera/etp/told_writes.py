"""Messages to ranks that have left a loop in etp.join(), from those in it: operations in place, as text, which they
make on their rows, and the values of what every rank has whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .digests import bytes_of
from .refusals import REDUCED
from .tensor import LogicalTensor

_PLAIN = (bool, int, float, str, type(None))
_MOST_DIMS = 8
_DTYPES = {str(each).removeprefix("torch."): each for each in (*REDUCED, torch.int32, torch.int64, torch.bool)}
_KINDS = ("parameter", "gradient")
Told = dict[str, Any]


def encode(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], parameters: Sequence[torch.Tensor], gradients: Sequence[Any]
) -> Told | None:
    """Return an operation on parameters of a list, their gradients and numbers as what JSON can hold; None: it has
    other operands."""
    places: dict[Any, tuple[str, int]] = {}
    for kind, tensors in zip(_KINDS, (parameters, gradients), strict=True):
        for place, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor):
                places[_key(tensor)] = kind, place
    try:
        told = [_encoded(each, places) for each in args], {key: _encoded(each, places) for key, each in kwargs.items()}
    except LookupError:
        return None
    return {"operation": func.name(), "args": told[0], "kwargs": told[1]}


def _key(tensor: torch.Tensor) -> Any:
    return tensor.store if isinstance(tensor, LogicalTensor) else id(tensor)


def _encoded(value: Any, places: dict[Any, tuple[str, int]]) -> Any:
    if isinstance(value, LogicalTensor):
        if value.chain:
            raise LookupError
        return {"of": list(places[value.store])}
    if isinstance(value, torch.Tensor):
        if id(value) in places:
            return {"of": list(places[id(value)])}
        dtype = str(value.dtype).removeprefix("torch.")
        if value.numel() != 1 or value.is_complex() or dtype not in _DTYPES or value.dim() >= _MOST_DIMS:
            raise LookupError
        return {"number": value.item(), "dtype": dtype, "dims": value.dim()}
    if isinstance(value, (list, tuple)):
        return [_encoded(each, places) for each in value]
    if not isinstance(value, _PLAIN):
        raise LookupError
    return value


def decode(told: Told, parameters: Sequence[torch.Tensor], gradients: Sequence[Any]) -> tuple[Any, list[Any], Told]:
    """Return an operation and its arguments. Throws LookupError, AttributeError, TypeError or ValueError for what
    cannot be one in place, or has a gradient that this rank does not have."""
    namespace, _, rest = told["operation"].partition("::")
    name, _, overload = rest.partition(".")
    if namespace != "aten":
        raise ValueError
    func = getattr(getattr(torch.ops.aten, name), overload or "default")
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        raise ValueError

    def decoded(value: Any) -> Any:
        if isinstance(value, list):
            return [decoded(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "of" not in value:
            number, dims = value["number"], value["dims"]
            if not isinstance(number, (bool, int, float)) or dims not in range(_MOST_DIMS):
                raise ValueError
            return torch.full([1] * dims, number, dtype=_DTYPES[value["dtype"]])
        kind, place = value["of"]
        if place < 0:
            raise LookupError
        found = (parameters, gradients)[_KINDS.index(kind)][place]
        if found is None:
            raise LookupError
        return found

    return func, [decoded(each) for each in told["args"]], {key: decoded(each) for key, each in told["kwargs"].items()}


def pack(parameters: Sequence[torch.Tensor]) -> bytes:
    """Return the values of parameters that every rank has whole, and of their gradients."""
    parts = []
    for parameter in parameters:
        for value in (parameter, parameter.grad):
            parts.append(b"\0" if value is None else b"\1" + bytes_of(_dense(value)).numpy().tobytes())
    return b"".join(parts)


def unpack(told: bytes, parameters: Sequence[torch.Tensor]) -> None:
    """Take them from another rank. Throws ValueError, before it writes, for what cannot be theirs."""
    at = 0

    def value_like(parameter: torch.Tensor) -> torch.Tensor | None:
        nonlocal at
        begin, at = at + 1, at + 1
        if told[begin - 1 : begin] == b"\0":
            return None
        at += parameter.numel() * parameter.element_size()
        if told[begin - 1 : begin] != b"\1" or at > len(told):
            raise ValueError(f"{len(told)} bytes")
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        if value.numel() > 0:
            bytes_of(value).copy_(torch.frombuffer(bytearray(told[begin:at]), dtype=torch.uint8))
        return value

    values = [(value_like(parameter), value_like(parameter)) for parameter in parameters]
    if at != len(told) or any(value is None for value, _ in values):
        raise ValueError(f"{len(told)} bytes")
    for parameter, (value, gradient) in zip(parameters, values, strict=True):
        parameter.data.copy_(value)  # type: ignore[arg-type]
        parameter.grad = gradient


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value if value.layout is torch.strided else value.to_dense()
