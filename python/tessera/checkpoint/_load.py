"""load(): every rank reads its own rows, whatever ranks have written them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._arguments import flag
from .._errors import Error, InvalidArgumentError, MismatchError, NotFoundError
from .._tensors.layouts import is_dtensor
from .._tensors.torch import torch_dtype, written
from ..etp.parameter import LogicalParameter
from ..etp.views import update
from ._checksums import Read, added, damaged, of_region, text_of, unlike, unread
from ._folder import INDEX, is_optimizer_index, mark_of, path_of, read_json
from ._noted import Noted, noted_of
from ._optimizer import Saved, names_of, require_groups, require_optimizer, saved_of, state_tensor
from ._parts import Part, Region, parts_of, size_of
from ._ranks import Ranks, as_told, ranks_of
from ._reader import Reader, Stored, WholeTensors, open_reader

_SHOWN = 5  # names of a kind in a message
_ATTEMPTS = 5
_PIECE = 1 << 24  # elements that are read at once to verify
_FLOATS = frozenset(("f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2"))


class Loaded(NamedTuple):
    """What load() found."""

    metadata: dict[str, str]
    """Of the first file; save()'s metadata among it."""
    missing: list[str]
    """With strict=False: names of the model that the checkpoint lacks, which stay as they are."""
    unexpected: list[str]
    """With strict=False: names of the checkpoint that nobody has read: the model lacks them, or ties them to others."""
    extra: list[dict[str, Any]]
    """Holds what save(extra=) was given, by the rank that gave it."""


