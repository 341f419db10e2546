"""The copies as a service of Megatron-Core's resharding."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.resharding.copy_services.base import CopyService as _CopyService

from ._copies import Copies


class CopyService(_CopyService):  # type: ignore[misc]
    """Moves the pieces of Megatron-Core's resharding; give it to swap_model_weights() as the method. See Copies.

    It has met Megatron-Core 0.16.1 on a CPU, and the resharding of 0.19.2 there, which passes a task's number as a
    keyword. It has not met a GPU: tensors there go by way of host memory.

    Megatron receives into buffers, and writes parameters once run() has returned, so that a failure leaves them as they
    were; from 0.19 on it receives straight into parameters where it can, and a rank that dies then leaves what the
    others have received by then.
    """

    # Of newer releases: run() returns only once every rank has what it receives, so that no barrier has to follow.
    requires_process_group_barrier = False

    def __init__(self, group: Any = None, *, timeout: float = 300.0) -> None:
        """Collective over the ranks of `group`, a ProcessGroup; None: torch's default one. `timeout`: see Copies."""
        if "group" in inspect.signature(_CopyService.__init__).parameters:
            super().__init__(group)
        self._copies = Copies(group, timeout=timeout)
        self.group = group
        self.rank = self._copies.rank
        self.world_size = self._copies.size

    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
        self._copies.send(src_tensor, dest_rank, task_id)

    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
        self._copies.receive(dest_tensor, src_rank, task_id)

    def submit_send_with_id(self, task_id: int, src_tensor: torch.Tensor, dest_rank: int) -> None:
        """As 0.16 calls it where sends have numbers."""
        self._copies.send(src_tensor, dest_rank, task_id)

    def submit_recv_with_id(self, task_id: int, dest_tensor: torch.Tensor, src_rank: int) -> None:
        self._copies.receive(dest_tensor, src_rank, task_id)

    def run(self) -> None:
        """Makes all copies that were submitted. Collective; see Copies.run()."""
        self._copies.run()

    def close(self) -> None:
        """Call it on every rank. Idempotent."""
        self._copies.close()

    def __enter__(self) -> CopyService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
