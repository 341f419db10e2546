"""Experts that are one parameter [E, F, K]: E weights, of which an operation gathers those that it uses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .matrix import Matrix, acquire_experts
from .phase import Phase
from .tracers import refuse_transforms
from .uses import refuse_twice
from .weight import UNKNOWN, Weight, dtype_name

if TYPE_CHECKING:
    from .model import ShardedModel

_SELECTS = (torch.select, torch.Tensor.select)
_UNBINDS = (torch.unbind, torch.Tensor.unbind)
PARTS = frozenset((torch.Tensor.__getitem__, *_SELECTS, *_UNBINDS))  # operations that may take some experts only


class Stack(Weight):
    """`p.etp` of a stack. Each expert is cut over the ranks, and has an amax, a version and rounds of its own; what
    uses all of them gathers them as a list.

    Attributes:
        experts: What `p[e]` gathers, each with a name, a version, a state and a place in the list.
    """

    def __init__(
        self,
        model: ShardedModel,
        numbers: Sequence[int],
        name: str,
        full: torch.Tensor,
        format: str,
        compute: torch.dtype,
        late: bool,
        native: bool = False,
        planes_only: bool = False,
    ) -> None:
        """`late`: it is published at its first use after an update, and not by the update."""
        super().__init__(model, numbers, name, full, torch.Size(full.shape[1:]), format, compute, native, planes_only)
        self._experts: list[Expert] | None = None
        self._late = late

    @property
    def experts(self) -> list[Expert]:
        """Return what `p[e]` gathers. These keep the stack alive: one that has departed keeps none of them."""
        if self._experts is not None:
            return self._experts
        made = [Expert(self, index) for index in range(len(self.numbers))]
        if not self.departed:
            self._experts = made
        return made

    def depart(self) -> None:
        super().depart()
        self._experts = None

    @property
    def lead(self) -> torch.Size:
        return self.shape[:1]

    def _shard(self) -> Any:
        return self.model.runtime.stack_shard(self.numbers)

    def _set_master(self, rows: torch.Tensor) -> None:
        for number, own in zip(self.numbers, rows, strict=True):
            self.model.runtime.set_master(number, own.data_ptr(), dtype_name(self.dtype))

    def _read_rows(self, into: torch.Tensor) -> None:
        for number, own in zip(self.numbers, into, strict=True):
            self.model.runtime.read_rows(number, own.data_ptr(), dtype_name(self.dtype))

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        return full[:, self.rows[0] : self.rows[1]]

    def rename(self, name: str) -> None:
        self.name = name
        self._experts = None  # which have names of their own

    @property
    def state(self) -> str:
        """Of the first expert that is being gathered, or is gathered."""
        return next((each.state for each in self.experts if each.state != "NONE"), "NONE")

    @property
    def rs_state(self) -> str:
        return next((each.rs_state for each in self.experts if each.rs_state != "NONE"), "NONE")

    @property
    def expert_idx(self) -> int | None:
        """None: each of `experts` has one."""
        return None

    # --- uses

    def publish_once(self, phase: Phase) -> None:
        """All experts, where a rank might leave some out: ranks publish together."""
        if self._late and phase is Phase.FORWARD and self.model.micro_batch == 0:
            self.model.runtime.publish(self.numbers)

    def gather(
        self, phase: Phase, expects_backward: bool = False, version: int | None = None
    ) -> tuple[torch.Tensor, int]:
        """All experts, one behind the other."""
        self.publish_once(phase)
        versions = None if version is None else [version] * len(self.experts)
        wholes, found = acquire_experts(self.model, self.name, self.numbers, phase, expects_backward, versions)
        return wholes[0], found[0]

    # --- gradients

    def send(self, gradient: torch.Tensor) -> None:
        buffers = []
        for expert, given in zip(self.experts, gradient.reshape(self.shape), strict=True):
            buffer, into = expert.buffer()
            into.copy_(given)
            buffers.append(buffer)
        self.model.runtime.produce_experts(buffers)

    def lend(self) -> torch.Tensor:
        return self.lent.lend(None, torch.empty(self.shape, dtype=self.compute))

    def take_back(self, gradient: torch.Tensor) -> None:
        self.lent.take(gradient, self.name)
        self.model.enter_backward()
        self.give(gradient)

    def is_among(self, added: set[int]) -> bool:
        return not added.isdisjoint(self.numbers)

    def after_drain(self, added: set[int]) -> None:
        """Of an expert that no rank has used, rows are zero once any of the stack was used, as in plain torch."""
        memory, empty = self._memory, self._registered[1]
        if memory is not None and empty:
            for number, rows in zip(self.numbers, memory, strict=True):
                if number not in added:
                    rows.zero_()
        super().after_drain(added)
        if empty:  # a fold of such an expert would write there, and not add
            self._registered = UNKNOWN

    def _set_gradient(self, memory: torch.Tensor | None, dtype: str, empty: bool) -> None:
        for i, number in enumerate(self.numbers):
            address = 0 if memory is None else memory[i].data_ptr()
            self.model.runtime.set_gradient(number, address, dtype, empty)

    def _take_gradient(self, into: torch.Tensor, added: set[int]) -> None:
        for number, rows in zip(self.numbers, into, strict=True):
            if number in added:
                self.model.runtime.take_gradient(number, rows.data_ptr())


class Expert(Matrix):
    """One matrix [F, K] of a stack.

    Attributes:
        stack: The `p.etp` that has it.
        index: Its place in the stack.
    """

    def __init__(self, stack: Stack, index: int) -> None:
        super().__init__(stack.model, stack.numbers[index], _name(stack, index), stack.matrix, stack.dtype)
        self.stack = stack
        self.index = index

    def __repr__(self) -> str:
        return f"Expert({self.name!r}, rows={self.stack.rows}, shape={tuple(self.shape)})"

    def gather(
        self, phase: Phase, expects_backward: bool = False, version: int | None = None
    ) -> tuple[torch.Tensor, int]:
        self.stack.publish_once(phase)
        return super().gather(phase, expects_backward, version)

    def wanted(self) -> bool:
        return self.stack.wanted()

    def prepare(self) -> None:
        self.stack.prepare()

    def anchor(self) -> torch.Tensor:
        return self.stack.anchor()

    def pull(self, product: bool) -> torch.Tensor:
        """Return the expert's matrix, to be read, as Weight.pull() does."""
        stack, model = self.stack, self.model
        if model.updating or not stack.travels_as(product):
            return stack.pull(product)[self.index]
        phase = model.reading_phase()
        full, _ = self.gather(phase, phase is Phase.FORWARD and not (model.inline or stack.frozen))
        return full.to(self.dtype).view(self.shape)


