"""Cases: an operation, its arguments, and which of them are sharded."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import database
from .database import Operation, Sample
from .modes import MODES, OUT, Call, Mode
from .options import Options

_NO_VALUES = re.compile(r"(new_)?empty|resize_")  # operations that return memory as it is
_PLACES = 3  # so many arguments are sharded one by one


class Case:
    """One sample of an operation, with the places of its sharded tensors in the flat arguments."""

    def __init__(
        self, operation: Operation, number: int, sample: Sample, flat: Sequence[Any], chosen: tuple[int, ...]
    ) -> None:
        self.operation = operation
        self.chosen = chosen
        self.flat = flat
        self.has_out = "out" in (sample.kwargs or {})
        self.has_values = not _NO_VALUES.match(operation.name)
        self.outputs_for_grad = sample.outputs_for_grad
        self.name = f"{operation.name} | {number}{' out' if self.has_out else ''} | {','.join(map(str, chosen))}"
        self._spec = tree_flatten(_arguments(sample))[1]

    @property
    def sharded(self) -> dict[int, torch.Tensor]:
        return {place: self.flat[place] for place in self.chosen}

    def modes(self, options: Options) -> list[Mode]:
        """Return the modes in which the operation can be called."""
        modes = [OUT] if self.has_out else [mode for mode in MODES if mode.call in self.operation.variants]
        return [mode for mode in modes if re.search(options.modes, mode.name)]

    def arguments(
        self, parameters: dict[int, torch.Tensor], options: Options, rank: int, requires_grad: bool
    ) -> list[Any]:
        """Return a rank's flat arguments: `parameters`, and copies of the other tensors."""
        return [
            parameters[place]
            if place in parameters
            else _own_tensor(value, options.differ, rank, requires_grad)
            if isinstance(value, torch.Tensor)
            else value / (1 + rank / 4)
            if options.numbers and type(value) is float
            else value
            for place, value in enumerate(self.flat)
        ]

    def call(self, call: Call, flat: list[Any], seed: int) -> Any:
        first, args, kwargs = tree_unflatten(flat, self._spec)
        torch.manual_seed(seed)
        return self.operation.variants[call](first, *args, **kwargs)


def _arguments(sample: Sample) -> tuple[Any, ...]:
    return sample.input, tuple(sample.args), dict(sample.kwargs or {})


def _own_tensor(tensor: torch.Tensor, differ: bool, rank: int, requires_grad: bool) -> torch.Tensor:
    is_float = tensor.is_floating_point() or tensor.is_complex()
    if differ and rank and is_float and tensor.layout is torch.strided:
        return (tensor.detach() / (1 + rank / 4)).requires_grad_(requires_grad)
    return tensor.detach().clone().requires_grad_(requires_grad and is_float)


def can_shard(value: Any, ranks: int) -> bool:
    """Return whether a value is a tensor that every rank can have rows of."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.dtype is torch.float32
        and value.dim() >= 2
        and value.shape[0] >= ranks
        and value.numel() > 0
    )


def cases_of(operation: Operation, options: Options) -> Iterator[Case]:
    """Yield the cases of an operation, the same on every rank."""
    usable = []
    for number, sample in enumerate(operation.samples(options.seed)):
        flat = tree_flatten(_arguments(sample))[0]
        places = [place for place, value in enumerate(flat) if can_shard(value, options.ranks)]
        if places:
            usable.append((number, sample, flat, places))
    rest = usable[1:]
    random.Random(f"{options.seed} {operation.name}").shuffle(rest)
    for number, sample, flat, places in usable[:1] + rest[: options.samples - 1]:
        for chosen in [(place,) for place in places[:_PLACES]] + [tuple(places)] * (len(places) > 1):
            yield Case(operation, number, sample, flat, chosen)
            if operation.supports_out:
                yield from _out_cases(operation, number, sample, flat, chosen, options, chosen == (places[0],))


def _out_cases(
    operation: Operation,
    number: int,
    sample: Sample,
    flat: Sequence[Any],
    chosen: tuple[int, ...],
    options: Options,
    with_plain_arguments: bool,
) -> Iterator[Case]:
    """Yield cases with sharded `out=`, and sharded arguments or not."""
    try:
        with torch.no_grad():
            plain = Case(operation, number, sample, flat, ())
            result = plain.call(Call.FUNCTION, plain.arguments({}, options, 0, False), options.seed_of(0))
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        outs = [torch.full_like(tensor, 0.5, memory_format=torch.contiguous_format) for tensor in results]
    except (RuntimeError, TypeError, ValueError):
        return  # plain torch has nothing to say about it
    out = outs[0] if isinstance(result, torch.Tensor) else tuple(outs)
    with_out = Sample(sample.input, sample.args, {**(sample.kwargs or {}), "out": out})
    flat = tree_flatten(_arguments(with_out))[0]
    sharded_outs = {id(tensor) for tensor in outs if can_shard(tensor, options.ranks)}
    out_places = tuple(place for place, value in enumerate(flat) if id(value) in sharded_outs)
    if out_places:
        yield Case(operation, number, with_out, flat, (*chosen, *out_places))
        if with_plain_arguments:
            yield Case(operation, number, with_out, flat, out_places)


def draw(options: Options) -> list[str]:
    """Return the names of the operations that a run asks for."""
    names = sorted(name for name in database.load() if re.search(options.only, name))
    random.Random(options.seed).shuffle(names)
    return names[: options.operations or len(names)]
