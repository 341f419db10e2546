"""State of each rank that a program saves beside the tensors: of schedulers, random generators and data loaders."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from .._arguments import text
from .._errors import DataLossError, InvalidArgumentError, NotFoundError


def packed(extra: Any) -> tuple[bytes, dict[str, str]]:
    """Return a file's content, and a digest of each value."""
    if not isinstance(extra, Mapping):
        raise InvalidArgumentError(f"extra {extra!r}: give a mapping of names to states, or to what has a state_dict()")
    values, digests = {}, {}
    for key, value in extra.items():
        name = text("extra: the key", key)
        values[name] = value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        try:
            digests[name] = digest_of(_packed(values[name]))
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            raise InvalidArgumentError(f"extra {name!r}: it cannot be pickled: {error}") from error
    return _packed(values), digests


def _packed(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def write(path: str, content: bytes) -> None:
    """Make a file, which is on the disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def read(path: str, saved: str | None, unpickle: bool) -> dict[str, Any]:
    """Return what one rank has saved. Objects are made only where `unpickle` allows it, as a file can then run code."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise NotFoundError(f"{path}: there is no such file") from None
    found = digest_of(content)
    if saved is not None and found != saved:
        raise DataLossError(
            f"{path}: the file is damaged: its checksum is {found}, and was {saved} when it was saved: copy it again, "
            "or load another checkpoint; verify=False loads what is there"
        )
    try:
        with torch.serialization.safe_globals(_arrays()):
            values = torch.load(io.BytesIO(content), weights_only=not unpickle)
    except pickle.UnpicklingError as error:
        raise InvalidArgumentError(
            f"{path}: extra has objects of a program, whose classes a file must not name "
            f"({str(error).splitlines()[0]}): load(unpickle=True) makes them, if you trust the file"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DataLossError(f"{path}: it holds no state that save() wrote: {error}") from None
    if not isinstance(values, dict):
        raise DataLossError(f"{path}: it holds no state that save() wrote")
    return values


def _arrays() -> list[Any]:
    """Return what NumPy's arrays and generators' states are pickled by, which run no code of the file's."""
    try:
        import numpy
        from numpy.dtypes import (
            Float32DType,
            Float64DType,
            Int32DType,
            Int64DType,
            UInt8DType,
            UInt32DType,
            UInt64DType,
        )
    except ImportError:
        return []
    core = getattr(numpy, "_core", None) or numpy.core  # before NumPy 2
    kinds = [Float32DType, Float64DType, Int32DType, Int64DType, UInt8DType, UInt32DType, UInt64DType]
    return [core.multiarray._reconstruct, core.multiarray.scalar, numpy.ndarray, numpy.dtype, *kinds]
