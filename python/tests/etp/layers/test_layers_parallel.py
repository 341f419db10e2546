"""Tensor parallelism of constructed layers: close to the unsharded model, and the same bytes for every ETP size."""

from __future__ import annotations

import functools
import io
import math
from typing import Any

import pytest
import tessera
import torch
from etp_models import HIDDEN, WIDTH, Run, built
from tessera import etp
from torch_ranks import launch

TP, SEQUENCE, BATCH = 2, 6, 3
CASES = [(activation, sequence) for activation in ("gelu", "swiglu") for sequence in (False, True)]
Weights = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    def __init__(self, activation: str, sequence: bool, tp_group: Any, group: etp.Group | None) -> None:
        super().__init__()
        options = {"tp_group": tp_group, "sequence_parallel": sequence, "etp_group": group}
        self.first = etp.LayerNormLinear(WIDTH, HIDDEN, parallel_mode="column", init_method=_init, **options)
        self.second = etp.Linear(HIDDEN, WIDTH, parallel_mode="row", init_method=_init, **options)
        self.third = etp.LayerNormMLP(
            WIDTH,
            HIDDEN,
            normalization="RMSNorm",
            activation=activation,
            set_parallel_mode=True,
            init_method=_init,
            output_layer_init_method=_init,
            **options,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(torch.nn.functional.gelu(self.first(x))))


def _init(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, std=0.2)


