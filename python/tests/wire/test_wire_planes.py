"""Tensors that are received quantised: a receiver registers a QuantizedTensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tessera
import torch
from loopback import Loopback
from ranks import run

LIMIT = 60.0
BOTH = ("row", "column")


def random_matrix(*shape: int, seed: int = 5) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * np.exp2(random.integers(-6, 7, shape))).astype(np.float32)


def as_bytes(array: Any) -> np.ndarray[Any, Any]:
    if isinstance(array, torch.Tensor):
        array = array.view(torch.uint8).numpy()
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same(plane: tessera.QuantizedPlane, expected: tessera.QuantizedPlane, where: Any = np.s_[...]) -> None:
    np.testing.assert_array_equal(as_bytes(plane.codes), as_bytes(expected.codes)[where])
    np.testing.assert_array_equal(as_bytes(plane.scales), as_bytes(expected.scales))
    if expected.amax is not None:
        np.testing.assert_array_equal(np.asarray(plane.amax), np.asarray(expected.amax))


@pytest.mark.parametrize("format", tessera._core.formats())
@pytest.mark.parametrize("planes", [("row",), ("column",), BOTH])
@pytest.mark.parametrize("mode", ["inplace", "staged"])
def test_planes_are_those_of_quantize(loopback: Loopback, format: str, planes: tuple[str, ...], mode: str) -> None:
    x = random_matrix(3, 144, 272)
    room = tessera.QuantizedTensor.empty(x.shape, format, planes=planes)
    loopback.transfer({"w": x}, {"w": room}, mode=mode)
    expected = tessera.quantize(x, format, planes=planes)
    for plane in planes:
        assert_same(getattr(room, plane), getattr(expected, plane))
        np.testing.assert_array_equal(np.asarray(room.dequantize(plane)), expected.dequantize(plane))


def test_bf16_of_torch_beside_what_travels_as_it_is(loopback: Loopback) -> None:
    tensors = {"w": torch.from_numpy(random_matrix(64, 48)).bfloat16(), "norm": torch.ones(48), "ids": torch.arange(9)}
    room = tessera.QuantizedTensor.empty((64, 48), "nvfp4", planes=BOTH)
    into = {"w": room, "norm": torch.zeros(48), "ids": torch.zeros(9, dtype=torch.int64)}
    loopback.transfer(tensors, into)
    expected = tessera.quantize(tensors["w"], "nvfp4")
    assert_same(room.row, expected.row)
    assert_same(room.column, expected.column)
    assert torch.equal(into["norm"], tensors["norm"])
    assert torch.equal(into["ids"], tensors["ids"])
    assert isinstance(room.row.codes, torch.Tensor)


def test_shards_are_slices_of_the_whole(tmp_path: Any) -> None:
    x = random_matrix(128, 96)
    expected = tessera.quantize(x, "nvfp4")

    def send(bus: tessera.Bus) -> None:
        half = slice(bus.rank * 64, bus.rank * 64 + 64)
        with bus.register({"w": (x[half].copy(), "2:S0", x.shape)}, "b") as batch:
            batch.send(timeout=LIMIT)

    def receive(bus: tessera.Bus) -> None:
        room = tessera.QuantizedTensor.empty(x.shape, "nvfp4", layout="3:S1", planes=BOTH, rank=bus.rank)
        with bus.register({"w": room}, "b") as batch:
            batch.recv(timeout=LIMIT)
        columns = slice(bus.rank * 32, bus.rank * 32 + 32)
        packed = slice(bus.rank * 16, bus.rank * 16 + 16)
        blocks = slice(bus.rank * 2, bus.rank * 2 + 2)
        np.testing.assert_array_equal(as_bytes(room.row.codes), expected.row.codes[:, packed])
        np.testing.assert_array_equal(as_bytes(room.row.scales), expected.row.scales[:, blocks])
        np.testing.assert_array_equal(as_bytes(room.column.codes), expected.column.codes[columns])
        np.testing.assert_array_equal(as_bytes(room.column.scales), expected.column.scales[columns])
        assert float(room.row.amax) == float(expected.row.amax)
        assert room.shape == (128, 32)

    run({"trainer": [send] * 2, "inference": [receive] * 3})


def test_a_slice_of_the_senders_tensor(loopback: Loopback) -> None:
    x = random_matrix(4, 32, 64)
    room = tessera.QuantizedTensor.empty((32, 64), "mxfp8", planes=BOTH)
    into = {"expert": room}
    loopback.transfer({"experts": x}, into, map={"expert": tessera.Part("experts", source=np.s_[2])})
    expected = tessera.quantize(x[2], "mxfp8")
    assert_same(room.row, expected.row)
    assert_same(room.column, expected.column)


def test_a_shards_edge_inside_a_block_is_named(loopback: Loopback) -> None:
    room = tessera.QuantizedTensor.empty((40, 64), "nvfp4", layout="1,1:S0,S0", rank=0)
    assert room.shape == (40, 64)
    cut = tessera.QuantizedTensor.empty((40, 64), "nvfp4", layout="2:S0", rank=0)
    with pytest.raises(tessera.InvalidArgumentError) as error:
        loopback.inference.register({"w": cut}, "cut", direction="recv", timeout=LIMIT)
    text = str(error.value)
    assert "tensor w of inference/0: layout 2:S0" in text


@pytest.mark.parametrize(
    ("tensor", "options", "text"),
    [
        (
            lambda: tessera.quantize(random_matrix(16, 32), "mxfp8"),
            {},
            "quantize() made its planes as separate arrays: copy codes, scales and amaxes to a QuantizedTensor.empty()",
        ),
        (
            lambda: tessera.QuantizedTensor.empty((16, 32), "nvfp4", scaling="1x16"),
            {},
            "its blocks are 1x16: on the bus nvfp4 has blocks of 16x16",
        ),
        (
            lambda: tessera.QuantizedTensor.empty((16, 32), "nvfp4"),
            {"wire": {"w": "mxfp8"}},
            "wire= asks for mxfp8, and it is a QuantizedTensor of nvfp4",
        ),
        (
            lambda: tessera.QuantizedTensor.empty((16, 32), "nvfp4"),
            {"map": {"w": tessera.Part("w", local=np.s_[:8])}},
            "a QuantizedTensor is registered as a whole",
        ),
        (
            lambda: tessera.QuantizedTensor.empty((16, 32), "nvfp4", layout="1:Psum", rank=0),
            {"direction": "send"},
            "tensor w is quantised already, to nvfp4, and has terms of a sum (layout 1:Psum)",
        ),
    ],
)
def test_what_cannot_be_received_into_is_refused(
    loopback: Loopback, tensor: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(tessera.InvalidArgumentError) as error:
        loopback.inference.register({"w": tensor()}, "refused", **{"direction": "recv", "timeout": LIMIT, **options})
    assert "tensor w" in str(error.value)
    assert text in str(error.value)
