"""Replicas, in separate meshes and inside one, are compared before the first send."""

from __future__ import annotations

import ast
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tessera
from ranks import LIMIT, run
from tessera import _core
from tessera._bus.attachment import _pack, _read
from tessera._bus.registration import Registration


def sends(tensors: Any, **options: Any) -> Callable[[tessera.Bus], None]:
    def work(bus: tessera.Bus) -> None:
        bus.register(tensors, **options).send(timeout=LIMIT / 3)

    return work


def takes(tensors: Any) -> Callable[[tessera.Bus], None]:
    return lambda bus: bus.register(tensors).recv(timeout=LIMIT / 3) and None


def test_equal_ones_are_sent() -> None:
    taken = np.zeros((4, 3), np.float32)
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    strided = np.zeros((4, 6), np.float32)[:, ::2]
    strided[:] = rows
    run({"trainer": [sends({"w": rows.copy()}), sends({"w": strided})], "inference": [takes({"w": taken})]})
    assert (taken == rows).all()


def test_others_are_refused_with_tensors_and_ranks() -> None:
    held = [np.full((4, 3), value, np.float32) for value in (1, 1, 2)]

    def refused(bus: tessera.Bus) -> None:
        tensors = {"w": held[bus.rank], "same": np.ones(3, np.float32)}
        with pytest.raises(
            tessera.MismatchError,
            match=r"replicas of 1 tensors differ: w \(ranks 0, 1: \w{8}; ranks 2: \w{8}\)\. These",
        ):
            bus.register(tensors).send(timeout=LIMIT / 3)
        told.wait(LIMIT)  # a rank that leaves is lost to those that have not heard all yet

    told = threading.Barrier(3)
    run({"trainer": [refused] * 3, "inference": [refused_too({"w": np.zeros((4, 3), np.float32)})]})


def refused_too(tensors: Any) -> Callable[[tessera.Bus], None]:
    def take(bus: tessera.Bus) -> None:
        """This job hears why, also if the trainer has left before."""
        with pytest.raises(tessera.MismatchError, match=r"trainer/\d gave up: replicas of \d tensors differ"):
            bus.register(tensors, timeout=LIMIT / 3).recv()

    return take


def test_what_an_own_rank_told_an_earlier_process_is_not_compared() -> None:
    named = Registration.collect(
        {"w": np.ones(3, np.float32)}, lambda name: True, rank=1, fallback=None, missing_ok=False
    )
    mine = named.to_gather(2, membership=7)
    other = json.loads(mine)
    other["replicas"]["w"][1] = "0" * 32
    named.agree([json.dumps(other), mine])
    with pytest.raises(tessera.MismatchError):
        named.compare_replicas(membership=7)
    other["membership"] = 6
    named.agree([json.dumps(other), mine])
    named.compare_replicas(membership=7)


def test_the_ranks_of_a_job_know_the_same_processes() -> None:
    known: dict[str, list[int]] = {"trainer": [], "inference": []}
    all_joined = threading.Barrier(3)  # a rank that left earlier would be missed

    def note(bus: tessera.Bus) -> None:
        assert bus._pair is not None
        known[bus.role].append(bus._pair.membership())
        all_joined.wait(LIMIT)

    for _ in range(2):
        run({"trainer": [note, note], "inference": [note]})
    first, second = known["trainer"][:2], known["trainer"][2:]
    assert first[0] == first[1] and second[0] == second[1]
    assert len({first[0], second[0], *known["inference"]}) == 4


