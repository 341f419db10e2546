"""Weights of a layer of experts that are gathered and quantised as one list, in a module that the package does not
know."""

from __future__ import annotations

from typing import Any

import pytest
import tessera
import torch
import torch.nn.functional as F
from etp_generic_scenarios import Experts as Stacked
from etp_models import WIDTH, WORDS, Run, adamw, batch, built, on_ranks, plainly
from tessera import etp
from torch.utils.checkpoint import checkpoint
from torch_ranks import launch

EXPERTS = 3


class GroupedLinear(torch.nn.Module):
    """Called as TransformerEngine's; an expert without tokens is not used."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(EXPERTS):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 8))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i in range(EXPERTS):
            chosen = ids % EXPERTS == i
            if chosen.any():
                out[chosen] = F.linear(x[chosen], getattr(self, f"weight{i}"))
        return out


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.experts = GroupedLinear()
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.recompute = False

    def forward(self, ids: torch.Tensor, skipped: int) -> torch.Tensor:
        x = self.emb(ids)
        routes = torch.where(ids % EXPERTS == skipped, ids + 1, ids)
        for _ in range(2):  # twice in a forward
            x = x + (
                checkpoint(self.experts, x, routes, use_reentrant=False) if self.recompute else self.experts(x, routes)
            )
        return self.head(x)


NAMES = [f"experts.weight{i}" for i in range(EXPERTS)]


def _loss(model: torch.nn.Module, number: int) -> torch.Tensor:
    ids, targets = batch(number)
    skipped = (number % 4) - 1  # ranks skip other experts, or none
    return F.cross_entropy(model(ids, skipped).flatten(0, 1), targets.flatten())


def experts_in_a_list(run: Run) -> Any:
    found = []
    for recompute in (False, True):
        model = built(Mixture)
        model.recompute = recompute
        run.sharded(model, min_elements=256, experts=[NAMES])
        run.train(model, adamw(model.parameters()), steps=3, accumulation=2, loss=_loss)
        with torch.no_grad():
            found.append((_loss(model, 1).item(), run.weights(model)))
    return found


def experts_inline(run: Run) -> Any:
    model = run.sharded(built(Mixture), min_elements=256, experts=[NAMES], mode="inline")
    run.train(model, adamw(model.parameters()), loss=lambda model, number: _loss(model, 4 * number))  # all use the same
    return run.weights(model)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_plain_torch(size: int) -> None:
    scenarios = {"deferred": experts_in_a_list, "inline": experts_inline}
    found = on_ranks(scenarios, size)
    for name, scenario in scenarios.items():
        expected = plainly(scenario, size)
        for rank in found[name]:
            assert rank == expected, name


def _uses(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=30) as group:
        for grouped in (None, False, True):
            torch.manual_seed(5)
            layer = etp.wrap_module_params_etp(GroupedLinear(), [f"weight{i}" for i in range(EXPERTS)], group, grouped)
            places = [each.etp.expert_idx for each in layer.parameters()]
            x, ids = torch.ones(6, WIDTH, requires_grad=True), torch.arange(6)
            layer(x, ids).sum().backward()
            # One for the forward and one for the backward, or one for each expert.
            found[str(grouped)] = places, etp.report(layer).consumptions
            layer(x, ids * EXPERTS)  # of which the first one alone is used
            held = etp.report(layer).gathered_bytes
            with etp.update(layer):  # the others are released
                pass
            found[f"{grouped}, held"] = held > 0, etp.report(layer).consumptions
    return found


def test_a_list_is_one_gather() -> None:
    for found in launch(_uses, 2):
        for grouped in ("None", "True"):
            assert found[grouped] == ([0, 1, 2], 2)
            assert found[f"{grouped}, held"] == (True, 3)
        assert found["False"] == ([None] * EXPERTS, 2 * EXPERTS)


def _listed(*lists: Any) -> Any:
    model = etp.shard_module_(built(Mixture), etp.init_group(), formats={".*": "bf16"}, min_elements=256, experts=lists)
    return model


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ((["experts.weight9"],), "experts: 'experts.weight9' is no weight that is sharded"),
        (("experts.weight0",), "experts 'experts.weight0': give lists of names"),
        ((NAMES, NAMES[:2]), "experts: experts.weight0 is named twice"),
        (([NAMES[0], "emb.weight"],), r"experts: experts.weight0 is \(32, 32\) and emb.weight \(203, 32\)"),
    ],
)
def test_refused(lists: Any, message: str) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=message):
        _listed(*lists)


def test_a_stack_is_in_no_list() -> None:
    model = built(Stacked)
    options: dict[str, Any] = {"formats": {".*": "nvfp4"}, "min_elements": 256, "experts": [["up", "down"]]}
    with pytest.raises(tessera.InvalidArgumentError, match=r"experts: up is a stack of experts.*stacks="):
        etp.shard_module_(model, etp.init_group(), **options)
    assert not any(isinstance(each, etp.LogicalTensor) for each in model.parameters())
    rows = etp.shard_module_(model, etp.init_group(), stacks=lambda name, _: False, **options)
    assert rows.up.etp.together is rows.down.etp.together is not None


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
    names = ["0.weight", "1.weight"]
    etp.shard_module_(model, etp.init_group(), formats={".*": "bf16"}, experts=[names])
    assert [each.weight.etp.expert_idx for each in model] == [0, 1]


def test_a_list_of_one_is_none() -> None:
    model = _listed(NAMES[:1])
    assert model.experts.weight0.etp.expert_idx is None
