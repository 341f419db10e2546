"""save(): every rank writes its own rows, and a generation of files appears as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from .. import _core
from .._arguments import text
from .._errors import InvalidArgumentError, MismatchError
from ..etp.state_kinds import kind_of
from ._checksums import CHECKSUMS, ZERO, Sum, added, of_region, sum_of, text_of
from ._extra import digest_of, packed
from ._extra import write as write_extra
from ._folder import INDEX, MARK, Folder, data_file, extra_file, extra_files, hidden, optimizer_index, path_of, remove
from ._optimizer import States, merged, states_of
from ._parts import Part, parts_of, size_of
from ._plan import Plan, heard, plan, told
from ._ranks import Ranks, as_told, ranks_of


def save(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    group: Any = None,
) -> None:
    """Writes a checkpoint of a model, and of an optimiser if one is given, in place of the last one.

    Tensors are logical and whole, in as many safetensors files as there are ranks, and an index. Every rank writes its
    own rows; nothing is gathered. Whatever happens, the folder holds the old checkpoint or the new one. Collective;
    returns once the new one is on the disk.

    Args:
        model: Its parameters and persistent buffers are sharded by tessera.etp, DTensors (FSDP2, tensor parallelism),
            or plain: then all ranks have them alike, and one of them writes.
        path: A folder, which all ranks see; made if it is not there.
        metadata: Of the caller, in each file: a step, the name of a data set.
        extra: Other state, of each rank its own, by name: whatever can be pickled (a random generator's state), or has
            a state_dict() (a scheduler, a data loader). None: there is none.
        group: The ranks that save together: a torch ProcessGroup, or what etp.init_group() returns. None: torch's
            default group, else that of the ETP model, else this process.

    Raises:
        InvalidArgumentError: For what cannot be saved, and a folder with a checkpoint of another writer.
        MismatchError: Ranks call with different arguments, or do not hold all of a tensor.
        ResourceExhaustedError: The disk is full. An error of one rank is an error of all, and the old checkpoint stays.
    """
    ranks = ranks_of(model, group)
    saving = _Saving(ranks)
    try:
        saving.begin(model, optimizer, path, metadata, extra)
        ranks.share("save: create", saving.create)
        written = ranks.share("save: write", saving.write)
        old = ranks.share("save: commit", lambda: saving.commit(written))[0]
        ranks.share("save: remove", lambda: remove(saving.path, list(old)[ranks.rank :: ranks.size]))
    finally:
        saving.end()


class _Files:
    """Of the model, or of the optimiser."""

    def __init__(self, kind: str, parts: list[Part], plan: Plan, rank: int) -> None:
        self.kind = kind
        self.plan = plan
        self.parts = {part.name: part for part in parts}
        self.writes = plan.writes[rank]
        self.sums: dict[str, Sum] = {}  # of what this rank has written

    def names(self, generation: int) -> list[str]:
        count = len(self.plan.files)
        return [data_file(self.kind, generation, file, count) for file in range(count)]

    def index(self, generation: int, metadata: dict[str, Any]) -> dict[str, Any]:
        names = self.names(generation)
        total = sum(
            size_of(tuple(((0, size),) for size in shape)) * _core.bits_of(dtype) // 8
            for tensors in self.plan.files
            for _, dtype, shape in tensors
        )
        return {
            "metadata": {"total_size": total, **metadata},
            "weight_map": {name: names[file] for name, file in sorted(self.plan.file_of.items())},
        }


class _Saving:
    """One call, on one rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._folder: Folder | None = None  # of rank 0
        self._made: list[str] = []  # by this rank, still with their hidden names
        self._files: list[_Files] = []

    def begin(self, model: torch.nn.Module, optimizer: Any, path: Any, metadata: Any, extra: Any) -> None:
        parts: list[Part] = []
        states: list[States] = []

        def look() -> dict[str, Any]:
            self.path = path_of(path)
            self._metadata = _checked(metadata)
            self._extra = None if extra is None else packed(extra)
            found = parts_of(model)
            parts.extend(found.parts.values())
            if optimizer is not None:
                states.append(states_of(optimizer, found))
            said: dict[str, Any] = {"path": self.path, "metadata": self._metadata, "model": told(parts)}
            said["tied"] = {name: primary for name, primary in found.names.items() if name != primary}
            said["extra"] = None if self._extra is None else self._extra[1]
            if states:
                said["optimizer"] = {"tensors": told(states[0].parts), **states[0].plain()}
                said["kind"] = kind_of(optimizer)
            if self._ranks.rank == 0:
                self._folder = Folder(self.path)
                said["generation"] = self._folder.begin()
            return said

        said = self._ranks.share("save: begin", look)
        with as_told("save: begin"):
            if any((each["path"], each["metadata"]) != (self.path, self._metadata) for each in said):
                raise MismatchError(
                    "save(): ranks give different paths or metadata: call it with the same ones on all ranks"
                )
            if len({"optimizer" in each for each in said}) > 1:
                raise MismatchError("save(): some ranks give an optimizer and some do not")
            if len({each["extra"] is None for each in said}) > 1:
                raise MismatchError("save(): some ranks give extra and some do not: give {} where there is none")
            if len({each.get("kind") for each in said}) > 1:
                raise MismatchError("save(): ranks give optimizers of different classes")
            self._tied = {name: primary for each in said for name, primary in each["tied"].items()}
            self._kind = said[0].get("kind", "")
            self._extras = [each["extra"] for each in said] if self._extra is not None else None
            self._generation = int(said[0]["generation"])
            self._plan(parts, states, said)

    def _plan(self, parts: list[Part], states: list[States], said: list[dict[str, Any]]) -> None:
        rank, size = self._ranks.rank, self._ranks.size

        def add(kind: str, parts: list[Part], values: list[Any]) -> None:
            held, cut = heard(values)
            self._files.append(_Files(kind, [part.as_said(cut) for part in parts], plan(held, size), rank))

        add("model", parts, [each["model"] for each in said])
        if states:
            add("optimizer", states[0].parts, [each["optimizer"]["tensors"] for each in said])
            self._plain = merged([each["optimizer"] for each in said])

    def _hidden(self, name: str) -> str:
        return os.path.join(self.path, hidden(name))

    def _file_metadata(self, files: _Files) -> dict[str, str]:
        return {"format": "pt", **self._metadata} if files.kind == "model" else dict(self._metadata)

    def create(self) -> None:
        """The files with this rank's number."""
        for files in self._files:
            if self._ranks.rank < len(files.plan.files):
                path = self._hidden(files.names(self._generation)[self._ranks.rank])
                tensors = files.plan.files[self._ranks.rank]
                self._made.append(path)
                _core.SharedSafetensors.create(path, tensors, self._file_metadata(files))

    def write(self) -> dict[str, Any]:
        """This rank's rows, into all files, beginning with its own: ranks then write different ones. Returns checksums
        of what it has written."""
        written = []
        for files in self._files:
            count = len(files.plan.files)
            for step in range(count):
                written += self._write_into(files, (self._ranks.rank + step) % count)
        for file in written:
            file.sync()
        sums = {files.kind: {name: text_of(found) for name, found in files.sums.items()} for files in self._files}
        if self._extra is None:
            return {"sums": sums}
        content = self._extra[0]
        path = self._hidden(extra_file(self._generation, self._ranks.rank, self._ranks.size))
        self._made.append(path)
        write_extra(path, content)
        return {"sums": sums, "extra": digest_of(content)}

    def _write_into(self, files: _Files, number: int) -> list[_core.SharedSafetensors]:
        tensors = files.plan.files[number]
        writes = [(name, files.writes[name]) for name, _, _ in tensors if name in files.writes]
        if not writes:
            return []
        path = self._hidden(files.names(self._generation)[number])
        file = _core.SharedSafetensors.open(path, tensors, self._file_metadata(files))
        for name, regions in writes:
            part = files.parts[name]
            memory = part.elements()
            address = memory.data_ptr()
            for region in part.regions:
                count = size_of(region) * _core.bits_of(part.dtype) // 8
                if region in regions:
                    file.write_slice(name, region, address, count)
                    found = of_region(part.dtype, part.shape, region, address)
                    files.sums[name] = added((files.sums.get(name, ZERO), found))
                address += count
        return [file]

    def commit(self, written: list[Any]) -> list[str]:
        """By rank 0: from hidden names to the checkpoint. Returns what it replaces: large files take long to remove."""
        if self._folder is None:
            return []
        generation = self._generation
        names = [name for files in self._files for name in files.names(generation)]
        sums = {files.kind: _sums(files, [each["sums"][files.kind] for each in written]) for files in self._files}
        mark: dict[str, Any] = {"generation": generation, "checksums": sums["model"]}
        if self._tied:
            mark["tied"] = self._tied
        if self._extras is not None:
            mark["extra"] = [
                {"checksum": each["extra"], "values": values}
                for each, values in zip(written, self._extras, strict=True)
            ]
            names += extra_files(mark)
        indexes = {}
        for files in self._files[1:]:
            mark["optimizer"] = optimizer_index(generation)
            plain = {**self._plain, "kind": self._kind, "checksums": sums["optimizer"]}
            indexes[mark["optimizer"]] = files.index(generation, plain)
        indexes[INDEX] = self._files[0].index(generation, {MARK: mark})
        return self._folder.commit(names, indexes)

    def end(self) -> None:
        for path in self._made:
            with contextlib.suppress(OSError):  # it has its name, or rank 0 has removed it
                os.unlink(path)
        if self._folder is not None:
            self._folder.close()


def _sums(files: _Files, told: list[dict[str, str]]) -> dict[str, str]:
    """Return the checksum of each tensor, from those of the parts that ranks have written."""
    return {
        name: text_of(added(sum_of(each[name]) for each in told if name in each)) for name in sorted(files.plan.file_of)
    }


def _checked(metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(f"metadata {metadata!r}: give a mapping of str to str")
    checked = {text("metadata: the key", key): text(f"metadata {key!r}:", value) for key, value in metadata.items()}
    if CHECKSUMS in checked:
        raise InvalidArgumentError(f"metadata: the key {CHECKSUMS!r} is where files note checksums: use another one")
    return checked