def test_digests_of_a_large_mixture_of_experts_fit_into_a_record() -> None:
    """94 layers of 128 experts, replicated along an axis: the store takes 4 MiB of a rank."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
        for layer in range(94)
        for expert in range(128)
        for name in ("gate", "up", "down")
    ]
    values = np.arange(len(names), dtype=np.float32).reshape(-1, 1)  # other digests
    tensors = {name: (values[number], "2,2:R,S0", (2,)) for number, name in enumerate(names)}
    named = Registration.collect(tensors, lambda name: True, rank=1, fallback=None, missing_ok=False)
    told = [named.to_gather(4, membership=7)]
    assert len(json.loads(told[0])["replicas"]) == len(names)
    assert len(_pack(told)) < 1.5 * 2**20
    assert _read(0, _pack(told), 1) == told


JUNK: list[Any] = [[3], ["a", "b"], {"a": 1}, ["x" * (65 << 20)]]


@pytest.mark.parametrize("text", ["", "[]", "e", "é", "AAAA", *map(_pack, JUNK)])
def test_what_no_rank_packs_is_refused(text: str) -> None:
    with pytest.raises(tessera.MismatchError, match="rank 3 registers other pairs than the 1"):
        _read(3, text, 1)


def test_what_is_registered_early_may_be_filled_later() -> None:
    taken = np.zeros(3, np.float32)

    def send(bus: tessera.Bus) -> None:
        held = np.full(3, bus.rank, np.float32)
        batch = bus.register({"w": held}, direction="send")
        held[:] = 5
        batch.send(timeout=LIMIT / 3)

    run({"trainer": [send, send], "inference": [takes({"w": taken})]})
    assert (taken == 5).all()


@pytest.mark.parametrize("mode", ["inplace", "staged"])
@pytest.mark.parametrize("blocking", [True, False])
def test_what_is_registered_early_is_compared_by_its_first_send(mode: str, blocking: bool) -> None:
    """On all ranks, again after a refusal, and no more once it was equal."""
    layouts = {"whole": "1@{}:R", "inside": "2@0,1:R"}
    taken = {name: np.zeros((4, 4), np.float32) for name in layouts}
    ready, done = threading.Barrier(2), threading.Barrier(3)

    def send(bus: tessera.Bus) -> None:
        held = {name: np.zeros((4, 4), np.float32) for name in layouts}
        named = {name: (held[name], layout.format(bus.rank), (4, 4)) for name, layout in layouts.items()}
        batch = bus.register(named, mode=mode, direction="send", timeout=LIMIT / 3)
        for name in layouts:
            for other in held.values():
                other[:] = 1
            held[name][:] = bus.rank
            ready.wait(LIMIT)
            with pytest.raises(
                tessera.MismatchError, match=rf"1 tensors differ: {name} \(ranks 0: \w{{8}}; ranks 1: \w{{8}}\)"
            ):
                batch.send(timeout=LIMIT / 3, blocking=blocking).wait()
            ready.wait(LIMIT)
        held["inside"][:] = 3
        batch.send(timeout=LIMIT / 3, blocking=blocking).wait()
        done.wait(LIMIT)
        held["whole"][bus.rank :] = 4  # the ranks' own care from here on
        batch.send(timeout=LIMIT / 3, blocking=blocking).wait()
        done.wait(LIMIT)

    def take(bus: tessera.Bus) -> None:
        batch = bus.register(taken, timeout=LIMIT / 3)
        batch.recv(timeout=LIMIT / 2)
        assert (taken["whole"] == 1).all() and (taken["inside"] == 3).all()
        done.wait(LIMIT)
        batch.recv(timeout=LIMIT / 3)
        done.wait(LIMIT)

    run({"trainer": [send] * 2, "inference": [take]})


def test_a_batch_that_is_registered_early_again_is_compared_again() -> None:
    told, closed = threading.Barrier(3), threading.Barrier(3)

    def send(bus: tessera.Bus) -> None:
        for turn in range(3):
            held = np.full(3, 7 + bus.rank * (turn == 2), np.float32)
            with bus.register({"w": held}, direction="send", timeout=LIMIT / 3) as batch:
                if turn < 2:
                    batch.send(timeout=LIMIT / 3)
                else:
                    with pytest.raises(tessera.MismatchError, match="replicas of 1 tensors differ: w "):
                        batch.send(timeout=LIMIT / 3)
                told.wait(LIMIT)
            closed.wait(LIMIT)

    def take(bus: tessera.Bus) -> None:
        for turn in range(3):
            with bus.register({"w": np.zeros(3, np.float32)}, direction="recv", timeout=LIMIT / 3) as batch:
                if turn < 2:
                    batch.recv(timeout=LIMIT / 3)
                told.wait(LIMIT)
            closed.wait(LIMIT)

    run({"trainer": [send] * 2, "inference": [take]})


def test_shards_of_replicas_are_compared_part_by_part() -> None:
    """As FSDP2 over tensor parallelism registers what the parallel plan leaves out: two meshes of two ranks each."""
    whole = np.arange(8, dtype=np.float32).reshape(4, 2)
    taken = np.zeros_like(whole)

    def tensors(rank: int, harm: float = 0) -> dict[str, Any]:
        mesh = "2@0,2:S0" if rank in (0, 2) else "2@1,3:S0"
        return {"w": (np.array(whole[rank // 2 * 2 :][:2]) + harm * (rank == 3), mesh, whole.shape)}

    run({"trainer": [sends(tensors(rank)) for rank in range(4)], "inference": [takes({"w": taken})]})
    assert (taken == whole).all()

    def refused(bus: tessera.Bus) -> None:
        with pytest.raises(tessera.MismatchError, match=r"w \(ranks 2: \w{8}; ranks 3: \w{8}\)"):
            bus.register(tensors(bus.rank, 0.5)).send(timeout=LIMIT / 3)
        told.wait(LIMIT)

    told = threading.Barrier(4)
    run({"trainer": [refused] * 4, "inference": [refused_too({"w": taken})]})


# Layouts of 4 ranks, and which of them hold the part that rank 3 holds.
INSIDE = [
    ("4:R", [0, 1, 2, 3]),
    ("4@3,1,0,2:R", [0, 1, 2, 3]),
    ("2,2:R,S0", [1, 3]),  # HSDP
    ("2,2:S0,R", [2, 3]),  # tensor parallelism that replicates
    ("2,2:S1,R", [2, 3]),
    ("2,1,2:S0,S0,R", [2, 3]),
    ("2,2:R,G0[0;3;4]", [1, 3]),  # as sharded training with dp=
    ("2,2:Psum,R", [2, 3]),
    ("2,2:R,Psum", [1, 3]),
    ("2,2@0,2,3,1:R,S0", [0, 3]),
    ("3@1-3:R", [1, 2, 3]),
    ("2@0,3:R", [0, 3]),
    ("1,4:S0,R", [0, 1, 2, 3]),
]
ALONE = ["4:S0", "2,2:S0,S1", "4:Psum", "2,2:Psum,S0", "2@1,3:S0", "1,4:R,Psum"]


def share(layout: str, rank: int, harm: float = 0) -> dict[str, Any]:
    """A rank's share of a tensor whose rows and columns differ; of a sum's terms, each rank's own along the sum."""
    bound = tessera.Layout(layout).bind((4, 4))
    owned = bound.owned((4, 4), rank)
    if owned is None:
        return {}
    whole = np.arange(16, dtype=np.float32).reshape(4, 4)
    rows, columns = ([i for begin, end in dim for i in range(begin, end)] for dim in owned)
    part = whole[np.ix_(rows, columns)].copy()
    coordinate = bound.mesh.coordinate(rank) or ()
    for placement, at in zip(bound.placements, coordinate, strict=True):
        if isinstance(placement, tessera.Partial):
            part *= at + 1
    part += harm
    return {"w": (part, layout, (4, 4))}


