"""torch's wrappers around a sharded model, which average what is whole on every rank: compared by tolerance, as their
additions have another order."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import tessera
import torch
import torch.distributed
from etp_models import HIDDEN, WIDTH, Adjust, Run, Tied, batch, built, loss_of
from tessera import etp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import launch

BOUND = 1e-5  # of the largest element of a weight, after STEPS
STEPS = 4


class Rooted(Tied):
    """It has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return super().block(x) @ self.mix * self.scale


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def _plain(ranks: int, before_step: Adjust) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = built(Rooted)
    Run(ranks).train(model, _sgd(model), STEPS, 2, before_step)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _check(found: list[dict[str, torch.Tensor]], ranks: int, before_step: Adjust = lambda model: None) -> None:
    first = built(Rooted)
    for name, expected in _plain(ranks, before_step).items():
        bound = BOUND * float(expected.abs().max())
        trained = expected - first.get_parameter(name).detach()
        assert float(trained.abs().max()) > 100 * bound, name
        for rank in found:
            assert float((rank[name] - expected).abs().max()) <= bound, name
            assert torch.equal(rank[name], found[0][name]), name


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else etp.whole(parameter)).detach().clone()
        for name, parameter in model.named_parameters()
    }


def _in_ddp(rank: int) -> Any:
    """Over both axes; micro-steps but the last without DDP's part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "etp"))
    with etp.init_group(mesh=mesh["etp"], timeout=30) as group, etp.init_group(mesh=mesh["dp"]) as dp:
        run = Run(4, rank, group, dp=dp)
        model = run.sharded(built(Rooted))
        wrapped = DistributedDataParallel(model)
        optimizer = _sgd(wrapped)
        for _ in range(STEPS):
            with wrapped.no_sync():
                run.backward(wrapped, scale=0.5)
            run.backward(wrapped, scale=0.5)
            optimizer.step()
            optimizer.zero_grad()
        with etp.summon(model):
            names = [name for name, _ in wrapped.named_parameters()]
        return _weights(model), names


def test_ddp_averages_what_is_whole() -> None:
    found = launch(_in_ddp, 4)
    _check([weights for weights, _ in found], 4)
    assert found[0][1][0].startswith("module.")


def _in_fsdp(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "etp"))
    every = init_device_mesh("cpu", (4,))
    with etp.init_group(mesh=mesh["etp"], timeout=30) as group, etp.init_group(mesh=mesh["dp"]) as dp:
        run = Run(4, rank, group, dp=dp)
        model = run.sharded(built(Rooted))
        sharded = {parameter for parameter in model.parameters() if isinstance(parameter, etp.LogicalTensor)}
        fully_shard(model, mesh=every, ignored_params=sharded)
        norms: list[float] = []
        run.train(model, _sgd(model), STEPS, 2, lambda model: norms.append(_clip(model)))
        return _weights(model), norms


def _clip(model: torch.nn.Module) -> float:
    return float(etp.clip_grad_norm_(model.parameters(), 0.2))


ignores = pytest.mark.skipif(
    "ignored_params" not in inspect.signature(fully_shard).parameters, reason="fully_shard() has no ignored_params"
)


@ignores
def test_fsdp_shards_what_is_whole() -> None:
    found = launch(_in_fsdp, 4)
    norms: list[float] = []
    _check([weights for weights, _ in found], 4, lambda model: norms.append(_clip(model)))
    assert all(each == pytest.approx(norms, rel=BOUND) for _, each in found)
    assert max(norms) > 0.2


def _refused_of_fsdp(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "etp"))
    said = []
    with etp.init_group(mesh=mesh["etp"], timeout=30) as group:
        model = etp.shard_module_(built(Rooted), group)
        with pytest.raises(tessera.InvalidArgumentError) as caught:
            fully_shard(model, mesh=mesh["etp"])
        assert [len(each) for each in model.up.weight.chunk(2)] == [40, 40]  # others may
        said.append(str(caught.value))
        model = etp.shard_module_(built(Rooted), group)
        sharded = {parameter for parameter in model.parameters() if isinstance(parameter, etp.LogicalTensor)}
        fully_shard(model, mesh=mesh["dp"], ignored_params=sharded)
        model(batch(rank)[0]).sum().backward()
        with pytest.raises(tessera.InvalidArgumentError) as caught:
            _sgd(model).step()
        said.append(str(caught.value))
    return said


@ignores
def test_what_fsdp_may_not_have() -> None:
    for rank, (not_ignored, other_ranks) in enumerate(launch(_refused_of_fsdp, 4)):
        assert "is sharded, and fully_shard() would cut its rows once more" in not_ignored
        assert f"fully_shard() over ranks {[rank % 2, rank % 2 + 2]} of a model" in other_ranks


def _refused_by_ddp(rank: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "etp"))
    said = {}
    with etp.init_group(mesh=mesh["etp"], timeout=30) as group:
        model = etp.shard_module_(built(Rooted), group)
        summed = etp.shard_module_(built(Rooted), group, reduction="sum")
        for what, module, options in (
            ("all", model, {}),
            ("dp", model, {"device_mesh": mesh["dp"]}),
            ("layer", etp.Linear(64, 64, etp_group=group), {"device_mesh": mesh["etp"]}),
            ("sum", summed, {"device_mesh": mesh["etp"]}),
        ):
            with pytest.raises(tessera.InvalidArgumentError) as caught:
                DistributedDataParallel(module, **options)
            said[what] = str(caught.value)
        etp.unshard_(model)
        ids, _ = batch(rank)
        wrapped = DistributedDataParallel(model)
        wrapped(ids).sum().backward()
        sums = [float(parameter.grad.sum()) for parameter in model.parameters()]
        every: list[Any] = [None] * 4
        torch.distributed.all_gather_object(every, sums)
        said["unsharded"] = str(all(each == sums for each in every))
    return said


def test_what_ddp_cannot_wrap() -> None:
    for rank, said in enumerate(launch(_refused_by_ddp, 4)):
        ours = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert "DistributedDataParallel over ranks [0, 1, 2, 3] of a model" in said["all"]
        assert f"gradients are reduced over ranks {ours}: wrap it" in said["all"]
        assert f"over ranks {[rank % 2, rank % 2 + 2]} of a model" in said["dp"]
        assert "give the model to shard_module_() first" in said["layer"]
        assert "reduction='sum'" in said["sum"]
        assert said["unsharded"] == "True"


class _Adapted(torch.nn.Module):
    """What an adapter library makes: the model is a part, and has got new parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.base = model
        model.up.requires_grad_(False)
        torch.manual_seed(5)
        model.down.low = torch.nn.Linear(HIDDEN, 8, bias=False)
        model.down.high = torch.nn.Linear(8, WIDTH, bias=False)
        model.down.forward = lambda x: (  # type: ignore[method-assign]
            torch.nn.functional.linear(x, model.down.weight) + model.down.high(model.down.low(x))
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.base(ids)


def _only_sharded(model: torch.nn.Module) -> torch.nn.Module:
    """What is whole is frozen: DistributedDataParallel has nothing to average."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.requires_grad_(False)
    return model


MADE: dict[str, tuple[Any, dict[str, Any]]] = {
    "an adapter": (_Adapted, {}),
    "a part": (torch.nn.Sequential, {}),
    "nothing whole": (_only_sharded, {}),
    "nothing whole, looking for unused ones": (_only_sharded, {"find_unused_parameters": True}),
    "nothing whole, static": (_only_sharded, {"static_graph": True}),
}


def _steps(model: torch.nn.Module, ranks: list[int]) -> None:
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5, momentum=0.9)
    for number in range(STEPS):
        for rank in ranks:
            (loss_of(model, number * 2 + rank) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _in_made(rank: int, name: str) -> Any:
    make, options = MADE[name]
    with etp.init_group(timeout=30) as group:
        model = make(etp.shard_module_(built(), group, min_elements=256))
        names = sorted(model.__dict__)
        _steps(DistributedDataParallel(model, **options), [rank])
        assert sorted(model.__dict__) == names
        return _weights(model)


@pytest.mark.parametrize("name", MADE)
def test_ddp_wraps_what_has_a_sharded_model(name: str) -> None:
    torch.set_num_threads(1)
    model = MADE[name][0](built())
    _steps(model, [0, 1])
    expected = _weights(model)
    for found in launch(functools.partial(_in_made, name=name), 2):
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
