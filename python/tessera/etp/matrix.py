"""A weight of the runtime: what is gathered, and whose gradients are added, by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch._C import _from_dlpack as from_dlpack  # of a capsule

from .. import _core
from .phase import Phase

if TYPE_CHECKING:
    from .model import ShardedModel


class Matrix:
    """[F, K]: a weight, or one expert of a stack.

    Attributes:
        name: The dotted name in the model; of expert e of a stack, with [e].
        shape: The logical one.
    """

    def __init__(self, model: ShardedModel, number: int, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.model = model
        self.number = number
        self.name = name
        self.shape = shape
        self.dtype = dtype

    @property
    def version(self) -> int:
        """Counts the updates that have been published."""
        return self.model.runtime.version(self.number)

    @property
    def chain(self) -> str:
        """The order of uses that it is prefetched in."""
        return self.model.runtime.status(self.number).chain

    @property
    def state(self) -> str:
        """Of its gather: NONE, ASYNC_WAIT, DATA_READY or DATA_READY_SYNC."""
        return self.model.runtime.status(self.number).gather

    @property
    def rs_state(self) -> str:
        """Of the reduction of its gradient, likewise."""
        return self.model.runtime.status(self.number).reduction

    @property
    def expert_idx(self) -> int | None:
        """Its place among experts that are gathered together; None if it is not one of them."""
        return self.model.runtime.status(self.number).expert

    # --- uses

    def gather(
        self, phase: Phase, expects_backward: bool = False, version: int | None = None
    ) -> tuple[torch.Tensor, int]:
        """All rows, to be read, in memory that goes back when nobody can reach it; and their version."""
        model = self.model
        batch = model.micro_batch
        first = batch == 0 and phase is Phase.FORWARD
        gated = model.threads.begin_gather(self.name)
        try:
            capsule, found = model.runtime.acquire(self.number, phase.value, batch, expects_backward, first, version)
        finally:
            if gated:
                model.threads.end_gather()
        return from_dlpack(capsule), found

    # --- gradients

    def prepare(self) -> None:
        """Before the first gradient of a round."""
        raise NotImplementedError

    def room(self) -> tuple[_core.GradientBuffer, torch.Tensor]:
        """Where a gradient [F, K] is to be written: produce() then takes it."""
        self.prepare()
        return self.buffer()

    def buffer(self) -> tuple[_core.GradientBuffer, torch.Tensor]:
        buffer, capsule = self.model.runtime.gradient_buffer(self.number, self.model.micro_batch)
        return buffer, from_dlpack(capsule)

    def produce(self, buffer: _core.GradientBuffer) -> None:
        self.model.runtime.produce(buffer)

    def give(self, gradient: torch.Tensor) -> None:
        """A gradient in the logical shape goes to the ranks that own its rows."""
        self.prepare()
        self.send(gradient)

    def send(self, gradient: torch.Tensor) -> None:
        """The same, where it is known where it is to be added."""
        buffer, into = self.buffer()
        into.copy_(gradient.reshape(into.shape))
        self.produce(buffer)


def acquire_experts(
    model: ShardedModel,
    name: str,
    numbers: Sequence[int],
    phase: Phase,
    expects_backward: bool,
    versions: list[int] | None,
) -> tuple[list[torch.Tensor], list[int]]:
    """Gather weights as one list, and return them with their versions. `name`: of one of them, in messages."""
    batch = model.micro_batch
    gated = model.threads.begin_gather(name)
    try:
        capsules, found = model.runtime.acquire_experts(
            list(numbers), phase.value, batch, expects_backward, batch == 0 and phase is Phase.FORWARD, versions
        )
    finally:
        if gated:
            model.threads.end_gather()
    return [from_dlpack(each) for each in capsules], found
