"""Notes of save() in the index, beside the tensors' places, as a file tells them, which may be anything."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from .._errors import InvalidArgumentError
from ._checksums import sum_of
from ._extra import read
from ._folder import extra_files, mark_of


class Noted(NamedTuple):
    """Of one checkpoint; empty where another program has written it."""

    path: str  # of the index
    tied: dict[str, str]  # other names of tensors, and the ones in the files
    checksums: dict[str, str]  # of stored tensors
    files: dict[str, str]  # of each tensor
    values: list[dict[str, str]]  # digests of what is beside the tensors, by rank and name
    extra: list[tuple[str, str]]  # its files and their checksums, by rank
    optimizer_checksums: dict[str, str]
    optimizer_files: dict[str, str]

    def with_optimizer(self, index: dict[str, Any]) -> Noted:
        """Return it with what the optimiser's index notes."""
        try:
            sums = _checksums(index.get("metadata", {}).get("checksums", {}))
        except (TypeError, ValueError, AttributeError):
            raise _damaged(self.path) from None
        return self._replace(optimizer_checksums=sums, optimizer_files=_files(index))

    def file_of(self, kind: str, name: str) -> str:
        """Return the path of the file with a tensor; empty if there is no index."""
        file = (self.files if kind == "model" else self.optimizer_files).get(name, "")
        return file and os.path.join(os.path.dirname(self.path), file)

    def read_extra(self, verify: bool, unpickle: bool) -> list[dict[str, Any]]:
        """Return what is beside the tensors, by the rank that has saved it."""
        folder = os.path.dirname(self.path)
        return [read(os.path.join(folder, name), digest if verify else None, unpickle) for name, digest in self.extra]


def noted_of(path: str, index: dict[str, Any], tensors: dict[str, Any], checksums: dict[str, str]) -> Noted:
    """Raises InvalidArgumentError for what save() does not write."""
    mark = mark_of(index) or {}
    try:
        tied = {
            _text(name): _text(other)
            for name, other in mark.get("tied", {}).items()
            if name not in tensors and other in tensors
        }
        extra = [(_text(each["checksum"]), dict(each["values"])) for each in mark.get("extra", [])]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damaged(path) from None
    names = extra_files(mark)
    values = [{_text(name): _text(digest) for name, digest in each.items()} for _, each in extra]
    files = [(name, digest) for name, (digest, _) in zip(names, extra, strict=True)] if extra else []
    return Noted(path, tied, checksums, _files(index), values, files, {}, {})


def _checksums(value: Any) -> dict[str, str]:
    for text in value.values():
        sum_of(text)
    return dict(value)


def _files(index: dict[str, Any]) -> dict[str, str]:
    found = index.get("weight_map")
    return {name: file for name, file in found.items() if isinstance(file, str)} if isinstance(found, dict) else {}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _damaged(path: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path}: its metadata is none that save() wrote: load another checkpoint")
