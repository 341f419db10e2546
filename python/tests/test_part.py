"""What a map may contain, where the parts of a tensor are, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tessera
from tessera import Part
from tessera._bus.mapping import Map
from tessera._bus.registration import Registration

FUSED = np.arange(24, dtype=np.float32).reshape(6, 4)


def collect(tensors: Any, names: Map | None, rank: int = 0, fallback: str | None = None) -> Registration:
    return Registration.collect(
        tensors,
        keep=lambda name: True,
        rank=rank,
        fallback=tessera.Layout(fallback) if fallback else None,
        missing_ok=False,
        names=names,
    )


def specs(tensors: Any, names: Map, rank: int = 0) -> dict[str, Any]:
    registration = collect(tensors, names, rank)
    registration.agree([registration.to_gather()])
    return {spec.name: spec for spec in registration.specs()}


def named(tensors: list[str], names: Map) -> list[str]:
    return list(collect({name: np.zeros(2) for name in tensors}, names).names)


# --- names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({}, ["a.0.w", "a.1.w", "b"]),
        ({"b": "c"}, ["a.0.w", "a.1.w", "c"]),
        ({r"a\.(\d)\.w": r"x.\1"}, ["x.0", "x.1", "b"]),
        ({r"(?P<head>.*)\.w": r"\g<head>"}, ["a.0", "a.1", "b"]),
        ({r"a\.(\d)\.w": [Part(r"\1.p", slice(1)), Part(r"\1.q", slice(1, 2))]}, ["0.p", "0.q", "1.p", "1.q", "b"]),
        ({".*": None, "b": "b"}, ["b"]),  # the name itself goes before patterns
        ({"a.*": None, r"a\.1\.w": "late"}, ["b"]),  # then the first that matches
        ({"a": "not the whole name"}, ["a.0.w", "a.1.w", "b"]),
        (lambda name, tensor: None if name == "b" else [name.upper()], ["A.0.W", "A.1.W"]),
        (lambda name, tensor: f"{name}:{tensor.shape[0]}", ["a.0.w:2", "a.1.w:2", "b:2"]),
    ],
)
def test_a_map_names_tensors(names: Map, expected: list[str]) -> None:
    assert named(["a.0.w", "a.1.w", "b"], names) == expected


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ({"a(": "b"}, r"map: key 'a\(' is not a regular expression"),
        ({"(a)": r"\2"}, r"map: '\\\\2' beside the key '\(a\)': invalid group reference"),
        ({"a": 3}, r"map: a becomes 3: give a name, a Part"),
        ({"a": [3]}, r"map: a becomes 3 \(builtins.int\): give a name or a Part"),
        (lambda name, tensor: 3, r"map: a becomes 3"),
        ([("a", "b")], r"map \[\('a', 'b'\)\]: give \{local name"),
    ],
)
def test_a_map_that_says_nothing_is_refused(names: Any, why: str) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=why):
        named(["a"], names)


def test_only_and_ignore_are_of_local_names_and_what_is_left_out_is_not_looked_at() -> None:
    registration = Registration.collect(
        {"a": FUSED, "b": FUSED},
        keep=lambda name: name == "a",
        rank=0,
        fallback=None,
        missing_ok=False,
        names={"a": "b", "b": "c"},
    )
    assert registration.names == ("b",)
    assert registration.skipped == ()


# --- where parts lie


def test_parts_are_views_of_the_local_tensor() -> None:
    rows, column, expert = specs(
        {"w": FUSED, "e": np.zeros((2, 3, 4), np.float32)},
        {"w": [Part("rows", slice(2, 4)), Part("column", (slice(None), 1))], "e": Part("expert", 1)},
    ).values()
    assert (rows.address, rows.shape, rows.strides) == (FUSED[2:4].ctypes.data, (2, 4), (4, 1))
    assert (column.address, column.shape, column.strides) == (FUSED[:, 1].ctypes.data, (6,), (4,))
    assert (expert.shape, expert.strides) == ((3, 4), (4, 1))


def test_a_part_has_the_layout_and_the_shape_that_are_given() -> None:
    text = specs({"w": FUSED}, {"w": Part("k", slice(2, 4), "2:S0", (4, 4))}, rank=1)["k"]
    assert (text.layout, text.shape) == (tessera.Layout("2:S0"), (4, 4))
    pair = (tessera.Mesh([2]), [tessera.Replicate()])
    assert specs({"w": FUSED}, {"w": Part("k", slice(2, 4), pair)})["k"].shape == (2, 4)


@pytest.mark.parametrize(
    ("part", "shape", "layout"),
    [
        (Part("x"), (6, 8), "2:S1"),
        (Part("x", slice(0, 3)), (3, 8), "2:S1"),  # rows of a tensor sharded by columns
        (Part("x", 2), (8,), "2:S0"),
        (Part("x", slice(0, 3), shape=(3, 8)), (3, 8), "2:S1"),
        (Part("x", (slice(None), slice(0, 2)), shape=(6, 4)), (6, 4), "2:S1"),
        (Part("x", whole=slice(0, 3)), (3, 8), "2:S1"),
        (Part("x", whole=(slice(None), slice(1, 6))), (6, 5), "2:G1[0;3;5]"),
        (Part("x", whole=(2, slice(1, 6))), (5,), "2:G0[0;3;5]"),
        (Part("x", whole=(slice(None), 5)), (6,), "1@1:R"),
    ],
)
def test_layout_and_shape_follow_from_those_of_the_tensor(part: Part, shape: tuple[int, ...], layout: str) -> None:
    spec = specs({"w": (FUSED, "2:S1", (6, 8))}, {"w": part}, rank=1)["x"]
    assert (spec.shape, spec.layout) == (shape, tessera.Layout(layout))


def test_a_rank_that_holds_nothing_of_a_slice_registers_it_without_memory() -> None:
    tensors = {"w": (FUSED, "2:S0", (12, 4))}
    assert specs(tensors, {"w": Part("x", whole=11)}, rank=0)["x"].address == 0
    assert specs(tensors, {"w": Part("x", whole=11)}, rank=1)["x"].address == FUSED[5].ctypes.data


def test_a_part_of_a_tensor_that_is_elsewhere_is_left_out() -> None:
    nothing = np.zeros((0, 0), np.float32)
    assert specs({"w": (nothing, "2:S0", (12, 4))}, {"w": Part("x", slice(0, 2))}, rank=2) == {}


def test_parts_of_a_tensor_with_the_layout_of_connect() -> None:
    registration = collect({"w": FUSED}, {"w": Part("x", slice(0, 3), shape=(6, 4))}, fallback="2:S0")
    registration.agree([registration.to_gather()])
    (spec,) = registration.specs()
    assert (spec.shape, spec.layout) == ((6, 4), tessera.Layout("2:S0"))


def test_a_dtensor_brings_layout_and_shape() -> None:
    torch = pytest.importorskip("torch")
    distributed = torch.distributed
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        experts = distribute_tensor(torch.arange(60.0).reshape(5, 4, 3), mesh, [Shard(0)], src_data_rank=None)
        local = experts.to_local()
        found = specs({"e": experts}, lambda name, tensor: [Part(str(e), whole=e) for e in range(tensor.shape[0])], 1)
        assert [spec.address for spec in found.values()] == [0, 0, 0, local[0].data_ptr(), local[1].data_ptr()]
        assert [spec.layout.mesh.ranks for spec in found.values()] == [(0,), (0,), (0,), (1,), (1,)]
        sharded = specs({"e": experts}, {"e": Part("x", (slice(None), 1), mesh_layout(mesh), (5, 3))}, 1)["x"]
        assert (sharded.layout, sharded.strides) == (tessera.Layout("fsdp=2:S0"), (12, 1))
    finally:
        distributed.destroy_process_group()


def mesh_layout(mesh: Any) -> Any:
    """A layout as torch prints it."""
    from torch.distributed.tensor import Shard

    return mesh, (Shard(0),)


# --- refusals


@pytest.mark.parametrize(
    ("part", "kind", "why"),
    [
        ({"local": slice(0, 9)}, tessera.InvalidArgumentError, r"part x of tensor w: index \[0:9\] .* 9 is outside"),
        (
            {"local": slice(0, 2), "layout": "2:S0", "shape": (6, 4)},
            tessera.InvalidArgumentError,
            r"part x of tensor w: 2:S0 gives rank 0 \(3, 4\) of a tensor of shape \(6, 4\); what it holds is \(2, 4\)",
        ),
        (
            {"local": slice(0, 2), "layout": "2:S0"},
            tessera.MismatchError,
            r"tensor x: rank 1 of its mesh \(2:S0\) did not register it",
        ),
        (
            {"local": slice(0, 2), "layout": "2:S5", "shape": (4, 4)},
            tessera.InvalidArgumentError,
            r"part x of tensor w: .*S5",
        ),
    ],
)
def test_a_part_that_cannot_be_is_refused(part: dict[str, Any], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        specs({"w": FUSED}, {"w": Part("x", **part)})


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Part("x", (slice(None), 1)), r"local=\[:, 1\] drops a dim, and no layout follows from 2:S1"),
        (Part("x", slice(0, 3), shape=(2, 8)), r"shape=\(2, 8\), but it is \(3, 8\) under 2:S1"),
    ],
)
def test_a_part_that_contradicts_its_tensor_is_refused(part: Part, why: str) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=why):
        specs({"w": (FUSED, "2:S1", (6, 8))}, {"w": part})


def test_whole_needs_to_know_the_whole() -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=r"whole=: its global shape cannot be seen under 2:S1"):
        specs({"w": (FUSED, "2:S1")}, {"w": Part("x", whole=1)})


@pytest.mark.parametrize(
    "bad", [{"name": ""}, {"name": 3}, {"name": "x", "whole": 1, "local": 1}, {"name": "x", "layout": 3}]
)
def test_a_part_is_checked_where_it_is_made(bad: dict[str, Any]) -> None:
    with pytest.raises(tessera.InvalidArgumentError):
        Part(**bad)


def test_the_shape_of_a_part_follows_from_what_all_ranks_hold_of_it() -> None:
    ranks = [
        collect({"w": FUSED}, {"w": [Part("a", slice(0, 2), "2:S0"), Part("b", slice(2, 6 - rank), "2:S0")]}, rank)
        for rank in (0, 1)
    ]
    gathered = [rank.to_gather() for rank in ranks]
    for rank in ranks:
        rank.agree(gathered)
        assert [spec.shape for spec in rank.specs()] == [(4, 4), (7, 4)]


# --- one name, two tensors; one tensor, two names


def test_a_name_that_two_tensors_take_is_not_one_to_send() -> None:
    registration = collect({"emb": FUSED.copy(), "head": FUSED.copy()}, {"head": "emb"})
    assert registration.names == ("emb", "emb in head")
    with pytest.raises(
        tessera.InvalidArgumentError, match=r"tensor emb of the bus is in two tensors here, emb and head"
    ):
        registration.offer()


def test_a_rank_that_holds_one_of_two_tensors_offers_that() -> None:
    """Of stages of a pipeline, say, the first has the embedding and the last the head."""
    tensors = {"emb": (np.zeros((0, 4)), "1:R", (2, 4)), "head": (np.ones((2, 4)), "1@1:R", (2, 4))}
    registration = collect(tensors, {"head": "emb"}, 1)
    registration.offer()
    registration.agree([registration.to_gather(), registration.to_gather()])
    (spec,) = registration.specs()
    assert (spec.name, spec.source, spec.layout) == ("emb", "", tessera.Layout("1@1:R"))


def test_empty_parts_of_one_tensor_are_not_tied() -> None:
    nothing = np.zeros((0, 4))
    assert not collect({"qkv": nothing}, {"qkv": [Part(name, slice(0, 0)) for name in "qkv"]}).wants_manifest
    assert collect({"embed": nothing, "head": nothing}, None).wants_manifest


def test_a_slice_of_a_source_is_not_one_to_send() -> None:
    registration = collect({"w": FUSED}, {"w": Part("x", source=slice(0, 6))})
    assert registration.names == ("x[0:6]",)
    with pytest.raises(tessera.InvalidArgumentError, match=r"part x of tensor w: source= says which part a"):
        registration.offer()


def test_two_names_of_one_memory_that_take_one_name_are_one_tensor() -> None:
    assert collect({"emb": FUSED, "head": FUSED}, {"head": "emb"}).names == ("emb",)


# --- the tensor behind the parts


def test_a_changed_tensor_is_noticed_through_its_parts() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(4, 6, bias=False)
    registration = collect(module, {"weight": [Part("a", slice(0, 2)), Part("b", slice(2, 6))]})
    held = registration.locate()
    assert len(held.memory) == 1  # looked up once, held once
    before = module.weight._version
    held.written()
    assert module.weight._version == before + 1
    module.weight = torch.nn.Parameter(torch.zeros(6, 4))
    registration.locate()
    assert registration.moved == ["tensor weight: its memory has moved since it was registered"]
    addresses = [spec.address for spec in registration.relocated()]
    assert addresses == [module.weight.data_ptr(), module.weight[2:].data_ptr()]
    assert [spec.address for spec in registration.specs()] != addresses
    registration.settle()
    assert [spec.address for spec in registration.specs()] == addresses
    registration.locate()
    assert not registration.moved


def test_a_tensor_of_which_no_part_is_left_may_go() -> None:
    torch = pytest.importorskip("torch")
    tensors = {"a": torch.zeros(4), "b": torch.zeros(4)}
    registration = Registration.collect(
        tensors, lambda name: True, rank=0, fallback=None, missing_ok=True, names={"b": [Part("c", slice(0, 2))]}
    )
    registration.choose(set())
    assert registration.names == ()
    assert sorted(registration.skipped) == ["a", "c"]
    del tensors["b"]
    assert registration.locate().memory == []
