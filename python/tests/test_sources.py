"""A receiver takes one tensor twice, or slices of a sender's tensor, with any sharding of either side."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tessera
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback import Loopback, move
from ranks import transfer
from tessera import Part

QKV = np.arange(22 * 3, dtype=np.float32).reshape(22, 3)
ROWS = {"q": slice(0, 12), "k": slice(12, 17), "v": slice(17, 22)}


def pieces(whole: np.ndarray, layout: str, world: int) -> list[tuple[np.ndarray, tessera.Layout, tuple[int, ...]]]:
    """The piece of `whole` that each rank of a job registers."""
    bound = tessera.Layout(layout).bind(whole.shape)
    found = []
    for rank in range(world):
        owned = bound.owned(whole.shape, rank)
        picked = [[i for a, b in dim for i in range(a, b)] for dim in owned or ()]
        part = np.zeros(bound.local_shape(whole.shape, rank), whole.dtype) if owned is None else whole[np.ix_(*picked)]
        found.append((np.array(part, order="C"), bound, whole.shape))
    return found


def check_pieces(found: list[Any], whole: np.ndarray, layout: str) -> None:
    for (part, *_), (expected, *_) in zip(found, pieces(whole, layout, len(found)), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("mode", ["inplace", "staged"])
def test_two_tensors_are_filled_with_one(mode: str, loopback: Loopback) -> None:
    held = {"emb": np.zeros_like(QKV), "head": np.zeros_like(QKV)}
    stats = loopback.transfer({"emb": QKV, "other": QKV.copy()}, held, map={"head": "emb"}, mode=mode)
    for each in held.values():
        np.testing.assert_array_equal(each, QKV)
    assert (stats.tensors, stats.skipped) == (2, 1)


@pytest.mark.parametrize("mode", ["inplace", "staged"])
@pytest.mark.parametrize(
    ("senders", "receivers"), [("1:R", "1:R"), ("2:S0", "3:S0"), ("3:S0", "2:S1"), ("2:S1", "2:R")]
)
def test_a_fused_tensor_is_taken_apart_by_who_receives_it(senders: str, receivers: str, mode: str) -> None:
    world = tessera.Layout(receivers).mesh.size
    found = [
        dict(zip(ROWS, of_rank, strict=True))
        for of_rank in zip(*(pieces(np.zeros_like(QKV[rows]), receivers, world) for rows in ROWS.values()), strict=True)
    ]
    names = {name: Part("qkv", source=rows) for name, rows in ROWS.items()}
    sent = pieces(QKV, senders, tessera.Layout(senders).mesh.size)
    transfer([({"qkv": each}, None) for each in sent], [(each, names) for each in found], versions=2, mode=mode)
    for name, rows in ROWS.items():
        check_pieces([each[name] for each in found], QKV[rows], receivers)


@pytest.mark.parametrize("mode", ["inplace", "staged"])
def test_a_sender_is_read_wherever_it_holds_a_version(mode: str, loopback: Loopback) -> None:
    held = {"q": np.zeros((12, 3), np.float32), "again": np.zeros_like(QKV), "qkv": np.zeros_like(QKV)}
    names = {"q": Part("qkv", source=ROWS["q"]), "again": "qkv"}
    sent = QKV.copy()
    sender = loopback.trainer.register({"qkv": sent}, mode, mode=mode)
    receiver = loopback.inference.register(held, mode, map=names)
    with sender, receiver:
        for version in (1, 2):
            np.copyto(sent, QKV * version)
            move(sender, receiver)
            np.testing.assert_array_equal(held["q"], QKV[:12] * version)
            np.testing.assert_array_equal(held["qkv"], QKV * version)
            np.testing.assert_array_equal(held["again"], QKV * version)


def test_an_engine_fuses_slices_of_several_sources(loopback: Loopback) -> None:
    """Of expert 2: [gate; up], out of two stacks of which only the sender knows how many experts they have."""
    gate, up = np.random.default_rng(0).normal(size=(2, 5, 4, 3)).astype(np.float32)
    fused = np.zeros((8, 3), np.float32)
    parts = [Part("gate", slice(0, 4), source=2), Part("up", slice(4, 8), source=(-3, slice(None)))]
    loopback.transfer({"gate": gate, "up": up}, {"gate_up": fused}, map={"gate_up": parts})
    np.testing.assert_array_equal(fused, np.concatenate([gate[2], up[2]]))


def test_slices_may_overlap_where_they_are_read(loopback: Loopback) -> None:
    found = {"a": np.zeros((12, 3), np.float32), "b": np.zeros((12, 3), np.float32), "c": np.zeros((6, 2), np.float32)}
    names = {
        "a": Part("qkv", source=slice(None, 12)),
        "b": Part("qkv", source=slice(10, None)),
        "c": Part("qkv", source=(slice(0, 12, 2), slice(1, 3))),
    }
    loopback.transfer({"qkv": QKV}, found, map=names)
    np.testing.assert_array_equal(found["a"], QKV[:12])
    np.testing.assert_array_equal(found["b"], QKV[10:])
    np.testing.assert_array_equal(found["c"], QKV[0:12:2, 1:3])


LAYOUTS = ["2:S0", "2:S1", "3:S0", "2,2:S0,S1", "2,2:R,S0", "2:R", "2:Psum"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS[:-1])),
    data=st.data(),
)
def test_any_slice(shape: tuple[int, int], layouts: tuple[str, str], data: Any) -> None:
    index = tuple(
        slice(*sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))))
        if data.draw(st.booleans())
        else data.draw(st.integers(0, size - 1))
        for size in shape
    )
    whole = np.arange(1, 1 + math.prod(shape), dtype=np.int32).reshape(shape)
    expected = whole[index] * (2 if "Psum" in layouts[0] else 1)
    source, destination = layouts
    destination = destination if expected.ndim == 2 else "2:R"
    sent = pieces(whole, source, tessera.Layout(source).mesh.size)
    found = pieces(np.zeros_like(expected), destination, tessera.Layout(destination).mesh.size)
    transfer([({"w": each}, None) for each in sent], [({"x": each}, {"x": Part("w", source=index)}) for each in found])
    check_pieces(found, expected, destination)


# --- what cannot be taken


def refused(kind: type[Exception], why: str, sent: Any, index: Any, world: int = 1) -> None:
    with pytest.raises(kind, match=why):
        transfer(
            [({"w": each}, None) for each in pieces(QKV, sent, world)],
            [({"x": np.zeros((4, 3), np.float32)}, {"x": Part("w", source=index)})],
        )


def test_a_slice_outside_its_source_is_refused() -> None:
    refused(
        tessera.InvalidArgumentError,
        r"part w of tensor x: source=: index \[20:24\] of a dim of 22",
        "1:R",
        slice(20, 24),
    )


def test_a_slice_of_another_shape_is_refused() -> None:
    refused(
        tessera.MismatchError,
        r"tensor w\[3:8\]: shape 5x3 in w \[3:8, 0:3\] of sender, 4x3 in receiver",
        "1:R",
        slice(3, 8),
    )


def test_a_slice_that_no_layout_describes_is_refused_with_the_way_out() -> None:
    why = r"w \[0:4, 0:3\] of sender cannot be taken: .*2:S0\*3 shards, not contiguously.*a separate tensor"
    refused(tessera.MismatchError, why, "2:S0*3", slice(0, 4), 2)


def test_a_source_that_nobody_offers_is_named() -> None:
    held = {"a": np.zeros_like(QKV), "b": np.ones((4, 3), np.float32)}
    names = {"b": Part("absent", source=slice(0, 4))}
    with pytest.raises(tessera.MismatchError, match=r"tensor absent\[0:4\]: sender does not offer absent"):
        transfer([({"a": QKV}, None)], [(held, names)])
    transfer([({"a": QKV}, None)], [(held, names)], missing_ok=True)
    np.testing.assert_array_equal(held["a"], QKV)
    assert (held["b"] == 1).all()


def test_a_sender_offers_no_alias(loopback: Loopback) -> None:
    batch = loopback.register({"emb": QKV, "head": QKV.copy()}, map={"head": "emb"})
    with batch, pytest.raises(tessera.InvalidArgumentError, match="a sender offers a name once"):
        batch.send(timeout=5)
