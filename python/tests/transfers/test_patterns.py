"""Patterns of only=, ignore=, map= and wire= that match no name are refused, on every rank; others are not."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback
from ranks import LIMIT, run
from tessera import maps

NAMES = ["model.layers.0.q_proj.weight", "model.layers.1.q_proj.weight", "model.norm.weight", "lm_head.weight"]


def tensors() -> dict[str, Any]:
    return {name: np.zeros((32, 32), np.float32) for name in NAMES} | {"step": 3}


MISTYPED = [
    ({"wire": {"q_proj": "mxfp8"}}, "wire: 'q_proj' (nearest: model.layers.0.q_proj.weight"),
    ({"wire": {".*norm.*": None, r"model\.layer\..*": "mxfp8"}}, r"wire: 'model\\.layer\\..*' (nearest: model.layers."),
    ({"map": {r"modell\..*": None}}, r"map: 'modell\\..*' (nearest: model."),
    ({"map": {"lm_haed.weight": "head"}}, "map: 'lm_haed.weight' (nearest: lm_head.weight"),
    ({"ignore": "lm_haed.*"}, "ignore: 'lm_haed.*' (nearest: lm_head.weight"),
    ({"only": [".*weight", "model.nrom.weight"]}, "only: 'model.nrom.weight' (nearest: model.norm.weight"),
    # Formats go by names on the bus.
    ({"map": {"lm_head.weight": "head"}, "wire": {"lm_head.*": "mxfp8", "head": None}}, "wire: 'lm_head.*' (nearest: "),
    ({"ignore": iter(["step", "stop"])}, "ignore: 'stop' (nearest: step"),
    ({"replicas": {"model.nrom.weight": "first"}}, "replicas: 'model.nrom.weight' (nearest: model.norm.weight"),
]
HARMLESS = [
    {"wire": {"lm_head.*": None, ".*": "mxfp8"}},
    {"wire": "mxfp8"},
    {"wire": {"head": "mxfp8"}, "map": {"lm_head.*": "head"}},
    {"only": re.compile(".*weight").pattern},
    {"ignore": ["step", ".*norm.*"]},  # the first is no tensor
    # Of names that others leave out.
    {"ignore": "lm_head.*", "wire": {"lm_head.*": "mxfp8"}},
    {"only": r"model\..*", "map": {"lm_head.weight": "head"}, "wire": {"head": "mxfp8"}},
    {"map": {"lm_head.*": None}, "wire": {"lm_head.*": "mxfp8"}},
    {"only": lambda name: "norm" in name, "map": lambda name, tensor: f"x.{name}", "wire": {"x.lm_head.*": None}},
    # A rule behind another one that takes all its names.
    {"wire": {".*": "mxfp8", "lm_head.*": None}},
    # Marked.
    {"wire": maps.optional({"visual.*": None}), "map": maps.optional({"visual.*": None})},
    {"ignore": maps.optional(["visual.*"])},
]


@pytest.mark.parametrize(("options", "why"), MISTYPED)
def test_a_pattern_that_matches_nothing_is_refused(options: Any, why: str, loopback: Loopback) -> None:
    with pytest.raises(tessera.InvalidArgumentError) as caught:
        loopback.register(tensors(), **options)
    text = str(caught.value)
    assert text.startswith("patterns that match no name on any rank: ")
    assert why in text
    assert text.endswith("tessera.maps.optional() marks those that may match nothing")


@pytest.mark.parametrize("options", HARMLESS)
def test_others_are_taken(options: Any, loopback: Loopback) -> None:
    loopback.register(tensors(), **options).close()


def test_all_are_told_at_once(loopback: Loopback) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=r"only: 'a' .*; ignore: 'b' .*; map: 'c' .*; wire: 'd' "):
        loopback.register(tensors(), only=[".*", "a"], ignore="b", map={"c": "x"}, wire={"d": "mxfp8"})


def test_buffers_that_are_not_persistent_are_names(loopback: Loopback) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(4, 4)
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    loopback.register(module, ignore="scratch", wire={"scratch": None}).close()


def test_names_of_many_layers_are_compared_once(loopback: Loopback) -> None:
    many = {f"model.layers.{i}.{name}.weight": np.zeros(1) for i in range(500) for name in "qkv"}
    with pytest.raises(tessera.InvalidArgumentError, match=r"ignore: 'w' \(nearest: model\.layers\.0\.q\.weight, "):
        loopback.register(many, ignore="w")


# Stages of a pipeline: each rank has other names, and all give the same options.
STAGES = [{"embed": np.zeros((2, 2))}, {"layers.0": np.zeros((2, 2))}, {}]


def test_a_pattern_that_matches_on_one_rank_is_taken() -> None:
    options = {"ignore": "layers.9", "only": ["embed", "layers.*"], "wire": {"embed": None, r"layers\.\d": "mxfp8"}}
    taken = {"embed": np.ones((2, 2)), "layers.0": np.ones((2, 2))}
    ignored = [stage | {"layers.9": np.zeros(1)} if rank == 1 else stage for rank, stage in enumerate(STAGES)]

    def send(bus: tessera.Bus) -> None:
        bus.register(ignored[bus.rank], **options).send(timeout=LIMIT / 3)

    run({"trainer": [send] * 3, "inference": [lambda bus: bus.register(taken).recv(timeout=LIMIT / 3) and None]})
    assert not taken["embed"].any()


@pytest.mark.parametrize("receives", [False, True])
def test_one_that_matches_on_none_is_refused_on_all(receives: bool) -> None:
    """With the nearest names of all ranks; rank 2 gives the pattern, too, and has no names."""
    told = threading.Barrier(4)
    wrong = {"wire": {"embedd": None, r"layer\.\d": "mxfp8"}}
    near = r"wire: 'embedd' \(nearest: embed, layers\.0\); wire: 'layer\\\\\.\\\\d' \(nearest: layers\.0, embed\)\. A"

    def refused(bus: tessera.Bus) -> None:
        batch = bus.register(STAGES[bus.rank], timeout=LIMIT / 3, **wrong)
        with pytest.raises(tessera.InvalidArgumentError, match=near):
            (batch.recv if receives else batch.send)(timeout=LIMIT / 3)
        told.wait(LIMIT)

    run({"trainer": [refused] * 3, "inference": [lambda bus: told.wait(LIMIT) and None]})


def test_options_of_one_rank_are_its_own() -> None:
    """A pattern counts where it is given: a name of another rank does not make it right."""
    told = threading.Barrier(3)

    def refused(bus: tessera.Bus) -> None:
        batch = bus.register(STAGES[bus.rank], **({"ignore": "layers.0"} if bus.rank == 0 else {}))
        with pytest.raises(tessera.InvalidArgumentError, match=r"ignore: 'layers\.0' \(nearest: embed\)"):
            batch.send(timeout=LIMIT / 3)
        told.wait(LIMIT)

    run({"trainer": [refused] * 2, "inference": [lambda bus: told.wait(LIMIT) and None]})
