"""Data parallelism over a second group: the bytes of one process that does all micro-batches."""

from __future__ import annotations

from typing import Any

import etp_inline_scenarios
import etp_scenarios
import pytest
import tessera
import torch
from etp_models import Run, adamw, built, loss_of, on_grid, on_ranks, plainly, scenarios_of
from tessera import etp
from torch.distributed.device_mesh import init_device_mesh
from torch_ranks import launch


def inline(run: Run) -> Any:
    return [
        each(run)
        for each in (
            etp_inline_scenarios.training,
            etp_inline_scenarios.gradients_as_values,
            etp_inline_scenarios.checkpointed,
        )
    ]


def penalty(run: Run) -> list[list[float]]:
    """On the norm of the mean gradient, which every rank has whole."""
    model = run.sharded(built(), mode="inline", min_elements=256)
    weights = [model.emb.weight, model.up.weight, model.down.weight]
    loss = torch.stack([loss_of(model, number) for number in run.numbers()]).mean()
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    total = sum((each.pow(2).sum() for each in gradients), torch.zeros(()))
    total.backward()
    return [run.whole(each.grad).flatten().tolist() for each in weights]


def quantised(run: Run) -> Any:
    """One rank's and four ranks' training with what travels quantised; not that of plain torch."""
    model = run.sharded(built(), formats={"up.weight": "nvfp4", "down.weight": "mxfp8", "emb.weight": "bf16"})
    run.train(model, adamw(model.parameters()), accumulation=2)
    return run.weights(model)


SCENARIOS = scenarios_of(vars(etp_scenarios)) | {"inline": inline}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return on_grid(SCENARIOS | {"penalty": penalty, "quantised": quantised}, 2, 2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_are_those_of_plain_torch(found: dict[str, list[Any]], name: str) -> None:
    expected = plainly(SCENARIOS[name], 4)
    for rank in found[name]:
        assert rank == expected


def test_a_penalty_on_gradients_is_that_of_plain_torch(found: dict[str, list[Any]]) -> None:
    """Second derivatives add in another order: to 1e-4 of the largest."""
    expected = plainly(penalty, 4)
    for rank in found["penalty"]:
        for mine, theirs in zip(rank, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4 * max(map(abs, theirs)))


def test_what_travels_quantised_gives_the_bytes_of_one_group(found: dict[str, list[Any]]) -> None:
    (expected, *others) = on_ranks({"quantised": quantised}, 4)["quantised"]
    assert all(each == expected for each in (*others, *found["quantised"]))


def replicas_only(run: Run) -> Any:
    """ETP groups of one rank: nothing is gathered."""
    model = run.sharded(built())
    run.train(model, adamw(model.parameters()), accumulation=2)
    gathered = 0 if run.group is None else etp.report(model).bytes_gathered
    return run.weights(model), gathered


def test_groups_of_one_rank() -> None:
    expected = plainly(replicas_only, 2)
    assert on_grid({"replicas": replicas_only}, 2, 1)["replicas"] == [expected] * 2


def _refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "etp"))
    said = []
    with (
        etp.init_group(mesh=mesh["etp"], timeout=20) as group,
        etp.init_group(mesh=mesh["etp"], name="along", timeout=20) as along,
        etp.init_group(mesh=mesh["dp"], name="dp", timeout=20) as dp,
    ):
        for axis, seed in ((mesh["dp"], 7), (along, 7), (dp, 7 + rank // 2)):
            with pytest.raises((tessera.InvalidArgumentError, tessera.MismatchError)) as caught:
                etp.shard_module_(built(seed=seed), group, dp=axis)
            said.append(str(caught.value))
    return said


def test_what_dp_may_not_be() -> None:
    for no_group, not_orthogonal, another_seed in launch(_refused, 4):
        assert "give what etp.init_group() returns" in no_group
        assert "is not orthogonal to" in not_orthogonal
        assert "differs between ranks" in another_seed and "build the model from the same seed" in another_seed