def waits(told: threading.Barrier) -> Callable[[tessera.Bus], None]:
    """A job that stays until the other one has heard all: a rank that leaves earlier is lost to it."""
    return lambda bus: told.wait(LIMIT) and None


@pytest.mark.parametrize("layout", [layout for layout, _ in INSIDE] + ALONE)
def test_equal_ones_inside_a_mesh_are_sent(layout: str) -> None:
    taken = np.zeros((4, 4), np.float32)
    run({"trainer": [sends(share(layout, rank)) for rank in range(4)], "inference": [takes({"w": taken})]})
    assert (taken != 0).sum() >= 15


@pytest.mark.parametrize(("layout", "ranks"), INSIDE)
def test_others_inside_a_mesh_are_refused_on_all_ranks(layout: str, ranks: list[int]) -> None:
    same = ", ".join(str(rank) for rank in ranks if rank != 3)

    def refused(bus: tessera.Bus) -> None:
        with pytest.raises(
            tessera.MismatchError, match=rf"1 tensors differ: w \(ranks {same}: \w{{8}}; ranks 3: \w{{8}}\)\. These"
        ):
            bus.register(share(layout, bus.rank, 0.5 * (bus.rank == 3))).send(timeout=LIMIT / 3)
        told.wait(LIMIT)

    told = threading.Barrier(5)
    run({"trainer": [refused] * 4, "inference": [waits(told)]})


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("layouts", "holders"),
    [
        # The layout of each rank, and the rank whose values arrive, by column.
        (["1@0:R", "1@1:R", "1@2:R", "1@3:R"], [0, 0, 0, 0]),
        (["4:R"] * 4, [0, 0, 0, 0]),
        (["4@3,1,0,2:R"] * 4, [3, 3, 3, 3]),  # the first of its mesh
        (["2,2:R,S1"] * 4, [0, 0, 1, 1]),
        (["2,2:S1,R"] * 4, [0, 0, 2, 2]),
        (["", "2@1,3:S1", "", "2@1,3:S1"], [1, 1, 3, 3]),
        (["2@0,3:S1", "2@1,2:S1", "2@1,2:S1", "2@0,3:S1"], [0, 0, 3, 3]),  # not rank 2, which has a mesh with rank 1
        (["4:S1"] * 4, [0, 1, 2, 3]),
        (["2,2:R,G1[0;1;4]"] * 4, [0, 1, 1, 1]),
        (["2:R", "2:R", "2@2,3:S1", "2@2,3:S1"], [0, 0, 0, 0]),
    ],
)
def test_the_first_ones_are_sent_where_they_may_differ(layouts: list[str], holders: list[int], early: bool) -> None:
    taken = {"w": np.full((2, 4), -1, np.float32), "same": np.zeros(3, np.float32)}
    done = threading.Barrier(5)

    def send(bus: tessera.Bus) -> None:
        layout = layouts[bus.rank]
        named: dict[str, Any] = {"same": np.ones(3, np.float32)}
        held = np.zeros(0, np.float32)
        if layout:
            held = np.full(tessera.Layout(layout).local_shape((2, 4), bus.rank), bus.rank, np.float32)
            named["w"] = (held, layout, (2, 4))
        batch = bus.register(named, replicas={"w": "first"}, direction="send" if early else None, timeout=LIMIT / 3)
        for version in (1, 2):
            held[...] = bus.rank + 10 * version
            batch.send(timeout=LIMIT / 3)
            done.wait(LIMIT)
        sends_it = bus.rank in (holders)
        assert (batch.names, batch.skipped) == (
            (("same", "w"), ()) if sends_it else (("same",), ("w",) if layout else ())
        )

    def take(bus: tessera.Bus) -> None:
        batch = bus.register(taken, timeout=LIMIT / 3)
        for version in (1, 2):
            batch.recv(timeout=LIMIT / 3)
            assert taken["w"].tolist() == [[rank + 10 * version for rank in holders]] * 2
            done.wait(LIMIT)

    run({"trainer": [send] * 4, "inference": [take]})


