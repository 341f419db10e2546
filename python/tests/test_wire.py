"""What tensors are quantised to on their way: wire= of register(), on either side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback, move
from ranks import LIMIT, run
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


@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3", "mxfp8", "fp8_block_128x128"])
def test_each_matrix_of_a_stack_has_an_amax_of_its_own(loopback: Loopback, format: str) -> None:
    experts = np.random.default_rng(4).standard_normal((3, 32, 48)).astype(np.float32)
    experts *= np.float32([1, 1000 / 3, 0.01])[:, None, None]
    into = np.zeros_like(experts)
    loopback.transfer({"experts": experts}, {"experts": into}, wire={"experts": format})
    expected = np.stack([tessera.quantize(expert, format).dequantize() for expert in experts])
    np.testing.assert_array_equal(into, expected)
    if format in ("nvfp4", "fp8_e4m3"):
        flat = tessera.quantize(experts.reshape(96, 48), format).dequantize().reshape(experts.shape)
        assert not np.array_equal(flat, expected), "one amax for all of them would do, too"


def test_terms_of_a_partial_source_are_quantised_once_they_are_reduced() -> None:
    terms = np.random.default_rng(5).standard_normal((2, 40, 64)).astype(np.float32)
    into = [np.zeros((40, 32), np.float32) for _ in range(2)]

    def send(rank: int) -> Callable[[tessera.Bus], None]:
        def work(bus: tessera.Bus) -> None:
            batch = bus.register({"w": (terms[rank], "2:Psum")}, wire={"w": "nvfp4"})
            batch.send(timeout=LIMIT / 3)

        return work

    def receive(rank: int) -> Callable[[tessera.Bus], None]:
        def work(bus: tessera.Bus) -> None:
            batch = bus.register({"w": (into[rank], "2:S1")})
            batch.recv(timeout=LIMIT / 3)

        return work

    run({"trainer": [send(0), send(1)], "inference": [receive(0), receive(1)]})
    expected = tessera.quantize(terms[0] + terms[1], "nvfp4").dequantize()
    np.testing.assert_array_equal(np.concatenate(into, axis=1), expected)


@pytest.mark.parametrize("asks", ["sender", "receiver", "both"])
def test_what_cannot_be_quantised_travels_as_it_is(loopback: Loopback, asks: str) -> None:
    tensors = {
        "norm": np.arange(8, dtype=np.float32) / 3,
        "ids": np.arange(48).reshape(6, 8),
        "mask": np.arange(48).reshape(6, 8) % 3 == 0,
        "scale": np.array(1 / 3, np.float32),
    }
    into = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    name = f"as-it-is-{asks}"
    sender = loopback.trainer.register(tensors, name, wire=None if asks == "receiver" else {".*": "nvfp4"})
    receiver = loopback.inference.register(into, name, wire=None if asks == "sender" else {".*": "nvfp4"})
    with sender, receiver:
        move(sender, receiver)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(into[name], tensor)
