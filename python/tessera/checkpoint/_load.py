"""load(): every rank reads its own rows, whatever ranks have written them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._arguments import flag
from .._errors import Error, InvalidArgumentError, MismatchError, NotFoundError
from .._tensors.layouts import is_dtensor
from .._tensors.torch import written
from ..etp._views import update
from ..etp._weights.parameter import LogicalParameter
from ._folder import INDEX, is_optimizer_index, mark_of, path_of, read_json
from ._optimizer import Saved, names_of, require_groups, saved_of, state_tensor
from ._parts import Region, parts_of
from ._ranks import Ranks, as_told, ranks_of
from ._reader import Reader, WholeTensors, open_reader

_SHOWN = 5  # names of a kind in a message
_ATTEMPTS = 5


class Loaded(NamedTuple):
    """What load() found."""

    metadata: dict[str, str]
    """Of the first file; save()'s metadata among it."""
    missing: list[str]
    """With strict=False: names of the model that the checkpoint lacks, which stay as they are."""
    unexpected: list[str]
    """With strict=False: names of the checkpoint that the model lacks."""


def load(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    group: Any = None,
) -> Loaded:
    """Reads a checkpoint into a model, and into an optimiser if one is given.

    Every rank reads its own rows: the checkpoint may come from any number of ranks, from another way of sharding or
    none, and be one of Hugging Face's, without an optimiser. Collective.

    Args:
        model: As for save(); also one that is not sharded. Its weights are written in place.
        optimizer: One with the same parameter groups. It need not have made a step.
        path: A folder, an index, or a .safetensors file.
        strict: Whether names that one side lacks are an error, as in load_state_dict().
        group: As for save().

    Raises:
        NotFoundError: There is no such checkpoint, or it has no optimiser.
        InvalidArgumentError: Names are missing or unexpected, or a tensor has another shape or dtype: they are named,
            and nothing has been written. Or a file is damaged; if that shows only while rows are read, the model holds
            parts of it.
        MismatchError: Ranks call with different arguments, or see different checkpoints.
    """
    ranks = ranks_of(model, group)
    loading = _Loading(ranks)
    loading.open(model, optimizer, path, strict)
    if optimizer is not None:
        ranks.share("load: optimizer", lambda: loading.read_optimizer(optimizer))
    loading.read_model(model)
    if optimizer is not None:
        ranks.share("load: optimizer state", lambda: loading.give_to(optimizer))
    return loading.loaded


class _Opened(NamedTuple):
    model: Reader
    optimizer: WholeTensors | None
    saved: Saved | None
    digest: str