def test_ranks_that_allow_other_replicas_to_differ_are_refused() -> None:
    told = threading.Barrier(3)

    def refused(bus: tessera.Bus) -> None:
        allowed: dict[str, Any] = {"w": "first"} if bus.rank else {}
        with pytest.raises(tessera.MismatchError, match=r"replicas= has \[\] on rank 0 and \['w'\] on rank 1"):
            bus.register({"w": np.zeros(3)}, replicas=allowed).send(timeout=LIMIT / 3)
        told.wait(LIMIT)

    run({"trainer": [refused] * 2, "inference": [waits(told)]})


def test_the_refusal_says_how_to_allow_it() -> None:
    """For exactly that name, and the line works."""
    name = "bn.running_mean (0)"
    taken = {name: np.zeros(3, np.float32)}
    done = threading.Barrier(3)

    def send(bus: tessera.Bus) -> None:
        held = {name: np.full(3, 1 + bus.rank, np.float32)}
        batch = bus.register(held, direction="send", timeout=LIMIT / 3)
        with pytest.raises(tessera.MismatchError) as caught:
            batch.send(timeout=LIMIT / 3)
        line = re.search(r"replicas=(\{.*\})", str(caught.value))
        assert line is not None
        done.wait(LIMIT)
        batch.close()
        bus.register(held, "allowed", replicas=ast.literal_eval(line[1])).send(timeout=LIMIT / 3)
        done.wait(LIMIT)

    def take(bus: tessera.Bus) -> None:
        batch = bus.register(taken, direction="recv", timeout=LIMIT / 3)
        done.wait(LIMIT)
        batch.close()
        bus.register(taken, "allowed").recv(timeout=LIMIT / 3)
        assert (taken[name] == 1).all()
        done.wait(LIMIT)

    run({"trainer": [send] * 2, "inference": [take]})


