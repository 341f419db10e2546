"""Training a model for some steps, sharded and in one process, and comparing every bit."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .. import _core
from .._arguments import whole
from .._errors import InvalidArgumentError
from .exactness import Exactness, exactness
from .group import Group
from .norms import clip_grad_norm_
from .shard import shard_module_
from .telling import json_of, numbers_of
from .views import model_of
from .views import whole as whole_of

_MAX_STEPS = 1 << 40
# Options that say how what has a format travels.
_OF_FORMATS = ("compute_dtype", "masters", "nonfinite", "publish", "stacks")

Batch = Callable[[int], Any]
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first bits that differ.

    Attributes:
        step: From 0.
        what: "loss of micro-batch 3", "gradient of NAME", "NAME", or "exp_avg of NAME".
        element: Its index in the logical tensor.
        sharded, whole: The two values; None: there is no such gradient.
        elements: How many of the tensor's differ.
    """

    step: int
    what: str
    element: tuple[int, ...]
    sharded: float | None
    whole: float | None
    elements: int

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.what} differs in {self.elements} elements, first {list(self.element)}: "
            f"{self.sharded!r} sharded, {self.whole!r} in one process"
        )


@dataclasses.dataclass(frozen=True)
class Verification:
    """What verify() found; true if every bit was equal.

    Attributes:
        steps: That were compared; the last one may have differed.
        difference: None: all bits were equal.
        exactness: The conditions, as they were in this run.
    """

    steps: int
    difference: Difference | None
    exactness: Exactness

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.steps} steps: losses, gradients, weights and optimiser states are equal, bit for bit"
        return f"{self.difference}\n{self.exactness}"


def verify(
    model: torch.nn.Module,
    steps: int,
    *,
    group: Group,
    batch: Batch,
    loss: Loss,
    optimizer: MakeOptimizer,
    accumulation: int = 1,
    max_norm: float | None = None,
    **options: Any,
) -> Verification:
    """Trains copies of a model, one sharded over the group and a whole one in rank 0's process only, and compares
    losses, gradients, weights and optimiser states of every step, to the first bit that differs. Collective.

    The whole copy is given the micro-batches of all ranks, one after the other; weights that travel in a format are
    quantised in it, too. torch's random state is seeded by micro-batch, so that dropout is the same. Rank 0 needs
    memory for both copies, and the others wait for it: for a large model, give the group a longer timeout. The model
    and random states are left as they were.

    Args:
        model: Not sharded, and the same on all ranks.
        steps: Of the optimiser.
        group: Of init_group().
        batch: Gives micro-batch `number`, counted over all ranks and steps; rank r of N has r, N + r, ...
        loss: Gives the scalar loss of a model for what batch() gave.
        optimizer: Makes one for some parameters.
        accumulation: Micro-batches of a rank in a step.
        max_norm: For clip_grad_norm_(). None: gradients are not clipped.
        options: For shard_module_().
    """
    steps, accumulation = whole("steps", steps, 1, _MAX_STEPS), whole("accumulation", accumulation, 1, _MAX_STEPS)
    if model_of(model) is not None:
        raise InvalidArgumentError("verify: the model is sharded already: give one that is not, and options for it")
    task = _Task(group.size, batch, loss, optimizer, accumulation, max_norm, options.get("reduction") == "sum")
    alone = Group(_core.ShardGroup.single("verify"), "verify", group.timeout)
    sharded = shard_module_(copy.deepcopy(model), group, **options)
    theirs = None
    try:
        ours = _Training(task, sharded, group)
        conditions = exactness(sharded, ours.optimizer)
        if group.rank == 0:
            theirs = _Training(task, _whole_copy(model, alone, sharded, options), None)
        with torch.random.fork_rng(devices=[]):
            for step in range(steps):
                difference = _told(group, _compare(step, ours, theirs))
                if difference is not None:
                    return Verification(step + 1, difference, conditions)
        return Verification(steps, None, conditions)
    finally:
        _close(sharded)
        if theirs is not None:
            _close(theirs.model)
        alone.close()


def _whole_copy(
    model: torch.nn.Module, alone: Group, sharded: torch.nn.Module, options: dict[str, Any]
) -> torch.nn.Module:
    """Plain torch, but for what travels in a format."""
    found = model_of(sharded)
    weights = [] if found is None else found.weights
    formats: dict[str | re.Pattern[str], str] = {re.escape(each.name): each.format for each in weights if each.format}
    copied = copy.deepcopy(model)
    if not formats:
        return copied
    same = {name: value for name, value in options.items() if name in _OF_FORMATS}
    native = [re.escape(each.name) for each in weights if each.native]
    return shard_module_(copied, alone, formats, min_elements=0, native=native, **same)