class _Loading:
    """One call, on one rank."""

    loaded: Loaded

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sources: dict[str, str] = {}  # the name in the file of each part that is there

    def open(self, model: torch.nn.Module, optimizer: Any, path: Any, strict: Any) -> None:
        def look() -> dict[str, Any]:
            self._path = path_of(path)
            self._strict = flag("strict", strict)
            self._model = parts_of(model)
            self._names = None if optimizer is None else names_of(optimizer, self._model)
            self._opened = _opened(self._path, optimizer is not None)
            self._tensors = self._opened.model.tensors
            missing, unexpected = self._compare()
            if optimizer is not None and self._opened.saved is not None:
                require_groups(optimizer, self._names or [], self._opened.saved, self._path)
                self._plan_optimizer(self._opened.saved)
            return {
                "said": [self._path, self._strict, self._opened.digest],
                "missing": missing,
                "unexpected": unexpected,
                "cut": [part.name for part in self._model.parts.values() if part.says],
            }

        said = self._ranks.share("load: open", look)
        with as_told("load: open"):
            if any(each["said"] != said[0]["said"] for each in said):
                raise MismatchError(
                    f"load(): ranks give different arguments, or see different checkpoints in {self._path}: call it "
                    "with the same ones on all ranks, and not while another job saves there"
                )
            cut = {name for each in said for name in each["cut"]}
            missing = sorted({name for each in said for name in each["missing"]})
            unexpected = sorted(set.intersection(*[set(each["unexpected"]) for each in said]))
        for name, part in self._model.parts.items():
            self._model.parts[name] = part.as_said(cut)
        if self._strict and (missing or unexpected):
            wrong = [_list("missing: ", missing), _list("not in the model: ", unexpected)]
            raise InvalidArgumentError(
                f"{self._path}: it is no checkpoint of this model: {'; '.join(filter(None, wrong))}; strict=False "
                "loads what is in both"
            )
        self.loaded = Loaded(dict(self._opened.model.metadata), missing, unexpected)

    def _compare(self) -> tuple[list[str], list[str]]:
        """Names that only one side has; throws for shapes and dtypes. A tied tensor may have any of its names."""
        wrong = []
        for name, primary in self._model.names.items():
            if name in self._tensors and primary not in self._sources:
                self._sources[primary] = name
        for primary, name in self._sources.items():
            part = self._model.parts[primary]
            if self._tensors[name] != (part.dtype, part.shape):
                wrong.append(f"{name} is {_shown(*self._tensors[name])}, in the model {_shown(part.dtype, part.shape)}")
        if wrong:
            raise InvalidArgumentError(f"{self._path}: other tensors than the model's: {_list('', wrong)}")
        missing = [name for name in self._model.parts if name not in self._sources]
        return missing, [name for name in self._tensors if name not in self._model.names]

    # --- reading

    def read_model(self, model: torch.nn.Module) -> None:
        """In place. All ranks enter and leave the update, whatever happens in it."""
        failed: list[BaseException] = []
        with update(model), torch.no_grad():
            parts = {primary: self._model.parts[primary] for primary in self._sources}
            for part in parts.values():
                if part.weight is not None:
                    part.weight.make_rows()
            try:
                for primary, name in self._sources.items():
                    part = parts[primary]
                    memory = part.memory if part.weight is None else part.weight.local
                    _read(self._opened.model, name, part.regions, memory)
                    tensor = self._model.tensors[primary]
                    if not isinstance(tensor, LogicalParameter):
                        written(tensor)
            except BaseException as error:
                failed.append(error)

        def done() -> None:
            for error in failed:
                if isinstance(error, Error):
                    raise type(error)(f"{error}; the model holds only a part of the checkpoint now") from None
                raise error

        self._ranks.share("load: read", done)

    def _plan_optimizer(self, saved: Saved) -> None:
        """Checks the states' tensors."""
        checkpoint = self._opened.optimizer
        assert checkpoint is not None
        tensors = checkpoint.tensors
        self._states: list[tuple[int, str, str, str, tuple[int, ...]]] = []
        for number, name in enumerate(self._names or []):
            for key in saved.tensors.get(name, []):
                if f"{name}.{key}" not in tensors:
                    raise InvalidArgumentError(
                        f"{checkpoint.path}: it has no {name}.{key}, of which its metadata tells"
                    )
                dtype, shape = tensors[f"{name}.{key}"]
                self._states.append((number, name, key, dtype, shape))

    def read_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Into new memory."""
        opened = self._opened
        assert opened.optimizer is not None
        assert opened.saved is not None
        state: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(self._names or []):
            if name in opened.saved.values:
                state[number] = dict(opened.saved.values[name])
        for number, name, key, dtype, shape in self._states:
            part, parameter = self._model.parts[name], self._model.tensors[name]
            made = state_tensor(key, dtype, shape, part, parameter)
            local = made._local_tensor if is_dtensor(made) else made
            whole: list[Region] = [tuple(((0, size),) for size in shape)]
            _read(opened.optimizer, f"{name}.{key}", part.regions if shape == part.shape else whole, local)
            if isinstance(parameter, LogicalParameter) and shape == part.shape:
                made = parameter.etp.rows_as_value(made.view(parameter.etp.local.shape))
            state[number][key] = made
        groups = []
        numbers = iter(range(len(self._names or [])))
        for group, (_, options) in zip(optimizer.param_groups, opened.saved.groups, strict=True):
            groups.append({**options, "params": [next(numbers) for _ in group["params"]]})
        self._state = {"state": state, "param_groups": groups}

    def give_to(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.load_state_dict(self._state)


def _read(reader: Reader, name: str, regions: Sequence[Region], memory: torch.Tensor) -> None:
    if not memory.numel():
        return
    packed = memory if memory.is_contiguous() else torch.empty(memory.shape, dtype=memory.dtype)
    reader.read(name, regions, packed)
    if packed is not memory:
        memory.copy_(packed)


def _opened(path: str, optimizer: bool) -> _Opened:
    """Opens all files at once: from then on it does not matter whether a save() replaces them."""
    for attempt in range(_ATTEMPTS):
        before = _index_of(path)
        try:
            return _open_once(path, optimizer)
        except NotFoundError:
            if attempt + 1 == _ATTEMPTS or _index_of(path) == before:
                raise
    raise AssertionError


def _index_of(path: str) -> bytes:
    with contextlib.suppress(OSError), open(os.path.join(path, INDEX), "rb") as file:
        return file.read()
    return b""


def _open_once(path: str, optimizer: bool) -> _Opened:
    reader = open_reader(path)
    index = read_json(reader.path) if reader.path.endswith(".json") else {}
    told: list[Any] = [reader.tensors, index.get("weight_map"), reader.metadata]
    states = saved = None
    if optimizer:
        name = (mark_of(index) or {}).get("optimizer")
        if not is_optimizer_index(name):
            raise NotFoundError(f"{reader.path}: it has no optimiser: load(model, None, path) loads only the model")
        beside = os.path.join(os.path.dirname(reader.path), name)
        states = WholeTensors(beside)
        metadata = read_json(beside).get("metadata", {})
        saved = saved_of(metadata, beside)
        told += [states.tensors, metadata]
    digest = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16)
    return _Opened(reader, states, saved, digest.hexdigest())


def _shown(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _list(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = len(names) - _SHOWN
    shown = ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return what + shown
