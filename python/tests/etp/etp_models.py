"""Small models, and trainings that run sharded on the ranks of a group and unsharded in one process.

    def frozen(run: Run) -> Weights:            # written once
        model = run.sharded(built())
        ...
        run.train(model, adamw(model.parameters()), steps=5)
        return run.weights(model)

    compare(frozen, size=2)                     # runs it both ways: every rank's bytes are those of the plain one

Micro-batches are numbered globally, m = micro-step * N + rank; both ways add their gradients in that order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tessera import etp
from torch.distributed.device_mesh import init_device_mesh
from torch_ranks import launch

WORDS, WIDTH, HIDDEN, LENGTH, ROWS = 203, 32, 80, 6, 4
Loss = Callable[[torch.nn.Module, int], torch.Tensor]
Adjust = Callable[[torch.nn.Module], Any]


class Tied(torch.nn.Module):
    """An embedding that is the last layer's weight, too; two layers and a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.emb.weight

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.norm(self.up(x))))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.emb(ids)))


def built(kind: Callable[[], torch.nn.Module] = Tied, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return kind()


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Global micro-batch `number`: tokens and targets."""
    generator = torch.Generator().manual_seed(1000 + number)
    both = torch.randint(0, WORDS, (2, ROWS, LENGTH), generator=generator)
    return both[0], both[1]


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    ids, targets = batch(number)
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


def adamw(parameters: Iterable[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


@contextlib.contextmanager
def configured(**options: Any) -> Iterator[None]:
    """With options of update_config()."""
    config = etp.config.config
    before = {name: getattr(config, name) for name in options}
    etp.update_config(**options)
    try:
        yield
    finally:
        etp.update_config(**before)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Run:
    """One rank's view of a training; without a group, all ranks' in one process of plain torch."""

    size: int
    rank: int = 0
    group: etp.Group | None = None
    done: int = 0  # micro-steps
    dp: etp.Group | None = None
    mode: str = "deferred"  # of layers that are constructed sharded

    @property
    def groups(self) -> dict[str, Any]:
        """Of layers that are constructed sharded."""
        return {"etp_group": self.group, "dp": self.dp, "mode": self.mode}

    def sharded(self, model: Any, **options: Any) -> Any:
        return model if self.group is None else etp.shard_module_(model, self.group, dp=self.dp, **options)

    def numbers(self) -> list[int]:
        """The global micro-batches of the next micro-step that are done here."""
        first = self.done * self.size
        self.done += 1
        return [first + self.rank] if self.group is not None else list(range(first, first + self.size))

    def backward(self, model: Any, loss: Loss = loss_of, scale: float = 1.0) -> None:
        """One micro-step."""
        for number in self.numbers():
            value = loss(model, number) * scale
            (value if self.group is not None else value / self.size).backward()

    def train(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        steps: int = 3,
        accumulation: int = 1,
        before_step: Adjust = lambda model: None,
        set_to_none: bool = True,
        loss: Loss = loss_of,
    ) -> None:
        for _ in range(steps):
            for _ in range(accumulation):
                self.backward(model, loss, 1 / accumulation)
            before_step(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.group is None else etp.whole(tensor)

    def weights(self, model: Any) -> dict[str, bytes]:
        return {name: as_bytes(self.whole(parameter)) for name, parameter in model.named_parameters()}

    def gradients(self, model: Any) -> dict[str, bytes | None]:
        return {
            name: None if parameter.grad is None else as_bytes(self.whole(parameter.grad))
            for name, parameter in model.named_parameters()
        }

    def update(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.group is None else etp.update(model)


Scenario = Callable[[Run], Any]


def plainly(scenario: Scenario, size: int) -> Any:
    """What it returns in one process of plain torch."""
    torch.set_num_threads(1)
    return scenario(Run(size))


def on_ranks(scenarios: dict[str, Scenario], size: int) -> dict[str, list[Any]]:
    """What each returns on each rank, by name; one launch for all of them."""
    found = launch(functools.partial(_each, scenarios, size), size)
    return {name: [rank[name] for rank in found] for name in scenarios}


def _each(scenarios: dict[str, Scenario], size: int, rank: int) -> dict[str, Any]:
    with etp.init_group(timeout=30) as group:
        return {name: scenario(Run(size, rank, group)) for name, scenario in scenarios.items()}


def on_grid(scenarios: dict[str, Scenario], replicas: int, shards: int) -> dict[str, list[Any]]:
    """The same on `replicas` ETP groups of `shards` ranks."""
    found = launch(functools.partial(_each_on_grid, scenarios, replicas, shards), replicas * shards)
    return {name: [rank[name] for rank in found] for name in scenarios}


def _each_on_grid(scenarios: dict[str, Scenario], replicas: int, shards: int, rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp", "etp"))
    with (
        etp.init_group(mesh=mesh["etp"], timeout=30) as group,
        etp.init_group(mesh=mesh["dp"], name="dp", timeout=30) as dp,
    ):
        return {name: scenario(Run(replicas * shards, rank, group, dp=dp)) for name, scenario in scenarios.items()}


def scenarios_of(namespace: dict[str, Any]) -> dict[str, Scenario]:
    """The public functions of a module that take a run."""
    return dict(_scenarios(namespace))


def _scenarios(namespace: dict[str, Any]) -> Iterator[tuple[str, Scenario]]:
    for name, value in namespace.items():
        if not name.startswith("_") and getattr(value, "__annotations__", {}).get("run") == "Run":
            yield name, value
