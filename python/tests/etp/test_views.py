"""What a sharded parameter tells, and what gives whole weights back."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import tessera
import torch
from etp_models import WORDS, Run, adamw, as_bytes, batch, built
from tessera import etp
from torch_ranks import launch


def _is_padded(weight: Any) -> bool:
    padded, own = weight.get_padded_shard(), etp.local(weight)
    return padded.shape == (112, 32) and torch.equal(padded[: len(own)], own) and not padded[len(own) :].any()


def _views(rank: int, size: int) -> dict[str, Any]:
    with etp.init_group() as group:
        plain, model = built(), built()
        run = Run(size, rank, group)
        assert etp.shard_module_(model, group) is model
        weight = model.emb.weight
        info = weight.etp
        found: dict[str, Any] = {
            "tied": model.head.weight is weight and isinstance(model.head, torch.nn.Linear),
            "info": (info.name, tuple(info.shape), info.rows, info.pad_length, info.is_padded_last_rank, info.version),
            "chain": info.chain,
            "layout": str(info.layout),
            "unknown yet": (info.next, info.prev, info.expert_idx, info.state, info.rs_state),
            "padded": _is_padded(weight) and model.down.weight.get_padded_shard() is model.down.weight.etp.local,
            "shape": tuple(weight.shape),
            "rows": torch.equal(etp.local(weight), plain.emb.weight[info.rows[0] : info.rows[1]]),
            "optimizer takes it": isinstance(weight, torch.nn.Parameter),
        }
        forecast = etp.forecast(model)
        run.train(model, adamw(model.parameters()))
        report = etp.report(model)
        found["links"] = (info.next.name, model.up.weight.etp.prev.name, model.up.weight.etp.next.name)
        found["version"] = info.version
        found["report"] = (report.size, report.updates, len(report.weights), report.shard_bytes == forecast.parameters)
        found["shown"] = f"updates={report.updates}" in repr(report) and f"total={forecast.total}" in repr(forecast)
        found["explained"] = isinstance(etp.explain(model), str)
        ids = batch(9)[0]
        with torch.no_grad():
            expected = model(ids)
        with etp.summon(model) as whole, torch.no_grad():
            found["summoned"] = torch.equal(whole(ids), expected), type(whole.up) is torch.nn.Linear
            state = {name: tuple(each.shape) for name, each in whole.state_dict().items()}
            found["saved"] = state == {name: tuple(each.shape) for name, each in plain.state_dict().items()}
            torch.save(whole, io.BytesIO())
            copied = copy.deepcopy(whole)
        found["copied"] = torch.equal(copied.requires_grad_(False)(ids), expected)
        found["sharded again"] = model.emb.weight is weight
        run.backward(model)
        gradients = run.gradients(model)
        etp.unshard_(model)
        with torch.no_grad():
            found["unsharded"] = torch.equal(model(ids), expected), type(model.up) is torch.nn.Linear
        found["ties kept"] = model.head.weight is model.emb.weight
        found["gradients"] = gradients == {n: as_bytes(p.grad) for n, p in model.named_parameters()}
        (model(ids).sum()).backward()  # plain torch again
        etp.shard_module_(model, group)
        run.train(model, adamw(model.parameters()))
        found["again"] = run.weights(model)
        return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(functools.partial(_views, size=2), 2)


def test_a_parameter_tells_what_it_is_a_part_of(ranks: list[dict[str, Any]]) -> None:
    # 203 rows over 2 ranks in multiples of 16: 112 each, 21 of padding.
    assert ranks[0]["info"] == ("emb.weight", (WORDS, 32), (0, 112), 21, False, 1)
    assert ranks[1]["info"] == ("emb.weight", (WORDS, 32), (112, 203), 21, True, 1)
    assert all(each["layout"] == "dp=1,etp=2:R,G0[0;112;203]" for each in ranks)
    assert all(each["unknown yet"] == (None, None, None, "NONE", "NONE") for each in ranks)
    assert all(each["links"] == ("up.weight", "emb.weight", "down.weight") for each in ranks)
    assert [each["shape"] for each in ranks] == [(WORDS, 32)] * 2


@pytest.mark.parametrize(
    "what",
    [
        "tied",
        "rows",
        "optimizer takes it",
        "shown",
        "explained",
        "saved",
        "copied",
        "sharded again",
        "ties kept",
        "padded",
    ],
)
def test_views(ranks: list[dict[str, Any]], what: str) -> None:
    assert all(each[what] for each in ranks)


def test_summoned_and_unsharded_models_compute_the_same(ranks: list[dict[str, Any]]) -> None:
    assert all(each["summoned"] == each["unsharded"] == (True, True) for each in ranks)
    assert all(each["gradients"] for each in ranks)


def test_versions_and_figures_count_updates(ranks: list[dict[str, Any]]) -> None:
    assert all(each["version"] == 4 for each in ranks)
    assert all(each["report"] == (2, 3, 3, True) for each in ranks)


def _unsharded_in_part(rank: int) -> tuple[str, bool, bool]:
    with etp.init_group(timeout=30) as group:
        model = built()
        before = model.up.weight.detach().clone()
        etp.shard_module_(model, group)
        with pytest.raises(tessera.InvalidArgumentError) as caught:
            etp.unshard_(model.up)
        still = isinstance(model.up.weight, etp.LogicalTensor)
        etp.unshard_(torch.nn.Sequential(model))
        return str(caught.value), still, torch.equal(model.up.weight, before)


def test_a_part_of_a_model_is_not_unsharded() -> None:
    for text, still, same in launch(_unsharded_in_part, 2):
        assert "of Linear, which is a part of a sharded" in text and "give it the whole model" in text
        assert still and same


def test_a_model_can_be_sharded_again(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["again"] == ranks[1]["again"]


class _Marked(torch.nn.Module):
    """A model that gives its parameters attributes, as Mamba and muP do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))
        self.weight._no_weight_decay = True  # type: ignore[attr-defined]
        self.weight.lr_scale = 0.5  # type: ignore[attr-defined]


def _attributes(parameter: torch.Tensor) -> tuple[Any, Any]:
    return getattr(parameter, "_no_weight_decay", None), getattr(parameter, "lr_scale", None)


def test_attributes_that_a_model_gives_its_parameters_stay() -> None:
    model = etp.shard_module_(_Marked(), etp.init_group(), formats={".*": "bf16"})
    assert _attributes(model.weight) == (True, 0.5)
    model.weight.lr_scale = 0.25
    with etp.summon(model):
        assert _attributes(model.weight) == (True, 0.25)
        assert not hasattr(model.weight, "etp")
    etp.unshard_(model)
    assert _attributes(model.weight) == (True, 0.25)
    assert not hasattr(model.weight, "etp")


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (torch.nn.Conv1d(32, 32, 3), [(2, 32, 8)]),
        (torch.nn.Conv2d(8, 16, 3), [(2, 8, 5, 5)]),
        (torch.nn.Bilinear(16, 16, 16), [(2, 16), (2, 16)]),
    ],
    ids=["Conv1d", "Conv2d", "Bilinear"],
)
def test_gradients_of_any_shape_are_whole_again_on_one_rank(
    layer: torch.nn.Module, inputs: list[tuple[int, ...]]
) -> None:
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in inputs]
    plain = copy.deepcopy(layer)
    plain(*values).square().sum().backward()
    model = etp.shard_module_(copy.deepcopy(layer), etp.init_group(), formats={"weight": "f32"}, min_elements=0)
    model(*values).square().sum().backward()
    etp.unshard_(model)
    assert torch.equal(model.weight.grad, plain.weight.grad)