def _trained(run: Run, activation: str, sequence: bool, tp_group: Any) -> Weights:
    """Ranks of a tp_group see the same tokens, or their part of the sequence."""
    tp_rank = 0 if tp_group is None else torch.distributed.get_rank(tp_group)

    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        x = torch.rand(SEQUENCE, BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        if sequence and tp_group is not None:
            x = x.chunk(TP)[tp_rank]
        return model(x).sin().sum() / 100

    model = built(lambda: Model(activation, sequence, tp_group, run.group))
    run.train(model, torch.optim.SGD(model.parameters(), lr=1e-1), steps=3, loss=loss)
    return {name: run.whole(each).detach().clone() for name, each in model.named_parameters()}


def _on_rank(rank: int, etp_size: int) -> list[Weights]:
    """Tensor parallelism over neighbours, ETP across."""
    tp_groups = [torch.distributed.new_group([TP * i, TP * i + 1]) for i in range(etp_size)]
    etp_groups = [torch.distributed.new_group([i, i + TP]) for i in range(TP)] if etp_size > 1 else []
    tp_group = tp_groups[rank // TP]
    if not etp_groups:
        return [_trained(Run(2), *case, tp_group) for case in CASES]
    with etp.init_group(etp_groups[rank % TP], timeout=30) as group:
        return [_trained(Run(2, rank // TP, group), *case, tp_group) for case in CASES]


@pytest.fixture(scope="module")
def trained() -> dict[int, list[list[Weights]]]:
    return {size: launch(functools.partial(_on_rank, etp_size=size), TP * size) for size in (1, 2)}


def _part(name: str, whole: torch.Tensor, rank: int, activation: str) -> torch.Tensor:
    """By the rules of Megatron."""
    if name in ("second.weight", "third.fc2_weight"):
        return whole.chunk(TP, 1)[rank]
    if name in ("first.weight", "first.bias"):
        return whole.chunk(TP)[rank]
    if name.startswith("third.fc1"):
        halves = whole.chunk(2 if activation == "swiglu" else 1)
        return torch.cat([each.chunk(TP)[rank] for each in halves])
    return whole


@pytest.mark.parametrize("case", CASES)
def test_it_is_close_to_the_unsharded_model(trained: dict[int, list[list[Weights]]], case: tuple[str, bool]) -> None:
    torch.set_num_threads(1)
    expected = _trained(Run(2), *case, None)
    before = dict(built(lambda: Model(*case, None, None)).named_parameters())
    for rank, found in enumerate(trained[1]):
        for name, value in found[CASES.index(case)].items():
            part = _part(name, expected[name], rank, case[0])
            torch.testing.assert_close(value, part, rtol=1e-4, atol=1e-6)
            moved = (part - _part(name, before[name], rank, case[0])).abs().max()
            assert moved > 1e-4, name  # a gradient that is missing, or twice there, would show


def test_every_etp_size_gives_the_same_bytes(trained: dict[int, list[list[Weights]]]) -> None:
    for rank, found in enumerate(trained[2]):
        for mine, other in zip(found, trained[1][rank % TP], strict=True):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine)


class Two(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = etp.LayerNormLinear(WIDTH, HIDDEN, parallel_mode="column", init_method=_init, **options)
        self.second = etp.Linear(HIDDEN, WIDTH, parallel_mode="row", init_method=_init, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x)))


def _penalised(run: Run, sequence: bool, tp_group: Any) -> Weights:
    """Gradients of the weights by a penalty on the gradient of the input, which passes all layers twice."""
    tp_rank = 0 if tp_group is None else torch.distributed.get_rank(tp_group)
    options = {"tp_group": tp_group, "sequence_parallel": sequence, "etp_group": run.group, "mode": "inline"}
    model = built(lambda: Two(**options))
    for number in run.numbers():
        x = torch.rand(SEQUENCE, BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        x = (x.chunk(TP)[tp_rank] if sequence and tp_group is not None else x).clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
        (gradient.pow(2).sum() / (1 if run.group is not None else run.size)).backward()
    named = {f"{name}.weight": getattr(model, name).weight for name in ("first", "second")}
    return {name: run.whole(each.grad).detach().clone() for name, each in named.items()}


def _penalised_on_rank(rank: int) -> list[Weights]:
    tp_groups = [torch.distributed.new_group([TP * i, TP * i + 1]) for i in range(2)]
    etp_groups = [torch.distributed.new_group([i, i + TP]) for i in range(TP)]
    with etp.init_group(etp_groups[rank % TP], timeout=30) as group:
        return [_penalised(Run(2, rank // TP, group), sequence, tp_groups[rank // TP]) for sequence in (False, True)]


def test_second_derivatives_pass_the_exchanges() -> None:
    found = launch(_penalised_on_rank, TP * 2)
    for i, sequence in enumerate((False, True)):
        expected = _penalised(Run(2), sequence, None)
        for rank, each in enumerate(found):
            for name, value in each[i].items():
                part = _part(name, expected[name], rank % TP, "gelu")
                assert part.abs().max() > 1e-3
                torch.testing.assert_close(value, part, rtol=1e-4, atol=1e-5 * float(part.abs().max()))


ORDERS = (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0)


def _norms(run: Run, activation: str, sequence: bool, tp_group: Any) -> list[float]:
    tp_rank = 0 if tp_group is None else torch.distributed.get_rank(tp_group)
    model = built(lambda: Model(activation, sequence, tp_group, run.group))
    for number in run.numbers():
        x = torch.rand(SEQUENCE, BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        x = x.chunk(TP)[tp_rank] if sequence and tp_group is not None else x
        (model(x).sin().sum() / (1 if run.group is not None else run.size)).backward()
    found = [float(etp.clip_grad_norm_(model.parameters(), math.inf, order)) for order in ORDERS]
    etp.clip_grad_norm_(model.parameters(), 0.25)
    return [*found, float(etp.clip_grad_norm_(model.parameters(), math.inf))]


def _norms_on_rank(rank: int) -> list[list[float]]:
    tp_groups = [torch.distributed.new_group([TP * i, TP * i + 1]) for i in range(2)]
    etp_groups = [torch.distributed.new_group([i, i + TP]) for i in range(TP)]
    with etp.init_group(etp_groups[rank % TP], timeout=30) as group:
        return [_norms(Run(2, rank // TP, group), *case, tp_groups[rank // TP]) for case in CASES]


def test_a_norm_is_that_of_all_parts() -> None:
    """Also of what ranks of a tp_group have whole, which counts once."""
    first, *others = launch(_norms_on_rank, TP * 2)
    assert all(each == first for each in others)
    for case, found in zip(CASES, first, strict=True):
        *expected, clipped = _norms(Run(2), *case, None)
        assert found[:-1] == pytest.approx(expected, rel=1e-5, abs=1e-5)  # the smallest element is all rounding
        assert found[-1] == pytest.approx(0.25, rel=1e-5) == clipped


def _marked(rank: int) -> list[tuple[bool, int]]:
    layer = etp.Linear(8, 8, parallel_mode="row", tp_group=torch.distributed.group.WORLD)
    with pytest.raises(tessera.InvalidArgumentError, match="cannot be pickled"):
        torch.save(layer, io.BytesIO())
    return [(each.tensor_model_parallel, each.partition_dim) for each in layer.parameters()]


def _exact(rank: int) -> str:
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    with etp.init_group(alone) as group:
        options = {"parallel_mode": "row", "tp_group": torch.distributed.group.WORLD, "weight_format": "bf16"}
        return str(etp.exactness(etp.Linear(8, 8, etp_group=group, **options)))


def test_it_is_not_called_exact() -> None:
    assert all("NO  order: Linear0.weight is cut over a tp_group" in each for each in launch(_exact, 2))


def test_parameters_have_the_attributes_that_megatron_gives_them() -> None:
    assert launch(_marked, 2) == [[(True, 1), (False, -1)]] * 2


class _Sum(torch.autograd.Function):
    """Over a tp_group, whose ranks all go on with it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None


class Experts(torch.nn.Module):
    """The caller adds outputs, and then the biases."""

    def __init__(self, tp_group: Any, group: etp.Group | None) -> None:
        super().__init__()
        options = {"init_method": _init, "tp_group": tp_group, "etp_group": group}
        self.up = etp.GroupedLinear(2, WIDTH, HIDDEN, parallel_mode="column", **options)
        self.down = etp.GroupedLinear(2, HIDDEN, WIDTH, return_bias=True, parallel_mode="row", **options)
        self.tp_group = tp_group

    def forward(self, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        out, biases = self.down(torch.nn.functional.gelu(self.up(x, splits)), splits)
        out = out if self.tp_group is None else _Sum.apply(out, self.tp_group)
        return torch.cat([part + bias for part, bias in zip(out.split(splits), biases, strict=True)])


def _experts(run: Run, tp_group: Any) -> Weights:
    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        splits = [3, 5] if number % 2 == 0 else [0, 4]
        x = torch.rand(sum(splits), WIDTH, generator=torch.Generator().manual_seed(number))
        return model(x, splits).sin().sum() / 100

    model = built(lambda: Experts(tp_group, run.group))
    run.train(model, torch.optim.SGD(model.parameters(), lr=1e-1), loss=loss)
    return {name: run.whole(each).detach().clone() for name, each in model.named_parameters()}


def _experts_on_rank(rank: int) -> tuple[Weights, str]:
    tp_groups = [torch.distributed.new_group([TP * i, TP * i + 1]) for i in range(2)]
    etp_groups = [torch.distributed.new_group([i, i + TP]) for i in range(TP)]
    with pytest.raises(tessera.InvalidArgumentError) as refused:
        etp.GroupedLinear(2, 8, 8, parallel_mode="row", tp_group=tp_groups[rank // TP])
    with etp.init_group(etp_groups[rank % TP], timeout=30) as group:
        return _experts(Run(2, rank // TP, group), tp_groups[rank // TP]), str(refused.value)


def test_experts() -> None:
    expected = _experts(Run(2), None)
    before = dict(built(lambda: Experts(None, None)).named_parameters())
    for rank, (found, refused) in enumerate(launch(_experts_on_rank, TP * 2)):
        assert "every rank of the tp_group would add it" in refused
        for name, value in found.items():
            dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name[:-1])
            parts = [each if dim is None else each.chunk(TP, dim)[rank % TP] for each in (expected[name], before[name])]
            torch.testing.assert_close(value, parts[0], rtol=1e-4, atol=1e-6)
            assert (parts[0] - parts[1]).abs().max() > 1e-4, name
