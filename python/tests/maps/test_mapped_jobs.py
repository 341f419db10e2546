"""Mapped tensors between jobs: ties and aliases, experts on ranks of their own, replicas of an engine, fused tensors
that are split where they are sent, shapes out of the manifest, staged and repeated transfers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import tessera
import torch
from ranks import transfer
from serving_engine import EngineRank
from tessera import Part, maps
from tessera._bus.registration import Registration
from tiny_models import (
    Model,
    assert_engines_same,
    assert_no_byte_twice,
    assert_same,
    bytes_of,
    registered,
)

TRAINER = Path(__file__).with_name("fsdp_trainer.py")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen3_moe", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Model:
    model = Model("qwen2", tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    assert HEAD not in model.checkpoint
    return model


# --- nothing is copied


def coverage(registration: Registration, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """How often each byte of the tensors is in a part."""
    counts = {name: np.zeros(tensor.nbytes, np.int64) for name, tensor in tensors.items()}
    for part, piece in registration._pieces.items():
        spec, shape = piece.location, piece.location.shape
        size = tessera._core.bits_of(spec.dtype) // 8
        offsets = np.zeros(shape, np.int64)
        for dim, stride in enumerate(spec.strides):
            steps = np.arange(shape[dim]) * stride * size
            offsets += steps.reshape([-1 if at == dim else 1 for at in range(len(shape))])
        for name, tensor in tensors.items():
            if tensor.data_ptr() <= spec.address < tensor.data_ptr() + tensor.nbytes:
                begin = spec.address - tensor.data_ptr() + offsets.ravel()
                np.add.at(counts[name], (begin[:, None] + np.arange(size)).ravel(), 1)
                break
        else:
            raise AssertionError(f"{part} lies in none of the tensors")
    return counts


@pytest.mark.parametrize("side", ["engine", "transformers"])
def test_parts_are_views_that_cover_each_tensor_once(experts: Model, side: str) -> None:
    if side == "engine":
        tensors = experts.engines(2, load=False)[0].params
        names: Any = maps.engine(experts.config, 0, 2)
    else:
        tensors, names = dict(experts.memory.named_parameters()), maps.transformers(experts.config)
    registration = Registration.collect(tensors, lambda name: True, 0, None, False, names)
    for name, counts in coverage(registration, tensors).items():
        padded = side == "engine" and name in (EMBEDDING, HEAD)  # rank 0 of 2: its rows are all in the vocabulary
        assert set(counts) == {1}, f"{name}{' (padded)' if padded else ''}"


# --- experts, replicas


@pytest.mark.parametrize("tp", [2, 4])
def test_experts_on_ranks_of_their_own(experts: Model, tp: int) -> None:
    engines = experts.engines(tp, load=False, expert_parallel=True)
    figures = transfer([(experts.memory, maps.transformers(experts.config))], registered(engines))
    loaded = experts.engines(tp, load=True, expert_parallel=True)
    assert_engines_same(engines, loaded)
    assert_no_byte_twice(figures, bytes_of(*(one.params for one in engines)) - experts.padding)
    found = experts.empty_checkpoint()
    transfer(registered(loaded), [(found, None)])
    assert_same(found, experts.checkpoint)


def test_two_replicas_of_an_engine_in_one_job(experts: Model) -> None:
    groups = [[0, 2], [3, 1]]
    found = [experts.engines(2, load=False) for _ in groups]
    by_rank = dict(
        itertools.chain.from_iterable(
            zip(ranks, registered(engines, ranks), strict=True) for ranks, engines in zip(groups, found, strict=True)
        )
    )
    transfer([(experts.checkpoint, None)], [by_rank[rank] for rank in range(4)])
    for engines in found:
        assert_engines_same(engines, experts.engines(2, load=True))
    back = experts.empty_checkpoint()
    figures = transfer([by_rank[rank] for rank in range(4)], [(back, None)])
    assert_same(back, experts.checkpoint)
    assert_no_byte_twice(figures, bytes_of(back))


# --- ties


def untied(model: Model) -> tuple[EngineRank, dict[str, torch.Tensor]]:
    """An engine with separate embedding and head, and its expected contents."""
    checkpoint = model.checkpoint | {HEAD: model.checkpoint[EMBEDDING]}
    expected = EngineRank(model.config, 0, 1).build(checkpoint).load(checkpoint)
    return EngineRank(model.config, 0, 1).build(checkpoint), expected.params


def test_a_tied_sender_fills_an_untied_receiver(tied: Model) -> None:
    engine, expected = untied(tied)
    transfer([(tied.memory, maps.transformers(tied.config))], registered([engine]))
    assert_same(engine.params, expected)


def test_a_sender_that_gives_a_tensor_two_names_fills_an_untied_receiver(tied: Model) -> None:
    engine, expected = untied(tied)
    transfer([(tied.checkpoint, {EMBEDDING: [EMBEDDING, HEAD]})], registered([engine]))
    assert_same(engine.params, expected)


def test_a_tied_receiver_needs_one_of_its_names(tied: Model) -> None:
    found = tied.empty()
    names = maps.transformers(tied.config)
    figures = transfer([(tied.checkpoint, None)], [(found, names)])
    assert_same(dict(found.named_parameters()), tied.checkpoint)
    assert_no_byte_twice(figures, bytes_of(tied.checkpoint))


def aliased(names: Any) -> Any:
    """The same map, that fills the head with the embedding."""

    def rule(name: str, tensor: Any) -> Any:
        (head,) = names(HEAD, tensor) if name == HEAD else (None,)
        return names(name, tensor) if head is None else replace(head, name=EMBEDDING)

    return rule


def test_an_untied_receiver_takes_an_alias_by_a_rule(tied: Model) -> None:
    engine, expected = untied(tied)
    ((found, names),) = registered([engine])
    transfer([(tied.checkpoint, None)], [(found, aliased(names))])
    assert_same(engine.params, expected)


# --- parts by hand


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_fused_tensor_is_split_and_fused_where_it_is_sharded(ranks: int) -> None:
    whole = np.arange(22 * 3, dtype=np.float32).reshape(22, 3)
    cuts = {"q": slice(0, 12), "k": slice(12, 17), "v": slice(17, 22)}
    fused = {"qkv": [Part(name, whole=rows) for name, rows in cuts.items()]}
    layout = tessera.Layout(f"{ranks}:S0")
    pieces = [whole[slice(*(layout.owned([22, 3], rank) or [(0, 0)])[0][0])].copy() for rank in range(ranks)]
    parts = {name: np.zeros_like(whole[rows]) for name, rows in cuts.items()}
    transfer([({"qkv": (piece, layout, (22, 3))}, fused) for piece in pieces], [(parts, None)])
    for name, rows in cuts.items():
        np.testing.assert_array_equal(parts[name], whole[rows])
    back = [np.zeros_like(piece) for piece in pieces]
    transfer([(parts, None)], [({"qkv": (piece, layout, (22, 3))}, fused) for piece in back])
    for found, expected in zip(back, pieces, strict=True):
        np.testing.assert_array_equal(found, expected)


def stacked(rank: int, tensors: list[np.ndarray]) -> tuple[dict[str, np.ndarray], Any]:
    """[a_r; b_r] of rank r of 2, of which no shape is said."""
    return {"ab": tensors[rank]}, {"ab": [Part("a", slice(0, 2), "2:S0"), Part("b", slice(2, 5), "2:S0")]}


def test_a_receiver_takes_shapes_from_the_manifest() -> None:
    a, b = (np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) for rows in (4, 6))
    found = [np.zeros((5, 2), np.float32) for _ in range(2)]
    transfer([({"a": a, "b": b}, None)], [stacked(rank, found) for rank in range(2)])
    for rank in range(2):
        np.testing.assert_array_equal(found[rank], np.concatenate([np.split(a, 2)[rank], np.split(b, 2)[rank]]))


def test_mapped_tensors_are_staged_and_transferred_again(experts: Model) -> None:
    engines = experts.engines(2, load=False)
    figures = transfer([(experts.checkpoint, None)], registered(engines), versions=3, mode="staged")
    assert_engines_same(engines, experts.engines(2, load=True))
    assert [one.transfers for one in figures[1]] == [3, 3]


def test_what_is_received_bumps_the_counter_of_the_tensor_that_parts_lie_in() -> None:
    linear = torch.nn.Linear(2, 6, bias=False)
    out = linear(torch.ones(1, 2, requires_grad=True)).sum()
    tensors = {"a": torch.zeros(2, 2), "b": torch.zeros(4, 2)}
    transfer([(tensors, None)], [(linear, {"weight": [Part("a", slice(0, 2)), Part("b", slice(2, 6))]})])
    assert not linear.weight.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


# --- a trainer's own processes


def test_experts_that_fsdp_shards_get_into_an_engine_and_back(tmp_path: Path) -> None:
    model = Model("qwen3_moe", tmp_path, num_experts=5)  # 3 on one rank, 2 on the other
    namespace = f"fsdp-{os.getpid()}"
    command = [sys.executable, str(TRAINER), str(tmp_path), namespace, str(tmp_path / "store")]
    trainers = [
        subprocess.Popen(command, env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"})
        for rank in range(2)
    ]
    engines = model.engines(2, load=False)

    def serve(rank: int) -> None:
        ((tensors, names),) = registered(engines)[rank : rank + 1]
        place = {"rank": rank, "world": 2, "namespace": namespace, "timeout": 400}
        with tessera.connect("weights", role="engine", peer="trainer", **place) as bus:
            there = bus.register(tensors, "there", map=names)
            there.recv(timeout=400)
            assert there.stats.bytes_moved == there.stats.bytes_lower_bound
            bus.register(tensors, "back", map=names).send(timeout=400)

    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(serve, range(2)))
        assert [trainer.wait(400) for trainer in trainers] == [0, 0]
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.wait()
    assert_engines_same(engines, model.engines(2, load=True))


# --- what a map of an engine refuses


@pytest.mark.parametrize(
    ("changes", "tp", "why"),
    [
        ({"model_type": "gpt2"}, 1, r"model type 'gpt2': its names are not known, only those of llama"),
        ({"num_attention_heads": 6}, 4, r"6 heads and 2 kv heads cannot be shared out to 4 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, r"12 heads and 3 kv heads"),
        ({"vocab_size": None}, 1, r"config: it has no vocab_size"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], tp: int, why: str) -> None:
    config = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 32}
    with pytest.raises(tessera.Error, match=why):
        maps.engine(config | {"vocab_size": 64} | changes, 0, tp)


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        (
            "a.qkv_proj.weight",
            (10, 4),
            r"tensor a.qkv_proj.weight: it has 10 rows; q, k and v of rank 0 of 2 have 4, 2 ",
        ),
        ("a.gate_up_proj.weight", (3, 4), r"its 3 rows are not two equal halves"),
        ("lm_head.weight", (10, 4), r"10 rows on each of 2 ranks are less than the vocabulary of 64"),
        ("mlp.experts.w2_weight", (3, 4, 4), r"it has 3 experts, of 4, each on every rank"),
    ],
)
def test_a_tensor_that_is_laid_out_otherwise_is_refused(name: str, shape: tuple[int, ...], why: str) -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 64, "num_experts": 4}
    with pytest.raises(tessera.InvalidArgumentError, match=why):
        maps.engine(config, 0, 2)(name, np.zeros(shape))


def test_a_group_is_as_large_as_said() -> None:
    config = {"num_attention_heads": 4, "hidden_size": 8, "vocab_size": 64}
    with pytest.raises(tessera.InvalidArgumentError, match=r"tp_rank 2 of tp_size 2"):
        maps.engine(config, 2, 2)
    with pytest.raises(tessera.InvalidArgumentError, match=r"ranks \[0, 1, 2\]"):
        maps.engine(config, 0, 2, ranks=[0, 1, 2])
