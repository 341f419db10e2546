"""Formats in which tensors travel: wire= of register(), on either side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback, move
from ranks import LIMIT, run
from tessera._bus.registration import Registration


def wire_of(tensors: dict[str, Any], wire: Any, **options: Any) -> dict[str, str | None]:
    registration = Registration.collect(
        tensors, keep=lambda name: True, rank=0, fallback=None, missing_ok=False, wire=wire, **options
    )
    registration.agree([registration.to_gather()])
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
        (4, "wire 4: give the name of a format, or {regular expression of names: format, or None}"),
        ("fp4", "wire: unknown format 'fp4': use one of fp8_e4m3, "),
        ({"(": "nvfp4"}, "wire: key '(' is not a regular expression"),
        ({1: "nvfp4"}, "wire: key 1: give a str"),
        ({".*": 4}, "wire: '.*' becomes 4: give the name of a format, or None"),
        ({".*": "fp4"}, "wire: '.*': unknown format 'fp4': use one of fp8_e4m3, "),
    ],
)
def test_bad_rules_are_named(loopback: Loopback, wire: Any, text: str) -> None:
    with pytest.raises(tessera.InvalidArgumentError) as error:
        loopback.register(matrices("w"), wire=wire)
    assert text in str(error.value)


def errors(loopback: Loopback, name: str, sent: Any, received: Any) -> list[BaseException | None]:
    """The errors of registering one matrix, at the sender and at the receiver."""

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


# --- parts of a fused tensor are quantised as one


def fused_of(tensors: dict[str, Any], names: Any) -> dict[str, Any]:
    registration = Registration.collect(
        tensors, keep=lambda name: True, rank=0, fallback=None, missing_ok=False, names=names
    )
    registration.agree([registration.to_gather()])
    return {spec.name: spec.fused for spec in registration.specs()}


def test_parts_that_lie_in_the_same_matrices_are_fused() -> None:
    experts = np.zeros((2, 12, 8), np.float32)
    names = {
        "qk": [tessera.Part("q", whole=np.s_[:4]), tessera.Part("k", local=np.s_[4:, :])],
        "experts": [
            *(tessera.Part(f"{e}.gate", local=np.s_[e, :5]) for e in range(2)),
            *(tessera.Part(f"{e}.up", local=np.s_[e, 5:]) for e in range(2)),
        ],
        "stack": [tessera.Part("s0", local=np.s_[0]), tessera.Part("s1", local=np.s_[1])],
        "rows": [tessera.Part("even", local=np.s_[::2]), tessera.Part("odd", local=np.s_[1::2])],
        "bias": [tessera.Part("bq", local=np.s_[:4]), tessera.Part("bk", local=np.s_[4:])],
    }
    tensors = {**matrices("qk", "rows", "alone"), "experts": experts, "stack": experts, "bias": np.zeros(8, np.float32)}
    assert fused_of(tensors, names) == {
        "q": ("q", (0, 0)),
        "k": ("q", (4, 0)),
        "0.gate": ("0.gate", (0, 0)),
        "0.up": ("0.gate", (5, 0)),
        "1.gate": ("1.gate", (0, 0)),
        "1.up": ("1.gate", (5, 0)),
        **dict.fromkeys(["s0", "s1", "even", "odd", "bq", "bk", "alone"]),
    }


@pytest.mark.parametrize("format", tessera._core.formats())
def test_a_fused_tensor_is_what_the_whole_would_be(format: str) -> None:
    random = np.random.default_rng(11)
    sizes = {"q": 40, "k": 12, "v": 30}  # whose edges lie inside blocks
    sent = {name: random.standard_normal((rows, 64)).astype(np.float32) for name, rows in sizes.items()}
    sent["k"] *= 37
    expected = tessera.quantize(np.concatenate(list(sent.values())), format).dequantize()

    def send(bus: tessera.Bus) -> None:
        shards = {
            name: (x[bus.rank * len(x) // 2 : (bus.rank + 1) * len(x) // 2].copy(), "2:S0", x.shape)
            for name, x in sent.items()
        }
        with bus.register(shards, "b", wire={".*": format}) as batch:
            batch.send(timeout=LIMIT)

    def receive(bus: tessera.Bus) -> None:
        fused = np.zeros((82, 32), np.float32)
        parts = [
            tessera.Part("q", whole=np.s_[:40]),
            tessera.Part("k", whole=np.s_[40:52]),
            tessera.Part("v", whole=np.s_[52:]),
        ]
        with bus.register({"qkv": (fused, "2:S1", (82, 64))}, "b", map={"qkv": parts}) as batch:
            batch.recv(timeout=LIMIT)
        np.testing.assert_array_equal(fused, expected[:, bus.rank * 32 : bus.rank * 32 + 32])

    run({"trainer": [send] * 2, "inference": [receive] * 2})


def test_shards_of_a_fused_tensor_share_its_amax() -> None:
    """As tensor parallelism has them: each rank a part of q, then one of k, whose places in the whole nobody says."""
    random = np.random.default_rng(12)
    q, k = (random.standard_normal((64, 32)).astype(np.float32) for _ in range(2))
    k *= 37
    expected = tessera.quantize(np.concatenate([q, k]), "nvfp4").dequantize()

    def send(bus: tessera.Bus) -> None:
        with bus.register({"q": q, "k": k}, "b", wire={".*": "nvfp4"}) as batch:
            batch.send(timeout=LIMIT)

    def receive(bus: tessera.Bus) -> None:
        fused = np.zeros((64, 32), np.float32)
        parts = [
            tessera.Part("q", local=np.s_[:32], layout="2:S0", shape=(64, 32)),
            tessera.Part("k", local=np.s_[32:], layout="2:S0", shape=(64, 32)),
        ]
        with bus.register({"qk": (fused, "2:S0", (128, 32))}, "b", map={"qk": parts}) as batch:
            batch.recv(timeout=LIMIT)
        own = slice(bus.rank * 32, bus.rank * 32 + 32)
        np.testing.assert_array_equal(fused, np.concatenate([expected[:64][own], expected[64:][own]]))

    run({"trainer": [send], "inference": [receive] * 2})


def test_parts_of_other_dtypes_are_told_apart() -> None:
    sent = {"q": np.zeros((4, 8), np.float32), "k": np.zeros((4, 8), np.float64)}
    parts = [tessera.Part("q", local=np.s_[:4]), tessera.Part("k", local=np.s_[4:])]

    def send(bus: tessera.Bus) -> None:
        bus.register(sent, "b", wire={".*": "mxfp8"}).send(timeout=LIMIT)

    def receive(bus: tessera.Bus) -> None:
        bus.register({"qk": np.zeros((8, 8), np.float32)}, "b", map={"qk": parts}).recv(timeout=LIMIT)

    with pytest.raises(tessera.MismatchError) as error:
        run({"trainer": [send], "inference": [receive]})
    assert "tensors q and k are parts of q and would be quantised as one: 4x8 f32 to mxfp8, 4x8 f64" in str(error.value)