def _close(model: torch.nn.Module) -> None:
    found = model_of(model)
    if found is not None:
        found.watch.end()
        found.close()
        found.core.close()


@dataclasses.dataclass(frozen=True)
class _Task:
    """What both copies do."""

    size: int
    batch: Batch
    loss: Loss
    make: MakeOptimizer
    accumulation: int
    max_norm: float | None
    adds: bool  # ranks' gradients, instead of their mean


class _Training:
    """One of the copies: this rank's part of a sharded one, or, without a group, all ranks' in this process."""

    def __init__(self, task: _Task, model: torch.nn.Module, group: Group | None) -> None:
        self._task = task
        self.model = model
        self._group = group
        self._parameters = list(model.named_parameters())
        self.optimizer = task.make([parameter for _, parameter in self._parameters if parameter.requires_grad])
        self._losses: list[float] = []

    def accumulate(self, step: int) -> None:
        """All backwards of a step, in the global order of micro-batches."""
        task = self._task
        self._losses.clear()
        self.optimizer.zero_grad()
        for micro_step in range(step * task.accumulation, (step + 1) * task.accumulation):
            for rank in range(task.size) if self._group is None else (self._group.rank,):
                number = micro_step * task.size + rank
                torch.manual_seed(number)
                value = task.loss(self.model, task.batch(number))
                self._losses.append(float(value.detach()))
                value = value / task.accumulation
                (value if self._group is not None or task.adds else value / task.size).backward()  # type: ignore[no-untyped-call]
        if task.max_norm is not None:
            clip_grad_norm_(self.model.parameters(), task.max_norm)

    def gradients(self, step: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Losses, too."""
        task = self._task
        first = step * task.accumulation * task.size
        for number, loss in enumerate(self._all_losses(), first):
            yield f"loss of micro-batch {number}", torch.tensor(loss, dtype=torch.float64)
        for name, parameter in self._parameters:
            yield f"gradient of {name}", None if parameter.grad is None else whole_of(parameter.grad)

    def _all_losses(self) -> list[float]:
        """In the global order."""
        if self._group is None:
            return self._losses
        form = f"={len(self._losses)}d"
        ranks = self._group.core.exchange("losses", struct.pack(form, *self._losses))
        return [loss for micro_step in zip(*numbers_of(ranks, form, "its losses"), strict=True) for loss in micro_step]

    def weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Optimiser states, too."""
        for name, parameter in self._parameters:
            yield name, whole_of(parameter).detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name}", whole_of(value)


def _compare(step: int, ours: _Training, theirs: _Training | None) -> Difference | None:
    """One step of both. To make whole tensors of ours is collective, so that it goes on after a difference."""
    both = [each for each in (ours, theirs) if each is not None]
    for each in both:
        each.accumulate(step)
    found = _first(step, ours.gradients(step), None if theirs is None else theirs.gradients(step))
    for each in both:
        each.optimizer.step()
    later = _first(step, ours.weights(), None if theirs is None else theirs.weights())
    return found or later


def _first(step: int, ours: Iterator[Any], theirs: Iterator[Any] | None) -> Difference | None:
    found = None
    for what, tensor in ours:
        if theirs is not None:
            _, other = next(theirs)
            found = found or _difference(step, what, tensor, other)
    return found


def _difference(step: int, what: str, ours: torch.Tensor | None, theirs: torch.Tensor | None) -> Difference | None:
    if ours is None or theirs is None:
        present = ours if ours is not None else theirs
        if present is None:
            return None
        values = [None if each is None else float(each.reshape(-1)[0]) for each in (ours, theirs)]
        return Difference(step, what, (0,) * present.dim(), values[0], values[1], present.numel())
    differs = _bits(ours) != _bits(theirs)
    if not bool(differs.any()):
        return None
    element = tuple(int(each) for each in torch.nonzero(differs.reshape(ours.shape))[0]) if ours.dim() else ()
    return Difference(step, what, element, float(ours[element]), float(theirs[element]), int(differs.sum()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """One integer for each element."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().reshape(-1).view(integers[tensor.element_size()])


def _told(group: Group, found: Difference | None) -> Difference | None:
    """What rank 0 has found."""
    own = json.dumps(None if found is None else dataclasses.asdict(found)).encode()
    names = {field.name for field in dataclasses.fields(Difference)}
    (told,) = json_of(
        group.core.exchange("what differs", own)[:1],
        "what differs",
        lambda told: told is None or (set(told) == names and isinstance(told["element"], list)),
    )
    return None if told is None else Difference(**{**told, "element": tuple(told["element"])})
