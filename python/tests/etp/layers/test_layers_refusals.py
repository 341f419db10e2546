"""What constructed layers refuse, by name and with the way out."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import Run, adamw
from tessera import etp
from torch_ranks import launch


def made(kind: Callable[..., Any] = etp.Linear, *arguments: Any, **options: Any) -> Any:
    """Of one rank, with a format: what is refused does not depend on other ranks."""
    shape = arguments or (32, 48)
    return kind(*shape, etp_group=etp.init_group(), weight_format="bf16", **options)


def without_main_grad() -> None:
    made(fuse_wgrad_accumulation=True)(torch.ones(2, 32)).sum().backward()


def of_another_shape() -> None:
    layer = made(fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(3, 3)
    layer(torch.ones(2, 32)).sum().backward()


def a_foreign_gradient() -> None:
    made().weight.reduce_wgrad(torch.zeros(48, 32))


def a_gradient_twice() -> None:
    layer = made()
    room = layer.weight.get_wgrad_tensor()
    x = torch.ones(2, 32, requires_grad=True)
    x.register_hook(lambda _: [layer.weight.reduce_wgrad(room), layer.weight.reduce_wgrad(room)])
    layer(x).sum().backward()


def updated_before_backward() -> None:
    experts = made(etp.GroupedLinear, 2, 32, 48)
    out = experts(torch.ones(3, 32, requires_grad=True), [1, 2])
    with etp.update(experts):
        pass
    out.sum().backward()


def assigned() -> None:
    made().weight = torch.nn.Parameter(torch.zeros(48, 32))


def saved() -> None:
    layer = made()
    with etp.summon(layer):
        torch.save(layer, io.BytesIO())


class Unfilled(torch.nn.Linear):
    def reset_parameters(self) -> None:
        pass


def sharded(model: torch.nn.Module) -> Any:
    return etp.shard_module_(model, etp.init_group(), formats={".*weight": "bf16"})


def without_reset() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(64, 64, device="meta"))
    sharded(model)


def without_a_buffer() -> None:
    model = torch.nn.Linear(64, 64, device="meta")
    model.register_buffer("inverse", torch.empty(3, device="meta"))
    sharded(model)


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "no group": (lambda: etp.Linear(4, 4, etp_group=3), "give what etp.init_group() returns"),
    "a format without a group": (lambda: etp.Linear(4, 4, weight_format="nvfp4"), "needs an etp_group="),
    "a format that is none": (lambda: etp.Linear(4, 4, etp_group=etp.init_group(), weight_format="fp3"), "fp3"),
    "a dtype": (lambda: etp.Linear(4, 4, params_dtype=torch.float64), "float32, bfloat16 and float16 are possible"),
    "a device": (lambda: etp.Linear(4, 4, device="cuda"), "in host memory, or on the meta device"),
    "main_grad of inline": (lambda: made(fuse_wgrad_accumulation=True, mode="inline"), "leave one of them out"),
    "integers": (lambda: made()(torch.ones(2, 32, dtype=torch.long)), "an input of torch.int64"),
    "a format's type": (lambda: etp.Linear(4, 4, etp_group=etp.init_group(), weight_format=4), "weight_format 4"),
    "a bias": (lambda: etp.Linear(4, 4, bias=torch.zeros(4)), "give True or False"),
    "a return_bias": (lambda: etp.Linear(4, 4, return_bias="no"), "return_bias 'no'"),
    "a sequence": (lambda: etp.Linear(4, 4, sequence_parallel="no"), "sequence_parallel 'no'"),
    "an init_method": (lambda: etp.Linear(4, 4, init_method="normal"), "init_method 'normal': give a callable"),
    "an init_method that fills nothing": (
        lambda: etp.Linear(4, 4, init_method=torch.zeros_like),
        "has no values after",
    ),
    "an eps": (lambda: etp.LayerNormMLP(4, 4, eps=-1), "eps=-1"),
    "a tp_group": (lambda: etp.Linear(4, 4, parallel_mode="row", tp_group=3), "tp_group=3: give a torch ProcessGroup"),
    "a whole weight": (assigned, "a whole tensor is put in its place"),
    "no counts": (lambda: etp.GroupedLinear(2, 4, 4)(torch.ones(3, 4), 3), "m_splits 3: give the number of tokens"),
    "half a token": (lambda: etp.GroupedLinear(2, 4, 4)(torch.ones(3, 4), [1.5, 1.5]), "m_splits has 1.5"),
    "a file": (saved, "cannot be pickled, nor can layers that were constructed with it"),
    "no rows": (lambda: etp.Linear(4, 0), "Linear0.weight: an extent 0"),
    "a mode": (lambda: etp.Linear(4, 4, parallel_mode="diagonal"), "'diagonal'"),
    "an activation": (lambda: etp.LayerNormMLP(4, 4, activation="tanh"), "'tanh'"),
    "a norm": (lambda: etp.LayerNormLinear(4, 4, normalization="BatchNorm"), "'BatchNorm'"),
    "a padding index": (lambda: etp.Embedding(4, 4, padding_idx=4), "padding_idx=4 of 4 rows"),
    "no experts": (lambda: etp.GroupedLinear(0, 4, 4), "num_gemms"),
    "too few splits": (
        lambda: etp.GroupedLinear(2, 4, 4)(torch.ones(3, 4), [3]),
        "1 counts that sum to 3",
    ),
    "a negative split": (lambda: etp.GroupedLinear(2, 4, 4)(torch.ones(3, 4), [4, -1]), "none below 0"),
    "other tokens": (lambda: etp.GroupedLinear(2, 4, 4)(torch.ones(3, 4), [1, 1]), "sum to the input's 3 tokens"),
    "no main_grad": (without_main_grad, "no main_grad: set it to zeros of (48, 32)"),
    "a main_grad of another shape": (of_another_shape, "main_grad is (3, 3)"),
    "a foreign gradient": (a_foreign_gradient, "get_wgrad_tensor() has not given"),
    "a gradient twice": (a_gradient_twice, "or gave before"),
    "an update before the backward": (updated_before_backward, "has been updated between its forward"),
    "a module without reset_parameters()": (without_reset, "has no reset_parameters(): give init="),
    "a parameter without values": (lambda: sharded(Unfilled(64, 64, device="meta")), "weight is on the meta device"),
    "a buffer without values": (without_a_buffer, "inverse is on the meta device and has no values"),
    "a copy": (lambda: copy.deepcopy(made()), "constructed sharded, of which there is no copy"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refused(what: str) -> None:
    act, text = REFUSALS[what]
    with pytest.raises(tessera.InvalidArgumentError, match=re.escape(text)):
        act()


def test_a_summoned_layer_can_be_copied() -> None:
    layer = made()
    with etp.summon(layer):
        copied = copy.deepcopy(layer)
    assert torch.equal(copied.weight, etp.whole(layer.weight))
    assert copied(torch.ones(3, 32)).shape == (3, 48)


def test_layers_of_one_rank_without_a_format_are_plain() -> None:
    layer = etp.Linear(8, 4, etp_group=etp.init_group())
    assert type(layer.weight) is torch.nn.Parameter
    with pytest.raises(tessera.NotFoundError):
        etp.report(layer)


def _different(rank: int) -> str:
    with etp.init_group(timeout=30) as group:
        torch.manual_seed(rank)
        try:
            etp.Linear(32, 48, etp_group=group, name="first")
        except tessera.MismatchError as error:
            found = str(error)
        torch.manual_seed(0)
        layer = etp.Linear(32, 48, etp_group=group)
        Run(2, rank, group).train(
            layer, adamw(layer.parameters()), loss=lambda model, _: model(torch.ones(1, 32)).sum()
        )
        return found


def test_ranks_with_different_values_are_told_so_and_can_go_on() -> None:
    assert all("first.weight differs between ranks" in each for each in launch(_different, 2))


def _out_of_shape(rank: int) -> list[str]:
    group = torch.distributed.group.WORLD
    found = []
    etp.Linear(8, 5, parallel_mode="column", tp_group=group)  # rows need not divide
    for act in (
        lambda: etp.Linear(5, 8, parallel_mode="row", tp_group=group),
        lambda: etp.LayerNormMLP(8, 5, activation="swiglu", set_parallel_mode=True, tp_group=group),
        lambda: etp.Linear(8, 4, parallel_mode="row", tp_group=group, sequence_parallel=True)(torch.ones(3, 4)),
        lambda: etp.Linear(8, 4, tp_group=group, sequence_parallel=True),
    ):
        with pytest.raises(tessera.InvalidArgumentError) as refused:
            act()
        found.append(str(refused.value))
    return found


def test_what_cannot_be_cut_over_the_tp_group() -> None:
    for row, halves, sequence, no_mode in launch(_out_of_shape, 2):
        assert "5 of (8, 5) cannot be cut over 2 ranks of the tp_group" in row
        assert "in 2 halves" in halves
        assert "its length (dim 0) has to be a multiple" in sequence
        assert "without a parallel mode" in no_mode


def _clipped(rank: int) -> tuple[float, float]:
    """A gradient that the caller has set, as a Megatron optimiser does from main_grad."""
    with etp.init_group(timeout=30) as group:
        torch.manual_seed(0)
        layer = etp.Linear(32, 48, bias=False, etp_group=group, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros_like(etp.local(layer.weight))
        layer(torch.ones(1, 32)).sum().backward()
        layer.weight.grad = etp.from_local(layer.weight.main_grad, like=layer.weight)
        norm = etp.clip_grad_norm_(layer.parameters(), 1.0)
        return float(norm), float(layer.weight.main_grad.max())


def test_the_norm_of_a_main_grad_is_that_of_all_rows() -> None:
    norm = (48 * 32) ** 0.5
    for found, largest in launch(_clipped, 2):
        assert found == pytest.approx(norm)
        assert largest == pytest.approx(1 / norm)


def _alone(rank: int) -> Any:
    return [torch.distributed.new_group([each]) for each in range(2)][rank]


def _beside(rank: int) -> list[list[str]]:
    """What a first step says of a plain norm beside a layer."""
    said = []
    with etp.init_group(timeout=30) as group, etp.init_group(_alone(rank)) as one:
        for owner, shards, frozen in (
            (group, False, False),
            (group, True, False),
            (group, False, True),
            (one, False, False),
        ):
            torch.manual_seed(0)
            layer = etp.Linear(32, 48, etp_group=owner, weight_format="bf16")
            model = torch.nn.Sequential(layer, torch.nn.LayerNorm(48).requires_grad_(not frozen))
            if shards:
                etp.shard_module_(model, group)
            model(torch.arange(32.0).roll(rank).view(1, 32)).sin().sum().backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            said.append([str(each.message) for each in caught])
    return said


def test_a_plain_module_beside_layers_is_warned_of() -> None:
    for (found,), *others in launch(_beside, 2):
        assert "SGD holds 2 parameters, the first of shape (48,)" in found
        assert "give the whole model to etp.shard_module_()" in found
        assert others == [[]] * 3
