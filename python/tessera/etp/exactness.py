"""Whether a training's bits are those of one process: the conditions, looked at in the processes that train."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import torch
from torch._C import DisableTorchFunctionSubclass

from .buffers import Buffers
from .model import ShardedModel
from .muon import Muon
from .optim import is_elementwise
from .telling import json_of
from .views import model_of


@dataclasses.dataclass(frozen=True)
class Condition:
    """One thing that equal bits need.

    Attributes:
        name: "ranks", "gradients", "order", "operators", "buffers", "processes" or "optimizer".
        holds: Whether it is so.
        found: What was found; where it does not hold, what would have to change.
    """

    name: str
    holds: bool
    found: str


@dataclasses.dataclass(frozen=True)
class Exactness:
    """What exactness() found. It is true if all conditions hold; as text it is a line for each."""

    conditions: tuple[Condition, ...]

    @property
    def missing(self) -> tuple[Condition, ...]:
        """The conditions that do not hold."""
        return tuple(each for each in self.conditions if not each.holds)

    def __bool__(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        return "\n".join(f"{'ok' if each.holds else 'NO'}  {each.name}: {each.found}" for each in self.conditions)


def exactness(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Exactness:
    """Looks at the conditions under which training this model gives the bits of one process that is given all ranks'
    micro-batches in order. Collective.

    What it cannot see is the user's: that random numbers, such as dropout's, are seeded by micro-batch and not by rank,
    and that losses are scaled alike. verify() compares bits.

    Args:
        model: A sharded one; one that shard_module_() has left as it was is plain torch.
        optimizer: The one that will update it. None: that condition is left out.
    """
    sharded = model_of(model)
    if sharded is None:
        return Exactness((Condition("ranks", True, "1, without a format: the model is plain torch"),))
    return Exactness(tuple(_conditions(sharded, optimizer)))


def _conditions(sharded: ShardedModel, optimizer: torch.optim.Optimizer | None) -> Iterator[Condition]:
    size = sharded.size  # with replicas
    if size & (size - 1) == 0:
        yield Condition("ranks", True, f"{size}, a power of two: the mean over ranks rounds nothing")
    else:
        yield Condition("ranks", False, f"{size}: 1/{size} is rounded; take 2, 4, 8, ... ranks")
    yield _gradients(sharded)
    yield _order(sharded)
    if torch.are_deterministic_algorithms_enabled():
        yield Condition("operators", True, "torch runs deterministic ones only")
    else:
        yield Condition(
            "operators", False, "torch may take those whose order of additions varies: use_deterministic_algorithms()"
        )
    if sharded.buffers is not None and sharded.buffers.entries:
        yield _buffers(sharded, sharded.buffers)
    yield _processes(sharded)
    if optimizer is not None:
        yield _optimizer(sharded, optimizer)


def _gradients(sharded: ShardedModel) -> Condition:
    """Sums in less than fp32 are rounded once a round, which is N micro-batches."""
    parameters = [(each.name, each.dtype) for each in sharded.weights]
    parameters += [(each.name, each.parameter.dtype) for each in sharded.replicated]
    narrow = next((each for each in parameters if each[1] != torch.float32), None)
    if narrow is None:
        return Condition("gradients", True, "all are fp32")
    name, dtype = narrow
    return Condition(
        "gradients",
        False,
        f"those of {name} are {_short(dtype)}, rounded once for all ranks: keep parameters in fp32 and gather bf16 "
        'with formats={".*": "bf16"}',
    )


def _order(sharded: ShardedModel) -> Condition:
    """Additions begin with the gradient that is there, one micro-batch after the other."""
    if sharded.inline:
        return Condition(
            "order", False, 'mode="inline" adds the sum of a round: exact without accumulation; mode="deferred" is'
        )
    cut = next((each.name for each in sharded.weights if hasattr(each.parameter, "etp_parallel")), None)
    if cut is not None:
        return Condition(
            "order",
            False,
            f"{cut} is cut over a tp_group, whose ranks add products: equal for every size of ETP groups",
        )
    with DisableTorchFunctionSubclass():
        hooked = next((each.name for each in sharded.weights if each.parameter._backward_hooks), None)
    if hooked is not None:
        return Condition(
            "order", False, f"a tensor hook of {hooked} takes the sum of a round: exact without accumulation"
        )
    return Condition("order", True, "gradients are added in the order of micro-batches")


def _buffers(sharded: ShardedModel, buffers: Buffers) -> Condition:
    """One process makes one forward after the other, and each changes what the one before has left."""
    moving = buffers.moving or buffers.expected()
    if not moving:
        return Condition("buffers", True, "equal on all ranks, and no forward has changed them")
    name, mode = moving[0]
    kept = {"broadcast": "take rank 0's", "mean": "take the mean", "own": "keep their own"}[mode]
    return Condition(
        "buffers",
        False,
        f"forwards change {name}, on each rank by its own tokens, and ranks {kept} at the end of a backward (in "
        "DistributedDataParallel, of the next forward): one process counts every micro-batch; eval() of that module "
        "leaves it as it is",
    )


def _processes(sharded: ShardedModel) -> Condition:
    """Products of small matrices differ between one thread and two."""
    own = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "precision of fp32 products": torch.get_float32_matmul_precision(),
        "deterministic operators": torch.are_deterministic_algorithms_enabled(),
    }
    what = "what bits depend on"
    ranks = json_of(sharded.core.exchange(what, json.dumps(own).encode()), what, lambda told: isinstance(told, dict))
    for rank, other in enumerate(ranks):
        for what, value in ranks[0].items():
            if other.get(what) != value:
                return Condition(
                    "processes", False, f"{what}: {value} on rank 0, {other.get(what)} on rank {rank}; make them equal"
                )
    return Condition("processes", True, ", ".join(f"{what} {value}" for what, value in own.items()) + " on all ranks")


def _optimizer(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> Condition:
    kind = type(optimizer)
    if not is_elementwise(kind):
        return Condition(
            "optimizer",
            False,
            f"{kind.__name__} is not known to update every element by itself: its steps have the bits of one process "
            "unless they go by norms of gradients, whose last bits may differ",
        )
    if issubclass(kind, Muon):
        return Condition("optimizer", True, "etp.Muon has the bits of torch.optim.Muon")
    momentum = isinstance(optimizer, torch.optim.SGD) and any(group["momentum"] for group in optimizer.param_groups)
    narrow = next((each for each in sharded.weights if each.dtype != torch.float32), None)
    if momentum and narrow is not None:
        return Condition(
            "optimizer",
            False,
            f"SGD with momentum rounds {_short(narrow.dtype)} weights, such as {narrow.name}, by the number of their "
            "elements: take AdamW, or fp32 parameters",
        )
    return Condition("optimizer", True, f"{kind.__name__} updates every element by itself")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
