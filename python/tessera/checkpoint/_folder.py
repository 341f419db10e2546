"""A checkpoint's folder: names, generations, and how one generation takes the place of another.

    model.safetensors.index.json                    the commit point: it names all others
    model-7-00001-of-00002.safetensors ...          generation 7
    optimizer-7-00001-of-00002.safetensors ...
    optimizer-7.index.json
    extra-7-00001-of-00002.pt ...

Files have a hidden name until they are complete. Rank 0 does what is not of one file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterable
from typing import Any, TypeGuard

from .._arguments import text
from .._errors import AlreadyExistsError, InvalidArgumentError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MARK = "tessera"  # in the index's metadata: what save() wrote
_OURS = re.compile(
    r"\.?(?:model|optimizer|extra)-(\d{1,18})(?:-\d{5}-of-\d{5}\.(?:safetensors|pt)|\.index\.json)(\.new)?"
)
_HIDDEN_INDEX = f".{INDEX}.new"
_MOST_BYTES = 100_000_000  # as the core reads


def data_file(kind: str, generation: int, file: int, files: int) -> str:
    return f"{kind}-{generation}-{file + 1:05}-of-{files:05}.safetensors"


def extra_file(generation: int, file: int, files: int) -> str:
    return f"extra-{generation}-{file + 1:05}-of-{files:05}.pt"


def extra_files(mark: dict[str, Any] | None) -> list[str]:
    """Return the files of what is beside the tensors, by rank."""
    digests, generation = (mark or {}).get("extra"), (mark or {}).get("generation")
    if not isinstance(digests, list) or type(generation) is not int or generation < 0:
        return []
    return [extra_file(generation, file, len(digests)) for file in range(len(digests))]


def optimizer_index(generation: int) -> str:
    return f"optimizer-{generation}.index.json"


def is_optimizer_index(name: Any) -> TypeGuard[str]:
    """A file beside the model's index."""
    return isinstance(name, str) and re.fullmatch(r"optimizer-\d{1,18}\.index\.json", name) is not None


def hidden(name: str) -> str:
    return f".{name}.new"


def read_json(path: str) -> dict[str, Any]:
    """REQUIRES: the core has opened it as an index, which limits size and depth; a file may change since."""
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("metadata", {}), dict):
        raise InvalidArgumentError(f"{path}: it is no index of a checkpoint")
    return found


def mark_of(index: dict[str, Any]) -> dict[str, Any] | None:
    """What save() wrote of the generation; None for other writers."""
    found = index.get("metadata", {}).get(MARK)
    return found if isinstance(found, dict) else None


def _files_of(index: dict[str, Any]) -> set[str]:
    weights = index.get("weight_map")
    return {name for name in weights.values() if isinstance(name, str)} if isinstance(weights, dict) else set()


def path_of(path: Any) -> str:
    try:
        return text("path", os.fspath(path))
    except TypeError:
        raise InvalidArgumentError(f"path {path!r}: give a str or a path") from None


def remove(folder: str, names: Iterable[str]) -> None:
    """Those that are there, and save()'s; what cannot be removed is left to the next save."""
    for name in sorted(names):
        if _OURS.fullmatch(name) or name == _HIDDEN_INDEX:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))


class Folder:
    """Of rank 0, while it saves: nobody else saves into it."""

    def __init__(self, path: str) -> None:
        self.path = path
        os.makedirs(path, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock()
            self._require_ours()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)  # which unlocks it

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyExistsError(f"{self.path}: another save() into this folder is under way") from None
        except OSError:
            pass  # a file system without locks

    def _require_ours(self) -> None:
        """Its files are replaced, which is not done to those of others."""
        names = os.listdir(self.path)
        foreign = SINGLE if SINGLE in names else ""
        self._current: set[str] = set()
        if INDEX in names:
            index = read_json(self._at(INDEX))
            mark = mark_of(index)
            if mark is None:
                foreign = INDEX
            self._current = {INDEX, *_files_of(index)}
            self._current.update(extra_files(mark))
            optimizer = (mark or {}).get("optimizer")
            if is_optimizer_index(optimizer):
                self._current |= {optimizer, *_files_of(read_json(self._at(optimizer)))}
        if foreign:
            raise InvalidArgumentError(
                f"{self.path}: it holds {foreign}, which save() has not written and does not replace: give another "
                "folder"
            )

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def begin(self) -> int:
        """Removes what killed saves left; returns the number of the next generation."""
        numbers = [0]
        for name in os.listdir(self.path):
            ours = _OURS.fullmatch(name)
            if ours is not None:
                numbers.append(int(ours[1]))
            if name == _HIDDEN_INDEX or (ours is not None and name not in self._current):
                os.unlink(self._at(name))
        return max(numbers) + 1

    def commit(self, files: list[str], indexes: dict[str, dict[str, Any]]) -> list[str]:
        """Gives the files their names, and the indexes, of which the model's is the last: from then on they are the
        checkpoint. Returns the names of the old ones. REQUIRES: the files are complete and on the disk under their
        hidden names."""
        names = [*files, *indexes]
        index = self._at(hidden(INDEX))
        written = False
        try:
            for name, content in indexes.items():
                self._write(hidden(name), content)
            written = True
            for name in names[:-1]:
                os.rename(self._at(hidden(name)), self._at(name))
            os.fsync(self._descriptor)
            os.rename(index, self._at(INDEX))
        except BaseException:
            if not written or os.path.exists(index):  # an interrupt may come after the rename
                remove(self.path, {*names[:-1], *map(hidden, names)})
            raise
        os.fsync(self._descriptor)
        return sorted(self._current - {INDEX})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        written = json.dumps(content, indent=1, ensure_ascii=False).encode()
        descriptor = os.open(self._at(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:
            file.write(written)
            file.flush()
            os.fsync(descriptor)