@pytest.mark.parametrize("bad", ["first", {"w": "last"}, {"w": None}, {"(": "first"}, {5: "first"}])
def test_what_replicas_does_not_take(bad: Any) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match="replicas"):
        Registration.collect({"w": np.zeros(3)}, lambda name: True, 0, None, False, replicas=bad)


@pytest.mark.parametrize("layout", ALONE)
def test_parts_that_one_rank_holds_are_its_own(layout: str) -> None:
    """Any values: there is nothing to compare them with."""
    taken = np.zeros((4, 4), np.float32)
    run({"trainer": [sends(share(layout, rank, rank / 8)) for rank in range(4)], "inference": [takes({"w": taken})]})


def test_a_whole_tensor_is_a_replica_of_those_of_a_mesh() -> None:
    """Ranks 0 and 1 share a mesh, and rank 2 has one of its own: receivers take a share from each."""

    def tensors(rank: int, value: float) -> dict[str, Any]:
        return {"w": (np.full((4, 4), value, np.float32), "2@0,1:R" if rank < 2 else "1@2:R", (4, 4))}

    def refused(bus: tessera.Bus) -> None:
        with pytest.raises(tessera.MismatchError, match=r"w \(ranks 0, 1: \w{8}; ranks 2: \w{8}\)"):
            bus.register(tensors(bus.rank, 1 + bus.rank // 2)).send(timeout=LIMIT / 3)
        told.wait(LIMIT)

    told = threading.Barrier(4)
    run({"trainer": [refused] * 3, "inference": [waits(told)]})


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5,), (3, 4), (2, 3, 4), (2, 1, 5)])
def test_the_digest_does_not_depend_on_strides(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(3)
    dense = random.integers(0, 255, shape).astype(np.uint16)

    def digest(array: np.ndarray) -> str:
        strides = [stride // array.itemsize for stride in array.strides]
        return _core.local_digest(array.__array_interface__["data"][0], "u16", array.shape, strides)

    assert digest(np.asfortranarray(dense)) == digest(dense)
    wide = np.zeros((*shape, 2), np.uint16)
    wide[..., 1] = dense
    assert digest(wide[..., 1]) == digest(dense)
    if dense.size:
        other = dense.copy()
        other.flat[-1] ^= 1
        assert digest(other) != digest(dense)
