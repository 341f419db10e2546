"""torch.amp.GradScaler: a value that is not finite on one rank, of a tp_group or of one of several ETP groups, makes
all ranks skip the step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from etp_models import HIDDEN, WIDTH, Run, built
from tessera import etp
from torch_ranks import launch

TP, STEPS, FAULTY = 2, 4, 1
PLACES = ("first.weight", "first.bias", "second.weight")  # that the tp_group cuts
KINDS = ("no group", "one rank in a format", "two ranks", "inline")


class Two(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = etp.Linear(WIDTH, HIDDEN, parallel_mode="column", init_method=_init, **options)
        self.second = etp.Linear(HIDDEN, WIDTH, parallel_mode="row", init_method=_init, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x)))


def _init(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, std=0.2)


def _loss(model: torch.nn.Module, number: int) -> torch.Tensor:
    x = torch.rand(6, WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x).sin().sum() / 100


def _scaled(run: Run, model: torch.nn.Module, place: str, faulty: bool) -> tuple[list[float], list[bool], Any]:
    """Scales, which steps changed weights, and weights at the end."""
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=1e-1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales, changed = [], []
    for step in range(STEPS):
        before = run.weights(model)
        run.backward(model, lambda model, number: scaler.scale(_loss(model, number)))
        if step == FAULTY and faulty:
            etp.local(parameters[place].grad).view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scales.append(scaler.get_scale())
        changed.append(run.weights(model) != before)
    return scales, changed, run.weights(model)


def _on_rank(rank: int, etp_size: int) -> dict[str, Any]:
    """Tensor parallelism over neighbours, ETP across."""
    tp_groups = [torch.distributed.new_group([TP * i, TP * i + 1]) for i in range(etp_size)]
    etp_groups = [torch.distributed.new_group(list(range(i, TP * etp_size, TP))) for i in range(TP)]
    faulty = rank == TP * etp_size - 1  # of the second part
    found = {}
    with etp.init_group(etp_groups[rank % TP], timeout=30) as group:
        run = Run(2, rank // TP, group if etp_size > 1 else None)
        options: dict[str, Any] = {"tp_group": tp_groups[rank // TP], "etp_group": group}
        kinds = {
            "no group": {"etp_group": None},
            "one rank in a format": {"weight_format": "bf16"},
            "two ranks": {},
            "inline": {"mode": "inline"},
        }
        for kind in KINDS[:2] if etp_size == 1 else KINDS[2:]:
            for place in PLACES:
                run.done = 0
                model = built(functools.partial(Two, **options | kinds[kind]))
                found[f"{kind}, {place}"] = _scaled(run, model, place, faulty)
    return found


@pytest.fixture(scope="module")
def scaled() -> dict[int, list[dict[str, Any]]]:
    return {size: launch(functools.partial(_on_rank, etp_size=size), TP * size) for size in (1, 2)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_skip_the_step(scaled: dict[int, list[dict[str, Any]]], kind: str, place: str) -> None:
    torch.set_num_threads(1)
    scales, changed, _ = _scaled(Run(2), built(Two), place, True)
    assert changed == [step != FAULTY for step in range(STEPS)]
    for rank in scaled[1 if kind in KINDS[:2] else 2]:
        assert rank[f"{kind}, {place}"][:2] == (scales, changed)


def test_every_etp_size_gives_the_same_bytes(scaled: dict[int, list[dict[str, Any]]]) -> None:
    """Also of parts that the other rank of the tp_group has not."""
    for place in PLACES:
        parts = [rank[f"no group, {place}"][2] for rank in scaled[1]]
        assert parts[0]["first.weight"] != parts[1]["first.weight"]
        for rank, found in enumerate(scaled[2]):
            assert found[f"two ranks, {place}"][2] == parts[rank % TP]


def _of_two_groups(rank: int) -> list[tuple[list[float], list[bool]]]:
    """Layers of all ranks before or behind those of pairs: what a pair finds is known to the other one."""
    pairs = [torch.distributed.new_group([i, i + 1]) for i in (0, 2)]
    found = []
    with etp.init_group(timeout=30) as group, etp.init_group(pairs[rank // 2], name="pair", timeout=30) as pair:
        for first, second in ((group, pair), (pair, group)):
            model = built(
                lambda first=first, second=second: torch.nn.Sequential(
                    etp.Linear(WIDTH, HIDDEN, etp_group=first, bias=False),
                    etp.Linear(HIDDEN, WIDTH, etp_group=second, bias=False),
                )
            )
            place = "1.weight" if second is pair else "0.weight"
            found.append(_scaled(Run(4, rank, group), model, place, rank == 0)[:2])
    return found


def test_what_one_of_several_groups_finds_is_known_to_all() -> None:
    changed = [step != FAULTY for step in range(STEPS)]
    for rank in launch(_of_two_groups, 4):
        assert [each[1] for each in rank] == [changed, changed]
        assert len({tuple(each[0]) for each in rank}) == 1


def _sharded_later(rank: int) -> list[bool]:
    """A layer without a group, which shard_module_() cuts further."""
    tp_groups = [torch.distributed.new_group([TP * i, TP * i + 1]) for i in range(2)]
    etp_groups = [torch.distributed.new_group([i, i + TP]) for i in range(TP)]
    with etp.init_group(etp_groups[rank % TP], timeout=30) as group:
        run = Run(2, rank // TP, group)
        model = run.sharded(built(lambda: Two(tp_group=tp_groups[rank // TP])), min_elements=256)
        assert model.first.weight.tensor_model_parallel and model.first.weight.partition_dim == 0
        return _scaled(run, model, "first.weight", rank == 3)[1]


def test_layers_that_are_sharded_later() -> None:
    assert launch(_sharded_later, 4) == [[step != FAULTY for step in range(STEPS)]] * 4