def load(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    extra: Mapping[str, Any] | None = None,
    unpickle: bool = False,
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
        cast: Whether floating-point tensors of another dtype are converted to the model's, as copy_() does. Else they
            are an error.
        verify: Whether what is read is compared with the checksums that save() has noted.
        extra: What has load_state_dict(), by the names that were given to save(): each gets what its rank has saved.
        unpickle: Whether extra may have objects of any class, which can run code: for files that you trust.
        group: As for save().

    Raises:
        NotFoundError: There is no such checkpoint, or it has no optimiser.
        InvalidArgumentError: Names are missing or unexpected, or a tensor has another shape or dtype, the optimiser is
            of another kind, or two tensors of the checkpoint are one parameter here: they are named, and nothing has
            been written. Or a file is damaged; if that shows only while rows are read, the model holds parts of it.
        DataLossError: A tensor is not what was saved: it is named with its file. The model holds parts of it.
        MismatchError: Ranks call with different arguments, or see different checkpoints.
    """
    ranks = ranks_of(model, group)
    loading = _Loading(ranks)
    loading.open(model, optimizer, path, Options(strict, cast, verify, extra, unpickle))
    if optimizer is not None:
        ranks.share("load: optimizer", lambda: loading.read_optimizer(optimizer))
        loading.verify("optimizer")
    loading.read_model(model)
    loading.verify("model")
    if optimizer is not None:
        loading.give_to(optimizer)
    ranks.share("load: extra", loading.give_extra)
    return loading.loaded


class Options(NamedTuple):
    """Loads one checkpoint, for one call."""

    strict: Any
    cast: Any
    verify: Any
    extra: Any
    unpickle: Any

    def checked(self) -> Options:
        extra = {} if self.extra is None else self.extra
        if not isinstance(extra, Mapping):
            raise InvalidArgumentError(f"extra {extra!r}: give a mapping of names to what has load_state_dict()")
        for name, value in extra.items():
            if not callable(getattr(value, "load_state_dict", None)):
                raise InvalidArgumentError(
                    f"extra {name!r} is a {type(value).__name__} without load_state_dict(): take its value from what "
                    "load() returns"
                )
        return Options(
            flag("strict", self.strict), flag("cast", self.cast), flag("verify", self.verify), extra,
            flag("unpickle", self.unpickle),
        )  # fmt: skip

    def told(self) -> list[Any]:
        """Returns what is the same on all ranks, to be compared."""
        return [self.strict, self.cast, self.verify, sorted(map(str, self.extra)), self.unpickle]


class _Opened(NamedTuple):
    model: Reader
    optimizer: WholeTensors | None
    saved: Saved | None
    digest: str
    noted: Noted


class _Loading:
    """One call, on one rank."""

    loaded: Loaded

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sources: dict[str, str] = {}  # the name in the file of each part that is there
        self._ties: list[tuple[str, str]] = []  # of tensors of the file that are one parameter here
        self._reads: dict[str, list[Read]] = {"model": [], "optimizer": []}

    def open(self, model: torch.nn.Module, optimizer: Any, path: Any, options: Options) -> None:
        def look() -> dict[str, Any]:
            self._path = path_of(path)
            self._options = options.checked()
            self._strict = self._options.strict
            self._model = parts_of(model)
            self._names = None if optimizer is None else names_of(optimizer, self._model)
            self._opened = _opened(self._path, optimizer is not None)
            self._tensors = self._opened.model.tensors
            missing, unexpected = self._compare()
            if optimizer is not None and self._opened.saved is not None:
                self._theirs = self._saved_names(self._opened.saved)
                require_groups(optimizer, self._theirs, self._opened.saved, self._path)
                self._plan_optimizer(self._opened.saved)
                require_optimizer(optimizer, self._opened.saved, self._path)
            self._extra = self._opened.noted.read_extra(self._options.verify, self._options.unpickle)
            self._given = self._extra_of_this_rank()
            return {
                "said": [self._path, self._options.told(), self._opened.digest],
                "tied": self._unlike_ties(),
                "states": self._theirs if optimizer is not None else [],
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
            tied = sorted({tuple(pair) for each in said for pair in each["tied"]})
            states = {name for each in said for name in each["states"]}
        for name, part in self._model.parts.items():
            self._model.parts[name] = part.as_said(cut)
        if self._strict and (missing or unexpected):
            wrong = [_list("missing: ", missing), _list("not in the model: ", unexpected)]
            raise InvalidArgumentError(
                f"{self._path}: it is no checkpoint of this model: {'; '.join(filter(None, wrong))}; strict=False "
                "loads what is in both"
            )
        if self._strict and tied:
            taken, other = tied[0]
            raise InvalidArgumentError(
                f"{self._path}: {taken} and {other} are one parameter of this model, and two different tensors of the "
                "checkpoint, whose model did not tie them: load it into such a model; strict=False takes the first and "
                "returns the other among the unexpected ones"
            )
        unexpected += [other for _, other in tied]
        if optimizer is not None and self._opened.saved is not None:
            unread = sorted(name for params, _ in self._opened.saved.groups for name in params if name not in states)
            if unread and self._strict:
                raise InvalidArgumentError(
                    f"{self._path}: {_list('nobody reads its states of optimisers of ', unread)}: give the optimiser "
                    "all parameters that were saved; strict=False loads what is in both"
                )
            unexpected += [f"optimizer: {name}" for name in unread]
        self.loaded = Loaded(dict(self._opened.model.metadata), missing, unexpected, self._extra)

    def _compare(self) -> tuple[list[str], list[str]]:
        """Names that only one side has; throws for shapes and dtypes. A tied tensor may have any of its names, in the
        model and in the checkpoint."""
        wrong = []
        for name, primary in self._model.names.items():
            found = name if name in self._tensors else self._opened.noted.tied.get(name, "")
            if found not in self._tensors:
                continue
            part = self._model.parts[primary]
            taken = self._sources.setdefault(primary, found)
            if not self._fits(found, part):
                wrong.append(
                    f"{found} is {_shown(*self._tensors[found])}, in the model {_shown(part.dtype, part.shape)}"
                )
            elif found != taken and (taken, found) not in self._ties:
                self._ties.append((taken, found))
        if wrong:
            raise InvalidArgumentError(f"{self._path}: other tensors than the model's: {_list('', wrong)}")
        missing = [name for name in self._model.parts if name not in self._sources]
        read = {*self._sources.values(), *self._model.names}
        return missing, [name for name in self._tensors if name not in read]

    def _fits(self, name: str, part: Part) -> bool:
        dtype, shape = self._tensors[name]
        casts = self._options.cast and dtype in _FLOATS and part.dtype in _FLOATS
        return shape == part.shape and (dtype == part.dtype or casts)

    def _unlike_ties(self) -> list[tuple[str, str]]:
        """Tensors that are one parameter here, and differ in the file."""
        stored = self._opened.model.stored
        sums = {
            key: text for key, text in self._opened.noted.checksums.items() if key in stored and stored[key].name == key
        }
        primaries = {name: primary for primary, name in self._sources.items()}
        return [
            (taken, other)
            for taken, other in self._ties
            if (sums[taken] != sums[other] if taken in sums and other in sums else
                self._differ(self._model.parts[primaries[taken]], taken, other))
        ]  # fmt: skip

    def _differ(self, part: Part, first: str, second: str) -> bool:
        """Compare this rank's rows."""
        if self._tensors[first] != self._tensors[second]:
            return True
        both = []
        for name in (first, second):
            both.append(torch.empty(sum(map(size_of, part.regions)), dtype=torch_dtype(self._tensors[name][0])))
            if both[-1].numel():
                self._opened.model.read(name, part.regions, both[-1])
        return not torch.equal(*(each.view(torch.uint8) for each in both))

    def _saved_names(self, saved: Saved) -> list[str]:
        """Returns what the checkpoint calls the optimiser's parameters: not as here if a tie has another first name."""
        known = {name for params, _ in saved.groups for name in params}
        found = []
        for name in self._names or []:
            same = [other for other, primary in self._model.names.items() if primary == name and other in known]
            found.append(name if name in known or len(same) != 1 else same[0])
        return found

    def _extra_of_this_rank(self) -> dict[str, Any]:
        given, noted = self._options.extra, self._opened.noted
        if not given:
            return {}
        found = {}
        for name in given:
            values = [each.get(name) for each in noted.values]
            if not values or None in values:
                raise NotFoundError(f"{self._path}: extra {name!r} was not saved: leave it out")
            if len(values) == self._ranks.size:
                found[name] = self._extra[self._ranks.rank][name]
            elif len(set(values)) == 1:
                found[name] = self._extra[0][name]
            else:
                raise InvalidArgumentError(
                    f"{self._path}: extra {name!r} was saved by {len(values)} ranks, each its own, and "
                    f"{self._ranks.size} load it: take what this rank is to have from what load() returns"
                )
        return found

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
                    self._read("model", self._opened.model, name, part.regions, memory)
                    if part.weight is not None:
                        part.weight.model.damage.mend([part.weight])
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
            theirs = self._theirs[number]
            for key in saved.tensors.get(theirs, []):
                if f"{theirs}.{key}" not in tensors:
                    raise InvalidArgumentError(
                        f"{checkpoint.path}: it has no {theirs}.{key}, of which its metadata tells"
                    )
                dtype, shape = tensors[f"{theirs}.{key}"]
                self._states.append((number, name, key, dtype, shape))

    def read_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Into new memory."""
        opened = self._opened
        assert opened.optimizer is not None
        assert opened.saved is not None
        state: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(self._theirs):
            if name in opened.saved.values:
                state[number] = dict(opened.saved.values[name])
        for number, name, key, dtype, shape in self._states:
            part, parameter = self._model.parts[name], self._model.tensors[name]
            made = state_tensor(key, dtype, shape, part, parameter)
            local = made._local_tensor if is_dtensor(made) else made
            whole: list[Region] = [tuple(((0, size),) for size in shape)]
            regions = part.regions if shape == part.shape else whole
            self._read("optimizer", opened.optimizer, f"{self._theirs[number]}.{key}", regions, local)
            if isinstance(parameter, LogicalParameter) and shape == part.shape:
                made = parameter.etp.rows_as_value(made.view(parameter.etp.local.shape))
            state[number][key] = made
        groups = []
        numbers = iter(range(len(self._names or [])))
        for group, (_, options) in zip(optimizer.param_groups, opened.saved.groups, strict=True):
            groups.append({**options, "params": [next(numbers) for _ in group["params"]]})
        self._state = {"state": state, "param_groups": groups}

    def give_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective, if it holds weights that are sharded by tessera.etp."""
        failed: list[BaseException] = []
        try:
            optimizer.load_state_dict(self._state)
        except Exception as error:
            failed.append(error)
        self._ranks.share("load: optimizer state", lambda: _raise(failed))

    def give_extra(self) -> None:
        for name, value in self._given.items():
            self._options.extra[name].load_state_dict(value)

    def _read(self, kind: str, reader: Reader, name: str, regions: Sequence[Region], memory: torch.Tensor) -> None:
        """Fill memory, and take checksums of what the file has."""
        if not memory.numel():
            return
        kept = torch_dtype(reader.tensors[name][0])
        packed = memory if memory.is_contiguous() and memory.dtype is kept else torch.empty(memory.shape, dtype=kept)
        saved, reads = self._sums(kind), self._reads[kind]

        def visit(key: str, region: Region, address: int) -> None:
            if key in saved:
                stored = reader.stored[key]
                reads.append(Read(key, [region], [text_of(of_region(stored.dtype, stored.shape, region, address))]))

        reader.read(name, regions, packed, visit if self._options.verify else None)
        if packed is not memory:
            memory.copy_(packed)

    def _sums(self, kind: str) -> dict[str, str]:
        noted = self._opened.noted
        return noted.checksums if kind == "model" else noted.optimizer_checksums

    def verify(self, kind: str) -> None:
        """Compare all ranks' checksums with those that were noted. Collective."""
        saved = self._sums(kind)
        if not self._options.verify or not saved:
            return
        reader = self._opened.model if kind == "model" else self._opened.optimizer
        assert reader is not None
        shapes = {key: stored.shape for key, stored in reader.stored.items()}
        told = self._ranks.share(f"load: checksums of the {kind}", lambda: self._reads[kind])
        with as_told(f"load: checksums of the {kind}"):
            reads = [Read(name, list(map(as_region, regions)), sums) for each in told for name, regions, sums in each]
            wrong = unlike(saved, shapes, reads)
            rest = sorted(unread(saved, shapes, reads))
        if wrong is None and rest:  # ranks have read parts of them that overlap, or only some
            own = rest[self._ranks.rank :: self._ranks.size]
            found = self._ranks.share("load: rest", lambda: {key: _sum_of_whole(reader.stored[key]) for key in own})
            with as_told("load: rest"):
                all_of = {key: text for each in found for key, text in each.items()}
                wrong = next(((key, all_of[key]) for key in rest if all_of[key] != saved[key]), None)
        if wrong is not None:
            key, found_sum = wrong
            stored = reader.stored[key]
            path = self._opened.noted.file_of(kind, key) or stored.path
            raise damaged(path, stored.name, found_sum, saved[key])


def _raise(errors: list[BaseException]) -> None:
    for error in errors:
        raise error


def as_region(value: Any) -> Region:
    """Return a region that JSON has carried."""
    return tuple(tuple((int(begin), int(end)) for begin, end in dim) for dim in value)


def _sum_of_whole(stored: Stored) -> str:
    """Read a tensor by pieces of its first dim."""
    dtype, shape = stored.dtype, stored.shape
    inner = max(1, math.prod(shape[1:]))
    step = max(1, _PIECE // inner)
    sums = []
    for begin in range(0, shape[0] if shape else 1, step):
        end = min(begin + step, shape[0]) if shape else 1
        region: Region = (((begin, end),), *(((0, size),) for size in shape[1:])) if shape else ()
        if size_of(region):
            piece = torch.empty(size_of(region), dtype=torch_dtype(dtype))
            stored.read(region, piece.data_ptr(), piece.numel() * piece.element_size())
            sums.append(of_region(dtype, shape, region, piece.data_ptr()))
    return text_of(added(sums))


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
    mark = mark_of(index) or {}
    noted = noted_of(reader.path, index, reader.tensors, reader.checksums)
    told.append([noted.tied, noted.checksums, noted.values])
    states = saved = None
    if optimizer:
        name = mark.get("optimizer")
        if not is_optimizer_index(name):
            raise NotFoundError(f"{reader.path}: it has no optimiser: load(model, None, path) loads only the model")
        beside = os.path.join(os.path.dirname(reader.path), name)
        states = WholeTensors(beside)
        its_index = read_json(beside)
        metadata = its_index.get("metadata", {})
        saved = saved_of(metadata, beside)
        noted = noted.with_optimizer(its_index)
        told += [states.tensors, metadata]
    digest = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16)
    return _Opened(reader, states, saved, digest.hexdigest(), noted)


def _shown(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _list(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = len(names) - _SHOWN
    shown = ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return what + shown
