"""Tensors that are sent quantised: a sender registers a QuantizedTensor, which travels as it is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback, move
from ranks import LIMIT, connect, run
from tessera._tensors.layouts import as_layout
from test_wire_planes import BOTH, as_bytes, assert_same, random_matrix


def filled(
    x: np.ndarray[Any, Any], format: str, *, layout: str | None = None, rank: int = 0, **options: Any
) -> tessera.QuantizedTensor:
    """What `rank` holds of the whole `x`, quantised: of rows."""
    planes = options.pop("planes", ("row",))
    here = x if layout is None else x[rows_of(x, layout, rank)]
    room = tessera.QuantizedTensor.empty(x.shape, format, planes=planes, layout=layout, rank=rank)
    amax = {"amax": tessera.amax(x)} if room._spec.needs_amax and x.ndim == 2 else {}
    made = tessera.quantize(here, format, planes=planes, **(amax | options))
    for plane in room.planes:
        to, source = getattr(room, plane), getattr(made, plane)
        as_bytes(to.codes)[...] = as_bytes(source.codes)
        as_bytes(to.scales)[...] = as_bytes(source.scales)
        if source.amax is not None:
            np.asarray(to.amax)[...] = np.asarray(source.amax)
    return room


def rows_of(x: np.ndarray[Any, Any], layout: str, rank: int) -> slice:
    """Of a matrix that is sharded by rows."""
    bound = as_layout(layout).bind(x.shape)
    before = sum(bound.local_shape(x.shape, other)[0] for other in range(rank))
    return slice(before, before + bound.local_shape(x.shape, rank)[0])


@pytest.mark.parametrize("format", tessera._core.formats())
@pytest.mark.parametrize("mode", ["inplace", "staged"])
def test_planes_and_values_arrive_as_if_the_bus_had_quantised(loopback: Loopback, format: str, mode: str) -> None:
    x = random_matrix(3, 144, 272)
    source = filled(x, format, planes=BOTH)
    planes = tessera.QuantizedTensor.empty(x.shape, format, planes=BOTH)
    values = np.zeros(x.shape, np.float32)
    loopback.transfer({"w": source, "v": source}, {"w": planes, "v": values}, mode=mode)
    expected = tessera.quantize(x, format)
    for plane in BOTH:
        assert_same(getattr(planes, plane), getattr(expected, plane))
    np.testing.assert_array_equal(values, expected.dequantize())


@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3", "fp8_block_128x128"])
def test_one_plane_gives_the_other_where_it_is_its_transpose(loopback: Loopback, format: str) -> None:
    x = random_matrix(128, 256)
    planes = tessera.QuantizedTensor.empty(x.shape, format, planes=BOTH)
    values = np.zeros(x.shape, np.float32)
    source = filled(x, format, planes="column")
    loopback.transfer({"w": source, "v": source}, {"w": planes, "v": values})
    expected = tessera.quantize(x, format)
    for plane in BOTH:
        assert_same(getattr(planes, plane), getattr(expected, plane))
    np.testing.assert_array_equal(values, expected.dequantize())


# Whoever quantised the values again would get other bytes.
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8_e4m3", "fp8_block_1x128"])
def test_bytes_that_no_quantiser_gives_travel_as_they_are(loopback: Loopback, format: str) -> None:
    random = np.random.default_rng(11)
    source = tessera.QuantizedTensor.empty((64, 256), format)
    arrived = tessera.QuantizedTensor.empty((64, 256), format)
    codes = as_bytes(source.row.codes)
    codes[...] = random.integers(0, 256, codes.shape)
    scales = as_bytes(source.row.scales)
    if format in ("nvfp4", "mxfp8"):
        scales[...] = random.integers(1, 120, scales.shape)
    else:
        source.row.scales[...] = 0.375
    if format == "nvfp4":  # a block's scale stands in each of its rows
        scales[...] = scales[::16].repeat(16, 0)
    if source.row.amax is not None:
        source.row.amax[...] = 3.0
    sender, receiver = loopback.batches({"w": source}, {"w": arrived})
    with sender, receiver:
        for _ in range(2):
            move(sender, receiver)
            assert_same(arrived.row, source.row)
            codes[...] = codes[::-1].copy()


@pytest.mark.parametrize("layout", ["2:S0", "2:G0[0;32;128]", "2:R"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8_e4m3", "fp8_e5m2", "fp8_block_1x128"])
def test_shards_of_two_ranks(layout: str, format: str) -> None:
    x = random_matrix(128, 96)
    expected = tessera.quantize(x, format, planes="row")

    def send(bus: tessera.Bus) -> None:
        if layout == "2:R":
            source = filled(x, format, layout=layout, rank=0)
        else:
            source = filled(x, format, layout=layout, rank=bus.rank)
        with bus.register({"w": source, "v": source}, "b") as batch:
            batch.send(timeout=LIMIT)

    def receive(bus: tessera.Bus) -> None:
        room = tessera.QuantizedTensor.empty(x.shape, format, layout="2:S0", rank=bus.rank)
        values = np.zeros((128, 48), np.float32)
        with bus.register({"w": room, "v": (values, "2:S1", x.shape)}, "b") as batch:
            batch.recv(timeout=LIMIT)
        rows = slice(bus.rank * 64, bus.rank * 64 + 64)
        np.testing.assert_array_equal(as_bytes(room.row.codes), as_bytes(expected.row.codes)[rows])
        scales = as_bytes(expected.row.scales)
        np.testing.assert_array_equal(as_bytes(room.row.scales), scales if scales.shape[0] == 1 else scales[rows])
        if expected.row.amax is not None:
            assert float(room.row.amax) == float(expected.row.amax)
        columns = slice(bus.rank * 48, bus.rank * 48 + 48)
        np.testing.assert_array_equal(values, expected.dequantize()[:, columns])

    run({"trainer": [send] * 2, "inference": [receive] * 2})


def test_replicas_of_plain_ranks_are_compared() -> None:
    x = random_matrix(32, 64)

    def send(changed: bool) -> Any:
        def work(bus: tessera.Bus) -> None:
            source = filled(x, "nvfp4")
            if changed:
                as_bytes(source.row.codes)[3, 4] ^= 1
            with bus.register({"w": source}, "b") as batch:
                batch.send(timeout=LIMIT / 4)

        return work

    def receive(bus: tessera.Bus) -> None:
        room = tessera.QuantizedTensor.empty(x.shape, "nvfp4")
        with bus.register({"w": room}, "b") as batch:
            batch.recv(timeout=LIMIT / 4)
        assert_same(room.row, tessera.quantize(x, "nvfp4").row)

    run({"trainer": [send(False)] * 2, "inference": [receive]})
    with pytest.raises(tessera.MismatchError, match="replicas of 1 tensors differ: w"):
        run({"trainer": [send(False), send(True)], "inference": [receive]})


@pytest.mark.parametrize(("format", "what"), [("nvfp4", "amax 4000"), ("fp8_e4m3", "scale 8.928571")])
def test_shards_that_were_quantised_one_by_one_fail_on_both_ranks(format: str, what: str) -> None:
    x = random_matrix(64, 64)
    x[40, 3] = 4000
    texts = []

    def send(bus: tessera.Bus) -> None:
        own = tessera.amax(x[rows_of(x, "2:S0", bus.rank)])
        batch = bus.register({"w": filled(x, format, layout="2:S0", rank=bus.rank, amax=own)}, "b")
        with pytest.raises(tessera.MismatchError) as error:
            batch.send(timeout=LIMIT / 3)
        texts.append(str(error.value))
        source = filled(x, format, layout="2:S0", rank=bus.rank)
        with bus.register({"w": source}, "again") as batch:
            batch.send(timeout=LIMIT / 3)

    def receive(bus: tessera.Bus) -> None:
        values = np.zeros(x.shape, np.float32)
        waiting = bus.register({"w": values}, "b", direction="recv")
        with bus.register({"w": values}, "again") as batch:
            batch.recv(timeout=LIMIT / 3)
        waiting.close()
        np.testing.assert_array_equal(values, tessera.quantize(x, format).dequantize())

    run({"trainer": [send] * 2, "inference": [receive]})
    for text in texts:
        kind, value = what.split()
        assert f"tensor w: its matrix 0 is quantised with {kind} " in text
        assert f"on trainer/0 and {value} on trainer/1" in text


def test_an_amax_that_was_not_filled_is_named(loopback: Loopback) -> None:
    source = tessera.QuantizedTensor.empty((16, 32), "nvfp4")
    source.row.amax[...] = float("nan")
    sender, receiver = loopback.batches({"w": source}, {"w": np.zeros((16, 32), np.float32)})
    with sender, receiver, ThreadPoolExecutor(1) as threads:
        taken = threads.submit(receiver.recv, timeout=LIMIT)
        with pytest.raises(tessera.InvalidArgumentError) as error:
            sender.send(timeout=LIMIT)
        assert "tensor w: it is quantised to nvfp4 already, and the amax of its matrix 0 is nan" in str(error.value)
        source.row.amax[...] = 0.0
        sender.send(timeout=LIMIT)
        taken.result(LIMIT)


def test_parts_of_a_fused_tensor_keep_their_own_amaxes(loopback: Loopback) -> None:
    q, k = random_matrix(32, 64), 100 * random_matrix(32, 64, seed=6)
    fused = np.zeros((64, 64), np.float32)
    loopback.transfer(
        {"q": filled(q, "nvfp4"), "k": filled(k, "nvfp4")},
        {"qk": fused},
        map={"qk": [tessera.Part("q", local=np.s_[:32]), tessera.Part("k", local=np.s_[32:])]},
    )
    expected = [tessera.quantize(each, "nvfp4").dequantize() for each in (q, k)]
    np.testing.assert_array_equal(fused, np.concatenate(expected))


@pytest.mark.parametrize(
    ("source", "into", "options", "text"),
    [
        (
            ("nvfp4", "row"),
            ("mxfp8", "row"),
            {},
            "trainer offers it quantised to nvfp4 already, and inference asks for",
        ),
        (("mxfp8", "row"), ("mxfp8", "column"), {}, "trainer offers its row plane only, quantised to mxfp8 already"),
        (("mxfp8", "column"), None, {}, "inference takes the values of the row plane of it, and trainer offers its"),
        (("nvfp4", "row"), None, {"wire": "fp8_e4m3"}, "trainer offers it quantised to nvfp4 already, and inference"),
    ],
)
def test_what_the_sender_does_not_have_is_named_at_both_ends(
    loopback: Loopback, source: tuple[str, str], into: tuple[str, str] | None, options: dict[str, Any], text: str
) -> None:
    x = random_matrix(64, 64)
    offered = filled(x, source[0], planes=source[1])
    room: Any = np.zeros(x.shape, np.float32)
    if into is not None:
        room = tessera.QuantizedTensor.empty(x.shape, into[0], planes=into[1])
    sender, receiver = loopback.batches({"w": offered}, {"w": room}, **options)
    with sender, receiver, ThreadPoolExecutor(1) as threads:
        sent = threads.submit(sender.send, timeout=LIMIT)
        for end in (lambda: receiver.recv(timeout=LIMIT), lambda: sent.result(LIMIT)):
            with pytest.raises(tessera.MismatchError) as error:
                end()
            assert text in str(error.value)


def test_a_shards_edge_inside_a_block_is_named() -> None:
    refused = threading.Barrier(3, timeout=LIMIT)

    def send(bus: tessera.Bus) -> None:
        cut = tessera.QuantizedTensor.empty((40, 64), "nvfp4", layout="2:S0", rank=bus.rank)
        with pytest.raises(tessera.InvalidArgumentError) as error:
            bus.register({"w": cut}, "b", direction="send", timeout=LIMIT / 3)
        text = str(error.value)
        assert "cuts dim 0 of shape 40x64 at 20, inside a block of 16 x 16 of its row plane in nvfp4" in text
        assert "16 and 32: choose a mesh or bounds (G0[0;...]) that cut there, or register a tensor of floats" in text
        refused.wait()

    run({"trainer": [send] * 2, "inference": [lambda bus: refused.wait()]})


def test_the_wire_format_may_be_named_again_but_no_other(loopback: Loopback) -> None:
    x = random_matrix(16, 32)
    values = np.zeros(x.shape, np.float32)
    sender = loopback.trainer.register({"w": filled(x, "nvfp4")}, "named", wire="nvfp4")
    receiver = loopback.inference.register({"w": values}, "named")
    with sender, receiver:
        move(sender, receiver)
    np.testing.assert_array_equal(values, tessera.quantize(x, "nvfp4").dequantize())
    with pytest.raises(
        tessera.InvalidArgumentError, match="wire= asks for mxfp8, and it is a QuantizedTensor of nvfp4"
    ):
        loopback.trainer.register({"w": filled(x, "nvfp4")}, "other", wire="mxfp8", direction="send", timeout=LIMIT)


def test_two_jobs_take_it_from_one_sender() -> None:
    x = random_matrix(64, 128)
    source = filled(x, "nvfp4")
    expected = tessera.quantize(x, "nvfp4")
    values = np.zeros(x.shape, np.float32)
    room = tessera.QuantizedTensor.empty(x.shape, "nvfp4", planes=BOTH)

    def take(job: str, into: Any) -> None:
        with connect(job, "trainer", "two-jobs") as bus, bus.register({"w": into}, "b") as batch:
            for version in (1, 2):
                batch.recv(version, timeout=LIMIT)

    with ThreadPoolExecutor(2) as threads:
        taken = [threads.submit(take, job, into) for job, into in (("floats", values), ("planes", room))]
        with (
            connect("trainer", ["floats", "planes"], "two-jobs") as bus,
            bus.register({"w": source}, "b", grace=LIMIT) as batch,
        ):
            batch.wait_peers(2, timeout=LIMIT)
            for version in (1, 2):
                batch.send(version, timeout=LIMIT)
                batch.wait_peers(2, version, timeout=LIMIT)
            for each in taken:
                each.result(LIMIT)
    np.testing.assert_array_equal(values, expected.dequantize())
    assert_same(room.row, expected.row)
    assert_same(room.column, expected.column)
