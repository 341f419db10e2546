"""exactness() names conditions that do not hold; verify() finds the first bit that differs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
import torch.nn.functional as F
from etp_models import WORDS, Tied, adamw, batch, built, loss_of
from tessera import etp
from torch.distributed.device_mesh import init_device_mesh
from torch_ranks import launch

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped": {"accumulation": 2, "max_norm": 0.05},
    "in nvfp4": {"formats": {".*weight": "nvfp4"}},
    "in bf16": {"formats": {".*weight": "bf16"}},
    "summed": {"reduction": "sum"},
}


class Dropping(Tied):
    def block(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().block(x), 0.1)


def _loss(model: torch.nn.Module, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    ids, targets = both
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def _verified(rank: int) -> dict[str, Any]:
    with etp.init_group(timeout=30) as group:
        model = built(Dropping)
        before = [each.detach().clone() for each in model.parameters()]
        state = torch.get_rng_state()
        verify = functools.partial(etp.verify, model, 3, group=group, batch=batch, loss=_loss, optimizer=adamw)
        found: dict[str, Any] = {name: str(verify(**options)) for name, options in OPTIONS.items()}
        found["untouched"] = torch.equal(torch.get_rng_state(), state) and all(
            torch.equal(*each) for each in zip(before, model.parameters(), strict=True)
        )

        def wrong(copied: Any, both: Any) -> torch.Tensor:
            """A rank-dependent bug of the user's: the third micro-batch's loss, where it is sharded."""
            value = _loss(copied, both)
            return value * 1.5 if isinstance(copied.up.weight, etp.LogicalTensor) and both is third else value

        third = batch(2)
        seen = etp.verify(
            model,
            3,
            group=group,
            batch=lambda number: third if number == 2 else batch(number),
            loss=wrong,
            optimizer=adamw,
        )
        found["loss"] = bool(seen), seen.steps, seen.difference, str(seen)

        def forgetful(parameters: Any) -> torch.optim.Optimizer:
            optimizer = adamw(parameters)
            sharded = any(isinstance(each, etp.LogicalTensor) for each in optimizer.param_groups[0]["params"])
            optimizer.param_groups[0]["lr"] *= 1.5 if sharded else 1.0
            return optimizer

        found["update"] = etp.verify(model, 3, group=group, batch=batch, loss=_loss, optimizer=forgetful).difference
        return found


@pytest.fixture(scope="module", params=[1, 2, 4])
def verified(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return launch(_verified, request.param)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_is_exact(verified: list[dict[str, Any]], name: str) -> None:
    expected = "3 steps: losses, gradients, weights and optimiser states are equal, bit for bit"
    assert [each[name] for each in verified] == [expected] * len(verified)


def test_the_model_and_random_states_are_left_alone(verified: list[dict[str, Any]]) -> None:
    assert all(each["untouched"] for each in verified)


def test_the_first_difference_is_named_on_all_ranks(verified: list[dict[str, Any]]) -> None:
    if len(verified) == 1:  # plain torch is compared with itself
        assert verified[0]["loss"][0] and verified[0]["update"] is None
        return
    for equal, steps, difference, text in (each["loss"] for each in verified):
        step = 2 // len(verified)
        assert not equal and steps == step + 1
        assert (difference.step, difference.what, difference.element) == (step, "loss of micro-batch 2", ())
        assert difference.sharded == pytest.approx(1.5 * difference.whole)
        assert f"step {step}: loss of micro-batch 2 differs in 1 elements" in text and "ranks: " in text
    for difference in (each["update"] for each in verified):
        assert (difference.step, difference.what) == (0, "emb.weight")
        assert difference.elements > WORDS and difference.sharded != difference.whole


def _conditions(rank: int, size: int) -> dict[str, Any]:
    def missing(model: Any, kind: Callable[..., Any] | None = None, **options: Any) -> Any:
        etp.shard_module_(model, group, **options)
        found = etp.exactness(model, None if kind is None else kind(model.parameters()))
        return {each.name: each.found for each in found.missing}, bool(found), str(found)

    with etp.init_group(timeout=30) as group:
        torch.use_deterministic_algorithms(True)
        momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        hooked = built()
        hooked.up.weight.register_hook(lambda gradient: gradient)
        found = {
            "none": missing(built(), adamw),
            "bf16": missing(built().bfloat16(), momentum),
            "inline": missing(built(), mode="inline"),
            "hooked": missing(hooked),
            "adafactor": missing(built(), torch.optim.Adafactor),
        }
        torch.use_deterministic_algorithms(False)
        found["operators"] = missing(built())
        torch.set_num_threads(1 + rank)
        found["threads"] = missing(built())
        return found


def test_conditions_that_do_not_hold_are_named() -> None:
    for found in launch(functools.partial(_conditions, size=2), 2):
        assert found["none"][:2] == ({}, True)
        assert found["none"][2].count("ok  ") == 6
        bf16, holds, _ = found["bf16"]
        assert not holds and set(bf16) == {"gradients", "optimizer"}
        assert "those of emb.weight are bfloat16" in bf16["gradients"] and "SGD with momentum" in bf16["optimizer"]
        assert 'mode="inline"' in found["inline"][0]["order"]
        assert "a tensor hook of up.weight" in found["hooked"][0]["order"]
        assert "Adafactor" in found["adafactor"][0]["optimizer"]
        assert set(found["operators"][0]) == {"operators"} and "NO  operators: " in found["operators"][2]
        assert "threads: 1 on rank 0, 2 on rank 1" in found["threads"][0]["processes"]


def _three(rank: int) -> Any:
    """Of a group, and of three replicas."""
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "etp"))
    with etp.init_group(timeout=30) as group, etp.init_group(mesh=mesh["etp"], timeout=30) as alone:
        models = [etp.shard_module_(built(), group), etp.shard_module_(built(), alone, dp=group)]
        missing = [each for model in models for each in etp.exactness(model).missing]
        return [each.found for each in missing if each.name == "ranks"]


def test_three_ranks_round_the_mean() -> None:
    assert launch(_three, 3) == [["3: 1/3 is rounded; take 2, 4, 8, ... ranks"] * 2] * 3


def test_a_sharded_model_cannot_be_verified() -> None:
    group = etp.init_group()
    model = etp.shard_module_(built(), group, formats={".*weight": "bf16"})
    with pytest.raises(tessera.InvalidArgumentError, match="verify: the model is sharded already"):
        etp.verify(model, 1, group=group, batch=batch, loss=lambda *_: loss_of(model, 0), optimizer=adamw)
