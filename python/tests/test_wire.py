"""What tensors are quantised to on their way: wire= of register(), on either side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback, move
from ranks import LIMIT
from tessera._registration import Registration


def wire_of(tensors: dict[str, Any], wire: Any, **options: Any) -> dict[str, str | None]:
    registration = Registration.collect(
        tensors, keep=lambda name: True, rank=0, fallback=None, missing_ok=False, wire=wire, **options
    )
    registration.agree([registration.said()])
    return {spec.name: spec.wire for spec in registration.specs()}


def matrices(*names: str) -> dict[str, Any]:
    return {name: np.zeros((6, 8), np.float32) for name in names}


def test_the_first_key_of_the_whole_name_counts() -> None:
    wire = {"lm_head": None, r"layers\.\d+\.q": "MXFP8", "layers.*": "nvfp4"}
    found = wire_of(matrices("lm_head", "layers.0.q", "layers.0.qkv", "my.layers.0.q"), wire)
    assert found == {"lm_head": None, "layers.0.q": "mxfp8", "layers.0.qkv": "nvfp4", "my.layers.0.q": None}
    assert wire_of(matrices("w"), None) == {"w": None}


def test_names_are_those_on_the_bus() -> None:
    parts = [tessera.Part("q", whole=np.s_[:4]), tessera.Part("k", whole=np.s_[4:])]
    assert wire_of(matrices("qk"), {"q": "nvfp4", "qk": "mxfp8"}, names={"qk": parts}) == {"q": "nvfp4", "k": None}


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        ("nvfp4", "wire 'nvfp4': give {regular expression of names: format, or None}"),
        ({"(": "nvfp4"}, "wire: key '(' is no regular expression"),
        ({1: "nvfp4"}, "wire: key 1 is no regular expression"),
        ({".*": 4}, "wire: '.*' becomes 4: give the name of a format, or None"),
        ({".*": "fp4"}, "wire: '.*': unknown format 'fp4': use one of fp8_e4m3, "),
    ],
)
def test_bad_rules_are_named(loopback: Loopback, wire: Any, text: str) -> None:
    with pytest.raises(tessera.InvalidArgumentError) as error:
        loopback.register(matrices("w"), wire=wire)
    assert text in str(error.value)


def errors(loopback: Loopback, name: str, sent: Any, received: Any) -> list[BaseException | None]:
    """What becomes of registering one matrix, at the sender and at the receiver."""

    def register(bus: tessera.Bus, direction: Any, wire: Any) -> BaseException | None:
        try:
            bus.register(matrices("w"), name, direction=direction, wire=wire, timeout=LIMIT).close()
        except tessera.Error as error:
            return error
        return None

    with ThreadPoolExecutor(2) as threads:
        ends = [
            threads.submit(register, loopback.trainer, "send", sent),
            threads.submit(register, loopback.inference, "recv", received),
        ]
        return [end.result(LIMIT) for end in ends]


def test_two_jobs_that_ask_for_different_formats_are_told_so(loopback: Loopback) -> None:
    for error in errors(loopback, "different", {"w": "nvfp4"}, {".*": "mxfp8"}):
        assert isinstance(error, tessera.MismatchError)
        assert "tensor w: trainer asks for wire format nvfp4, inference for mxfp8" in str(error)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8_e4m3"])
@pytest.mark.parametrize(("sends", "receives"), [(True, False), (False, True), (True, True)])
def test_what_either_job_asks_for_is_quantised_on_its_way(
    loopback: Loopback, format: str, sends: bool, receives: bool
) -> None:
    x = np.random.default_rng(3).standard_normal((48, 40)).astype(np.float32)
    into = np.zeros_like(x)
    name = f"{format}-{sends}-{receives}"
    sender = loopback.trainer.register({"w": x}, name, wire={"w": format} if sends else None)
    receiver = loopback.inference.register({"w": into}, name, wire={"w": format} if receives else None)
    with sender, receiver:
        move(sender, receiver)
    np.testing.assert_array_equal(into, tessera.quantize(x, format).dequantize())


@pytest.mark.parametrize(("format", "most"), [("nvfp4", 0.29), ("mxfp8", 0.52)])
def test_figures_tell_the_share_of_bf16(loopback: Loopback, format: str, most: float) -> None:
    shapes = {"embed": (320, 64), "q": (64, 64), "experts": (3, 96, 64), "norm": (64,)}
    x = {name: np.random.default_rng(7).standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    into = {name: np.zeros_like(tensor) for name, tensor in x.items()}
    sender = loopback.trainer.register(x, f"figures-{format}", wire={".*": format})
    receiver = loopback.inference.register(into, f"figures-{format}")
    with sender, receiver:
        move(sender, receiver)
        both = sender.stats, receiver.stats
    matrices = 4 * (320 + 64 + 3 * 96) * 16
    for stats in both:
        assert stats.quantized_elements == stats.quantized_elements_moved == matrices
        assert stats.quantized_source_bytes == 4 * matrices
        assert stats.rank_bytes == stats.quantized_bytes + 4 * 64
        assert stats.bytes_moved == stats.quantized_bytes_moved + 4 * 64
        assert stats.quantized_ratio == stats.quantized_bytes / (2 * matrices) <= most
        assert stats.batch_ratio == stats.bytes_moved / (2 * matrices + 4 * 64)
    assert [stats.amax_exchanges for stats in both] == [1, 0]


def test_what_cannot_be_quantised_travels_as_it_is(loopback: Loopback) -> None:
    tensors = {"norm": np.arange(8, dtype=np.float32), "ids": np.arange(48).reshape(6, 8)}
    into = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    loopback.transfer(tensors, into, wire={".*": "nvfp4"})
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(into[name], tensor)
