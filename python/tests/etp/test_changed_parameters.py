"""Parameters that every rank has whole and a program changes behind shard_module_(): released, resized, converted,
swapped, pruned, used by some ranks only. Each program has the numbers of plain torch on all ranks' inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from etp_models import built
from tessera import etp
from torch_ranks import launch

WIDTH, HIDDEN = 24, 40
SIZES = (2, 3)


class Model(torch.nn.Module):
    """Two parts that are called by themselves, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)
        self.gate = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, gated: bool = False) -> torch.Tensor:
        y = self.down(self.norm(self.up(x)).tanh())
        return x + self.gate * y if gated else y


class Ranks:
    """The ranks whose inputs a program computes with: this one, or all of them in one process."""

    def __init__(self, size: int, rank: int | None) -> None:
        self.size, self.rank = size, rank

    def loss(self, of: Callable[[torch.Tensor, int], torch.Tensor], step: int) -> torch.Tensor:
        ranks = range(self.size) if self.rank is None else [self.rank]
        losses = []
        for rank in ranks:
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
            losses.append(of(x, rank).square().mean())
        return sum(losses) / len(losses)  # type: ignore[return-value]


def _steps(model: Any, ranks: Ranks, of: Callable[[torch.Tensor, int], torch.Tensor], steps: int = 3) -> list[Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        ranks.loss(of, step).backward()
        optimizer.step()
    return [etp.whole(each).detach() for each in model.parameters()]


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _pruned(layer: Any) -> None:
    torch.nn.utils.prune.l1_unstructured(layer, "bias", 3)


def _normed(layer: Any) -> None:
    torch.nn.utils.weight_norm(layer, "bias", dim=0)


def _plain_tensor(layer: Any) -> None:
    bias = layer.bias.detach().clone()
    del layer.bias
    layer.bias = bias


def _buffer(layer: Any) -> None:
    bias = layer.bias.detach().clone()
    del layer.bias
    layer.register_buffer("bias", bias)


def _parametrized(layer: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(layer, "bias", Doubled())


def a_bias(change: Callable[[Any], None], model: Any, ranks: Ranks) -> Any:
    """Train a layer whose bias is no parameter of it."""
    change(model.up)
    before = ranks.loss(lambda x, _: model(x), 9).detach()
    return [*_steps(model, ranks, lambda x, _: model(x)), before if ranks.rank is None else None]


def a_resized_norm(smaller: bool, model: Any, ranks: Ranks) -> Any:
    """As pruning of channels does; what it is given is cut or repeated."""
    width = HIDDEN // 2 if smaller else 2 * HIDDEN
    for parameter in (model.norm.weight, model.norm.bias):
        parameter.data = torch.cat([parameter.detach()] * 2)[:width].clone()
    model.norm.normalized_shape = (width,)

    def forward(x: torch.Tensor, _: int) -> torch.Tensor:
        y = model.norm(torch.cat([model.up(x)] * 2, -1)[:, :width])
        return model.down(torch.cat([y] * 2, -1)[:, :HIDDEN].tanh())

    return _steps(model, ranks, forward)


def a_converted_norm(dtype: torch.dtype, model: Any, ranks: Ranks) -> Any:
    model.norm.to(dtype)
    return _steps(model, ranks, lambda x, _: model.down(model.norm(model.up(x).to(dtype)).float().tanh()))


def released(names: str, model: Any, ranks: Ranks) -> Any:
    """By a program that calls parts only; they were frozen when the model was sharded."""
    model.norm.requires_grad_(True)
    if names == "weights, too":
        model.down.requires_grad_(True)
    return _steps(model, ranks, lambda x, _: model.down(model.norm(model.up(x)).tanh()))


def two_players(model: Any, ranks: Ranks) -> Any:
    """A GAN in one module, whose parts are frozen in turn."""
    players = [[model.up, model.norm], [model.down]]
    optimizers = [torch.optim.SGD([p for m in player for p in m.parameters()], lr=0.1) for player in players]
    for step in range(6):
        for number, player in enumerate(players):
            for module in player:
                module.requires_grad_(number == step % 2)
        optimizers[step % 2].zero_grad()
        ranks.loss(lambda x, _: model.down(model.norm(model.up(x)).tanh()), step).backward()
        optimizers[step % 2].step()
    return [etp.whole(each).detach() for each in model.parameters()]


def used_by_one_rank(zero: bool, model: Any, ranks: Ranks) -> Any:
    """With a gradient of exactly zero, or another one."""

    def of(x: torch.Tensor, rank: int) -> torch.Tensor:
        return (model(x, gated=True) * (0.0 if zero else 1.0) + x) if rank == 0 else model(x)

    return _steps(model, ranks, of)


def stepped_in_hooks(model: Any, ranks: Ranks) -> Any:
    """An optimiser in the backward, of what not every rank uses."""

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
        parameter.grad = None

    for parameter in (model.gate, model.norm.bias):
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        ranks.loss(lambda x, rank: model(x, gated=rank == 0), number).backward()
    return [model.gate.detach().clone(), model.norm.bias.detach().clone()]


def swapped(model: Any, ranks: Ranks) -> Any:
    torch.utils.swap_tensors(model.norm.bias, torch.nn.Parameter(torch.full((HIDDEN,), 0.5)))
    return _steps(model, ranks, lambda x, _: model(x))


def a_sparse_gradient(model: Any, ranks: Ranks) -> Any:
    ranks.loss(lambda x, _: model(x), 0).backward()
    model.norm.bias.grad = model.norm.bias.grad.to_sparse()
    ranks.loss(lambda x, _: model(x), 1).backward()
    return [model.norm.bias.grad.to_dense()]


Program = Callable[[Any, Ranks], Any]
PROGRAMS: dict[str, Program] = {
    **{f"a bias: {change.__name__}": functools.partial(a_bias, change)
       for change in (_pruned, _normed, _plain_tensor, _buffer, _parametrized)},
    "a smaller norm": functools.partial(a_resized_norm, True),
    "a larger norm": functools.partial(a_resized_norm, False),
    "a norm in float64": functools.partial(a_converted_norm, torch.float64),
    "a norm in bfloat16": functools.partial(a_converted_norm, torch.bfloat16),
    "a released norm": functools.partial(released, "a norm"),
    "released weights": functools.partial(released, "weights, too"),
    "a zero gradient of one rank": functools.partial(used_by_one_rank, True),
    "a gradient of one rank": functools.partial(used_by_one_rank, False),
    **{each.__name__: each for each in (two_players, stepped_in_hooks, swapped, a_sparse_gradient)},
}  # fmt: skip


def _model(name: str) -> Any:
    model = built(Model)
    if name.startswith(("a released", "released")):
        model.norm.requires_grad_(False)
        model.down.requires_grad_(False)
    return model


def _runs(size: int, rank: int) -> Any:
    with etp.init_group(timeout=60) as group:
        return {
            name: program(etp.shard_module_(_model(name), group, min_elements=256), Ranks(size, rank))
            for name, program in PROGRAMS.items()
        }


@pytest.fixture(scope="module", params=SIZES)
def runs(request: pytest.FixtureRequest) -> tuple[int, list[Any]]:
    return request.param, launch(functools.partial(_runs, request.param), request.param)


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_one_process(runs: tuple[int, list[Any]], name: str) -> None:
    size, ranks = runs
    expected = PROGRAMS[name](_model(name), Ranks(size, None))
    loose = "bfloat16" in name
    for found in ranks:
        for value, right, first in zip(found[name], expected, ranks[0][name], strict=True):
            if value is None:  # a loss of a rank's own
                continue
            torch.testing.assert_close(value, right, rtol=0.05 if loose else 1e-3, atol=2e-2 if loose else 2e-5)
            assert torch.equal(value, first)


def _constructed_runs(rank: int) -> list[tuple[float, float]]:
    """Prune all of a bias, or of a norm's weight, of layers that are constructed sharded."""
    found = []
    with etp.init_group(timeout=60) as group:
        for kind, name in ((etp.Linear, "bias"), (etp.LayerNormLinear, "layer_norm_weight")):
            torch.manual_seed(0)
            layer = kind(WIDTH, HIDDEN, etp_group=group)
            with torch.no_grad():
                getattr(layer, name).fill_(1.0)
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))
            torch.nn.utils.prune.l1_unstructured(layer, name, amount=1.0)
            out = layer(x)
            out.sum().backward()
            plain = x @ etp.whole(layer.weight).T if name == "bias" else layer.bias.expand(3, -1)
            found.append((float((out - plain).abs().max()), float(getattr(layer, f"{name}_orig").grad.abs().max())))
    return found


def test_pruned_parts_of_constructed_layers_are_used() -> None:
    for found in launch(_constructed_runs, 2):
        assert all(difference < 1e-5 and gradient == 0 for difference, gradient in found)