class _Use(torch.autograd.Function):
    """One expert of a stack, as a view of the parameter, whose gradient goes to the owners of its rows alone."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, expert: Expert) -> torch.Tensor:
        ctx.expert = expert
        return expert.stack.parameter.detach().select(0, expert.index)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        expert: Expert = ctx.expert
        refuse_twice(expert)
        expert.model.enter_backward()
        if expert.wanted():
            with torch.no_grad():
                expert.give(gradient.to_dense() if gradient.layout is not torch.strided else gradient)
        return None, None


def expert_uses(stack: Stack, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation gives that takes some experts of a stack, and nothing else, for their gradients; None:
    it is another operation, or no graph is recorded. Called where torch sees no subclasses."""
    if stack.model.inline or not torch.is_grad_enabled() or not stack.parameter.requires_grad:
        return None
    if func in _UNBINDS and _arguments(("dim",), args, kwargs).get("dim", 0) in (0, -3):
        return tuple([_use(stack, expert) for expert in stack.experts])
    index, rest = _expert_of(func, args, kwargs)
    if index is None or not -len(stack.experts) <= index < len(stack.experts):  # torch tells of it
        return None
    expert = _use(stack, stack.experts[index])
    return expert[rest] if rest else expert


def _use(stack: Stack, expert: Expert) -> torch.Tensor:
    refuse_transforms(stack.name)
    used: torch.Tensor = _Use.apply(stack.anchor(), expert)  # type: ignore[no-untyped-call]
    return used


def _name(stack: Stack, index: int) -> str:
    return f"{stack.name}[{index}]"


def _expert_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, Any]:
    """Which expert `p[e]`, `p[e, ...]` or p.select(0, e) takes, and the rest of the index. None: not one of them."""
    if func is torch.Tensor.__getitem__:
        index = args[1]
        if type(index) is tuple:
            return (_integer(index[0]), index[1:]) if index else (None, ())
        return _integer(index), ()
    if func in _SELECTS:
        given = _arguments(("dim", "index"), args, kwargs)
        return (_integer(given.get("index")) if given.get("dim") in (0, -3) else None), ()
    return None, ()


def _arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args[1:], strict=False)) | kwargs


def _integer(index: Any) -> int | None:
    """What torch takes as one place along a dim; None: anything else."""
    if isinstance(index, torch.Tensor):
        whole = index.dim() == 0 and index.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
        return int(index) if whole else None
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        return None
    return operator.index(index)
