"""Buffers of a sharded model, which every rank has whole: compared when the model is sharded, and made equal after
forwards have changed them, such as the running statistics of BatchNorm.

Kernels change buffers without counting it in their versions (`batch_norm`), so values are compared, too: of small
buffers after each backward, of large ones after the first, second, fourth, ... A buffer that was changed once is taken
to be changed by every forward.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from .. import _core
from .._arguments import choice, pattern
from .._errors import InvalidArgumentError, MismatchError
from .digests import bytes_of, comparable_digest, is_plain_tensor, same_bits
from .telling import json_of

MODES = ("broadcast", "mean", "own")
_SHOWN = 8  # names in a message
_SMALL = 1 << 16  # bytes, up to which a copy is kept to compare with

Rules = Sequence[tuple[re.Pattern[str], str]]


def rules_of(buffers: str | Mapping[Any, str]) -> Rules:
    """Check the argument `buffers` of shard_module_()."""
    if isinstance(buffers, Mapping):
        return [(pattern("buffers", key), choice("buffers", mode, MODES)) for key, mode in buffers.items()]
    return [(re.compile(".*"), choice("buffers", buffers, MODES))]


def require_used(rules: Rules, names: Collection[str]) -> None:
    """Throw for a rule that is for no buffer: its name may be misspelt."""
    for rule, _ in rules:
        if rule.pattern != ".*" and not any(rule.fullmatch(name) for name in names):
            raise InvalidArgumentError(
                f"buffers: {rule.pattern!r} names no buffer of the model: these are {sorted(names)[:_SHOWN]}; patterns "
                "are for whole names"
            )


def mode_of(name: str, rules: Rules) -> str:
    """Return how a buffer is made equal: the first rule that matches its whole name counts."""
    return next((mode for rule, mode in rules if rule.fullmatch(name)), "broadcast")


def difference(name: str, rank: int, other: int) -> MismatchError:
    """Return the error of a buffer that ranks have differently when a model is sharded."""
    return MismatchError(
        f"buffer {name} differs between ranks {rank} and {other}: make it from the same seed or checkpoint on all "
        f"ranks, or let each rank keep its own: shard_module_(..., buffers={{{re.escape(name)!r}: 'own'}})"
    )


def require_same_buffers(core: _core.ShardGroup, named: Mapping[str, torch.Tensor], rules: Rules) -> None:
    """Throw if ranks have different buffers. Collective."""
    own = {name: comparable_digest(each) for name, each in named.items() if mode_of(name, rules) != "own"}
    what = "the model's buffers"
    answers = json_of(core.exchange(what, json.dumps(own).encode()), what, lambda told: isinstance(told, dict))
    for other in range(core.size):
        for name in sorted({*answers[0], *answers[other]}):
            if answers[0].get(name) != answers[other].get(name):
                raise difference(name, 0, other)


@dataclasses.dataclass
class _Entry:
    """One buffer, as it was when ranks last had the same.

    Attributes:
        moves: Forwards change it.
        copy: Its values, of a small one that nothing has changed.
    """

    name: str
    module: torch.nn.Module
    key: str
    mode: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None
    digest: str
    moves: bool = False

    @property
    def current(self) -> torch.Tensor:
        found = self.module._buffers.get(self.key)
        return self.tensor if found is None else found

    def has_changed(self, looks_at_large: bool) -> bool:
        current = self.current
        if current is not self.tensor or _version_of(current) != self.version:
            return True
        if self.copy is not None:
            return not same_bits(current, self.copy)
        return looks_at_large and comparable_digest(current) != self.digest

    def note(self) -> None:
        """Take what it is now as what all ranks have."""
        current = self.current
        self.tensor, self.version = current, _version_of(current)
        self.shape, self.dtype = tuple(current.shape), current.dtype
        if not self.moves:
            small = current.numel() * current.element_size() <= _SMALL and type(current) is torch.Tensor
            self.copy = current.detach().clone() if small else None
            self.digest = "" if small else comparable_digest(current)
        else:
            self.copy, self.digest = None, ""


class Buffers:
    """The buffers of one model that its ranks have alike."""

    def __init__(self, core: _core.ShardGroup, root: torch.nn.Module, rules: Rules) -> None:
        self._core, self.rules = core, rules
        self._backwards = 0
        self.entries: dict[str, _Entry] = {}
        self._fill(root, {})

    def _fill(self, root: torch.nn.Module, known: Mapping[str, _Entry]) -> None:
        seen: set[int] = set()
        for prefix, module in root.named_modules():
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                mode = mode_of(name, self.rules)
                if buffer is None or mode == "own" or id(buffer) in seen or not is_plain_tensor(buffer):
                    continue
                seen.add(id(buffer))
                before = known.get(name)
                if before is not None and before.module is module:
                    self.entries[name] = before
                    continue
                entry = _Entry(name, module, key, mode, (), buffer.dtype, buffer, 0, None, "")
                entry.note()
                self.entries[name] = entry

    def new_in(self, root: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the buffers that a model has got since."""
        return {
            name: buffer
            for name, buffer in root.named_buffers()
            if mode_of(name, self.rules) != "own" and name not in self.entries and is_plain_tensor(buffer)
        }

    def follow(self, root: torch.nn.Module) -> None:
        """Take the buffers that a model has now, which ranks have compared."""
        known, self.entries = self.entries, {}
        self._fill(root, known)

    @property
    def moving(self) -> list[tuple[str, str]]:
        """Names of buffers that forwards have changed, and how these are made equal."""
        return [(entry.name, entry.mode) for entry in self.entries.values() if entry.moves]

    @property
    def may_move(self) -> bool:
        """Tell whether forwards are known to change some. The same on all ranks."""
        return bool(self.moving or self.expected())

    def expected(self) -> list[tuple[str, str]]:
        """Return the running statistics of torch's norms that train, before a forward has changed them."""
        return [
            (entry.name, entry.mode)
            for entry in self.entries.values()
            if isinstance(entry.module, torch.nn.modules.batchnorm._NormBase)
            and entry.module.training
            and entry.module.track_running_stats
        ]

    def settle(self) -> None:
        """Make equal, at the end of a backward, what forwards have changed. Collective."""
        if not self.entries or self._core.size == 1:
            return
        self._backwards += 1
        looks_at_large = self._backwards & (self._backwards - 1) == 0
        changed = [
            place
            for place, entry in enumerate(self.entries.values())
            if not entry.moves and entry.has_changed(looks_at_large)
        ]
        entries = list(self.entries.values())
        facts = {
            str(place): [list(entry.current.shape), str(entry.current.dtype)]
            for place, entry in enumerate(entries)
            if (tuple(entry.current.shape), entry.current.dtype) != (entry.shape, entry.dtype)
        }
        told = json.dumps([len(entries), changed, facts]).encode()
        answers = _read(self._core.exchange("changes of the model's buffers", told), len(entries))
        if any(answer[0] != len(entries) for answer in answers):
            raise MismatchError(
                f"ranks have {sorted({answer[0] for answer in answers})} buffers of the model: change it on all alike"
            )
        for answer in answers:
            for place in answer[1]:
                entries[place].moves = True
        moving = [place for place, entry in enumerate(entries) if entry.moves]
        with torch.no_grad():
            self._broadcast([place for place in moving if entries[place].mode == "broadcast"], entries, answers)
            self._average([place for place in moving if entries[place].mode == "mean"], entries, answers)
        for place in moving:
            entries[place].note()

    def _broadcast(self, places: list[int], entries: list[_Entry], answers: list[Any]) -> None:
        if not places:
            return
        facts = [_facts(entries[place], place, answers[0]) for place in places]
        values = self._gathered([entries[place] for place in places], facts, [0])[0]
        for place, value in zip(places, values, strict=True):
            _put(entries[place], value)

    def _average(self, places: list[int], entries: list[_Entry], answers: list[Any]) -> None:
        if not places:
            return
        for place in places:
            ranks = [_facts(entries[place], place, answer) for answer in answers]
            other = next((rank for rank, facts in enumerate(ranks) if facts != ranks[0]), None)
            if other is not None:
                raise InvalidArgumentError(
                    f"buffer {entries[place].name} is {ranks[0][1]} of {ranks[0][0]} on rank 0, and {ranks[other][1]} "
                    f"of {ranks[other][0]} on rank {other}, and there is no mean: buffers='broadcast' takes rank 0's"
                )
        facts = [_facts(entries[place], place, answers[0]) for place in places]
        ranks_values = self._gathered([entries[place] for place in places], facts, range(self._core.size))
        for place, *values in zip(places, *ranks_values, strict=True):
            first = values[0]
            mean = torch.stack(values).mean(0) if first.is_floating_point() or first.is_complex() else first
            _put(entries[place], mean)

    def _gathered(
        self, entries: list[_Entry], facts: list[tuple[tuple[int, ...], torch.dtype]], ranks: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        """Return the values that some ranks have. Collective."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in facts]
        sent = torch.empty(0, dtype=torch.uint8)
        if self._core.rank in ranks:
            sent = torch.cat([sent, *[bytes_of(entry.current) for entry in entries]])
        counts = [sum(sizes) if rank in ranks else 0 for rank in range(self._core.size)]
        received = torch.empty(sum(counts), dtype=torch.uint8)
        self._core.gather_bytes("the model's buffers", sent.data_ptr(), counts, received.data_ptr())
        found = []
        for part in torch.split(received, sum(sizes)) if sum(sizes) else [received] * len(ranks):
            pieces = torch.split(part, sizes)
            # clone(): a piece may begin where its dtype may not
            found.append(
                [piece.clone().view(dtype).view(shape) for piece, (shape, dtype) in zip(pieces, facts, strict=True)]
            )
        return found


def _read(answers: Iterable[bytes], count: int) -> list[Any]:
    """Return what ranks have told of their buffers, once it can be true of `count` of them."""

    def is_possible(told: Any) -> bool:
        own, changed, facts = told
        return bool(own != count) or (
            all(type(place) is int and 0 <= place < count for place in changed)
            and all(isinstance(_dtype_of(name), torch.dtype) for _, name in facts.values())
            and all(type(size) is int and size >= 0 for shape, _ in facts.values() for size in shape)
        )

    return json_of(answers, f"the model's {count} buffers", is_possible)


def _dtype_of(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."), None)


def _facts(entry: _Entry, place: int, answer: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a buffer on the rank that has given an answer."""
    told = answer[2].get(str(place))
    if told is None:
        return entry.shape, entry.dtype
    return tuple(told[0]), _dtype_of(told[1])


def _put(entry: _Entry, value: torch.Tensor) -> None:
    """Give a buffer values. Graphs that have saved it do not count this as a change: its forward is over."""
    current = entry.current
    if (current.shape, current.dtype) == (value.shape, value.dtype) and not current.is_inference():
        current.data.copy_(value)
    else:
        entry.module._buffers[entry.key] = value


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
