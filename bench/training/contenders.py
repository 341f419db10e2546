"""Ways to train the model on several processes: ETP in its forms, DDP, FSDP2, and what is possible.

All have the same weights at first, and the same tokens, which differ between ranks. One that is made with a `pace` has
streams that take at least as long as at that rate, in bytes a second.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tessera import etp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from .llama import Llama, built

BLOCKS = r"blocks\..*"
LR = 1e-3


class Contender:
    """A model and its optimiser. `losses` are this rank's."""

    def __init__(self, options: argparse.Namespace, model: torch.nn.Module, autocast: bool = False) -> None:
        self.options = options
        self.model = model
        self.autocast = autocast
        self.optimizer = self.optimizer_of(model)
        self.losses: list[float] = []

    def optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LR)

    def step(self) -> None:
        options = self.options
        generator = torch.Generator().manual_seed(len(self.losses) * dist.get_world_size() + dist.get_rank())
        even = torch.rand(options.batch, options.tokens + 1, generator=generator)
        words = (even**4 * options.words).long()  # some are frequent, which is learnt within a few steps
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            out = self.model(words[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1).float(), words[:, 1:].flatten())
        loss.backward()
        self.update()
        self.losses.append(loss.item())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def exposed(self) -> float:
        """Seconds so far in which this rank waited for gathers; 0 where nobody counts."""
        return 0.0

    def gathered(self) -> int:
        """Bytes so far that this rank has gathered; 0 where nobody counts."""
        return 0

    def state(self) -> Iterator[torch.Tensor]:
        """What a rank keeps from step to step, and gradients."""
        for parameter in self.model.parameters():
            rows = _rows(parameter.detach())
            yield from (rows, rows)  # a gradient is as large
        for state in self.optimizer.state.values():
            yield from map(_rows, state.values())


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor that FSDP2 or ETP may have sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else etp.local(tensor)


class Sharded(Contender):
    """By ETP."""

    def exposed(self) -> float:
        return etp.report(self.model).exposed_seconds

    def gathered(self) -> int:
        return etp.report(self.model).bytes_gathered


class Ceiling(Contender):
    """Whole weights that nobody else writes, nothing sent, the optimiser on 1/N of the rows of each weight."""

    def optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        self.parts: list[tuple[torch.nn.Parameter, torch.nn.Parameter, slice]] = []
        for parameter in model.parameters():
            rows, share = parameter.shape[0], -(-parameter.shape[0] // dist.get_world_size())
            mine = slice(min(dist.get_rank() * share, rows), min((dist.get_rank() + 1) * share, rows))
            self.parts.append((parameter, torch.nn.Parameter(parameter.detach()[mine]), mine))
        return torch.optim.AdamW([part for _, part, _ in self.parts], lr=LR)

    def update(self) -> None:
        for parameter, part, mine in self.parts:
            part.grad = None if parameter.grad is None else parameter.grad[mine]
        super().update()
        self.model.zero_grad()


Make = Callable[[argparse.Namespace, etp.Group, float | None], Contender]


def ceiling(options: argparse.Namespace, group: etp.Group, pace: float | None) -> Contender:
    return Ceiling(options, built(options))


def ddp(options: argparse.Namespace, group: etp.Group, pace: float | None) -> Contender:
    return Contender(options, DistributedDataParallel(built(options)))


def fsdp2(units: Callable[[Llama], Iterable[torch.nn.Module]], **policy: Any) -> Make:
    def make(options: argparse.Namespace, group: etp.Group, pace: float | None) -> Contender:
        model = built(options)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        mixed = MixedPrecisionPolicy(**policy)
        for unit in (*units(model), model):
            fully_shard(unit, mesh=mesh, mp_policy=mixed)
        return Contender(options, model)

    return make


def a_block(model: Llama) -> Iterable[torch.nn.Module]:
    return (*model.blocks, model.embedding, model.head)


def a_weight(model: Llama) -> Iterable[torch.nn.Module]:
    return [each for each in model.modules() if isinstance(each, torch.nn.Linear | torch.nn.Embedding)]


def sharded(
    format: str | None = None,
    *,
    compute: torch.dtype | None = torch.float32,
    pattern: str = BLOCKS,
    checkpoints: bool = False,
    **config: Any,
) -> Make:
    """By ETP; `config` are options of update_config()."""

    def make(options: argparse.Namespace, group: etp.Group, pace: float | None) -> Contender:
        before = {name: getattr(etp.config.config, name) for name in (*config, "stream_bytes_per_second")}
        etp.update_config(**config, stream_bytes_per_second=pace)
        model = etp.shard_module_(
            built(options, checkpoints), group, formats={pattern: format} if format else None, compute_dtype=compute
        )
        etp.update_config(**before)
        return Sharded(options, model, autocast=compute is not torch.float32)

    return make


class Kind(NamedTuple):
    make: Make
    tolerance: float  # of losses, relative to DDP's


MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
AHEAD = {"prefetch": "on", "distance": 2}

# Sums have another order; formats have 8, 3 and 1 bits of mantissa.
KINDS = {
    "ceiling": Kind(ceiling, 1e-5),
    "ddp": Kind(ddp, 1e-5),
    "fsdp2-block": Kind(fsdp2(a_block), 1e-5),
    "fsdp2-weight": Kind(fsdp2(a_weight), 1e-5),
    "etp": Kind(sharded(), 1e-5),
    "etp-copied": Kind(sharded(map_weights=False), 1e-5),
    "etp-checkpoint": Kind(sharded(checkpoints=True), 1e-5),
    "fsdp2-mixed": Kind(fsdp2(a_block, **MIXED), 2e-2),
    "etp-mixed": Kind(sharded("bf16", compute=None, pattern=".*"), 2e-2),
    "etp-bf16": Kind(sharded("bf16"), 1e-3),
    "etp-mxfp8": Kind(sharded("mxfp8"), 1e-2),
    "etp-nvfp4": Kind(sharded("nvfp4"), 5e-2),
}
PACED = {
    "bf16": Kind(sharded("bf16", **AHEAD), 1e-3),
    "nvfp4": Kind(sharded("nvfp4", **AHEAD), 5e-2),
    "mixed": Kind(sharded("bf16", compute=torch.bfloat16, pattern=".*", **AHEAD), 2e-2),
    "mixed-nvfp4": Kind(sharded("nvfp4", compute=torch.bfloat16, pattern=".*", **AHEAD), 5e-2),
    "ahead": Kind(sharded(**AHEAD), 1e-5),
    "on-demand": Kind(sharded(weight_prefetch=False), 1e-5),
}
