"""Mistaken arguments: each is refused with an error of ours that names the argument."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback, move
from ranks import LIMIT
from tessera import InvalidArgumentError, Part
from tessera.tensor_bus import TensorBusClient

SURROGATE = "\udc80"
LAYOUT = tessera.Layout("2:S0")
PLAN = tessera.plan((4,), "f32", "1:R", "1:R")

# Wrong values by the expected type of the argument.
TEXT = [5, 2.5, b"x", ["x"], SURROGATE, object()]
PEERS = [*(bad for bad in TEXT if bad != ["x"]), [], [5], [SURROGATE]]
NAMES = ["", "(", "two words", "a/b", "a\0b", "n" * 65]
WHOLE = [2.5, "x", 2**70, -(2**70), math.inf, math.nan, [], "", SURROGATE, np.float64(2), float]
SECONDS = [-1, -0.001, math.inf, -math.inf, math.nan, 2**70, "x", "", [], True, SURROGATE, 30 * 24 * 3600 + 1]
FLAG = [None, 5, 2.5, "x", [], 0]
SHAPE = ["x", [1.5], [2**70], ["x"], [None], (4.0, 4), SURROGATE]
SIZES = [*SHAPE, [-1]]
PATTERN = ["(", "a{2,1}", SURROGATE, 5, b"x", ["("], [5], [SURROGATE]]
CHOICE = [None, 5, "x", "", SURROGATE, [], ["send"]]
INDEX = [2.5, "x", [], {}, (1.5,), slice("a"), slice(None, None, 0.5), True, SURROGATE]
LIKE_LAYOUT = [5, 2.5, "x", "2:", "2:Q", SURROGATE, [], (), (1, 2), (LAYOUT.mesh, 5), (LAYOUT.mesh, "S0"), object()]


def weights() -> dict[str, Any]:
    return {"w": np.zeros((4, 4), np.float32)}


Call = Callable[[Any, "Sides"], Any]


class Sides:
    """The objects that calls are made on."""

    def __init__(self, loopback: Loopback) -> None:
        self.bus = loopback.trainer
        self.sender, self.receiver = loopback.batches(weights(), weights())
        move(self.sender, self.receiver)
        self.client = TensorBusClient(0, namespace="hostile")

    def register(self, tensors: Any = None, **options: Any) -> None:
        self.bus.register(weights() if tensors is None else tensors, "hostile", **options)


@pytest.fixture(scope="module")
def sides(loopback: Loopback) -> Iterator[Sides]:
    made = Sides(loopback)
    yield made
    made.sender.close()
    made.receiver.close()
    made.client.close()


def connect(**options: Any) -> Any:
    return tessera.connect(
        **{
            "pair": "p",
            "role": "r",
            "peer": "q",
            "rank": 0,
            "world": 1,
            "namespace": "hostile",
            "timeout": 0.01,
            **options,
        }
    )


def option(name: str) -> Call:
    return lambda bad, sides: sides.register(**{name: bad})


def connecting(name: str) -> Call:
    return lambda bad, sides: connect(**{name: bad})


def part(name: str) -> Call:
    return lambda bad, sides: Part("x", **{name: bad})


def pairing(name: str) -> Call:
    given = {"pair_name": "p", "local_name": "r", "remote_name": "q", "expected_world_size": 1, "timeout": 0.01}
    return lambda bad, sides: sides.client.init_pair(**{**given, name: bad})


def engine(field: str) -> Call:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, "vocab_size": 10}
    return lambda bad, sides: tessera.maps.engine({**config, field: bad}, 0, 1)


def quantizing(name: str) -> Call:
    return lambda bad, sides: tessera.quantize(np.ones((16, 16), np.float32), "nvfp4", **{name: bad})


# The call, the expected type of its argument, and the words of the error that name it.
CALLS: dict[str, tuple[Call, list[Any], str]] = {
    # connect()
    **{f"connect {name}": (connecting(name), TEXT, f"{name} ") for name in ("pair", "role")},
    "connect peer": (connecting("peer"), PEERS, "peer"),
    **{f"connect {name}": (connecting(name), TEXT, f"{name} ") for name in ("store", "namespace", "agent")},
    "connect rank": (connecting("rank"), WHOLE, "rank "),
    "connect world": (connecting("world"), WHOLE, "world "),
    "connect threads": (connecting("threads"), [*WHOLE, -1, 1025, None], "threads "),
    "connect timeout": (connecting("timeout"), SECONDS, "timeout "),
    "connect layout": (connecting("layout"), LIKE_LAYOUT, ""),
    # register()
    "tensors": (lambda bad, sides: sides.register(bad), [5, "x", [], object(), 2.5], "cannot be registered"),
    "a layout beside": (lambda bad, sides: sides.register({"w": (weights()["w"], bad)}), LIKE_LAYOUT, "tensor w: "),
    "a shape beside": (
        lambda bad, sides: sides.register({"w": (weights()["w"], "1:R", bad)}),
        [*SIZES, 5, 2.5, (4, 4, 2.0)],
        "tensor w: global shape",
    ),
    "a name": (lambda bad, sides: sides.register({bad: weights()["w"]}), [SURROGATE, f"a{SURROGATE}"], "surrogate"),
    "batch": (lambda bad, sides: sides.bus.register(weights(), bad), [*TEXT, *NAMES], "batch "),
    "mode": (option("mode"), CHOICE, "mode .*'inplace' and 'staged'"),
    "direction": (option("direction"), CHOICE[1:], "direction .*'send' and 'recv'"),
    "hold": (option("hold"), CHOICE, "hold .*'strong' and 'weak'"),
    "only": (option("only"), PATTERN, "only "),
    "ignore": (option("ignore"), PATTERN, "ignore "),
    "missing_ok": (option("missing_ok"), FLAG, "missing_ok "),
    "pinned": (option("pinned"), FLAG, "pinned "),
    "delta": (option("delta"), FLAG, "delta "),
    "snapshots": (
        option("snapshots"),
        [*WHOLE, 1, 9, -1, True],
        "snapshots .*from 2 to 8|snapshots .*whole number",
    ),
    "timeout": (option("timeout"), SECONDS, "timeout "),
    "grace": (option("grace"), SECONDS, "grace "),
    "map": (option("map"), [5, "x", [], object()], "map "),
    "a key of map": (lambda bad, sides: sides.register(map={bad: "x"}), ["(", SURROGATE, 5, b"x"], "map: key "),
    "a value of map": (lambda bad, sides: sides.register(map={"w": bad}), [5, [5], SURROGATE, "", [b"x"]], "map|Part"),
    "wire": (option("wire"), [5, "fp4", "", SURROGATE, [], object()], "wire"),
    "a key of wire": (lambda bad, sides: sides.register(wire={bad: "nvfp4"}), ["(", SURROGATE, 5], "wire: key "),
    "a value of wire": (lambda bad, sides: sides.register(wire={"w": bad}), [5, "fp4", SURROGATE, []], "wire: 'w'"),
    "Part": (lambda bad, sides: Part(bad), [*TEXT, ""], "Part"),
    **{f"Part {name}": (part(name), INDEX, f"part x: {name}") for name in ("local", "whole", "source")},
    "Part shape": (part("shape"), [*SIZES, 5], "part x: shape"),
    "Part layout": (part("layout"), LIKE_LAYOUT, ""),
    "manifest": (lambda bad, sides: sides.bus.manifest(bad, 0.01), TEXT, "batch "),
    "manifest timeout": (lambda bad, sides: sides.bus.manifest("b", bad), SECONDS, "timeout "),
    # transfers
    "send": (lambda bad, sides: sides.sender.send(bad, timeout=1), WHOLE, "version "),
    "recv": (lambda bad, sides: sides.receiver.recv(bad, timeout=1), WHOLE, "min_version "),
    "stage": (lambda bad, sides: sides.receiver.stage(bad, timeout=1), WHOLE, "min_version "),
    "wait_version": (lambda bad, sides: sides.receiver.wait_version(bad, 1), [*WHOLE, None], "version "),
    "send timeout": (lambda bad, sides: sides.sender.send(timeout=bad), SECONDS, "timeout "),
    "recv timeout": (lambda bad, sides: sides.receiver.recv(timeout=bad), SECONDS, "timeout "),
    "wait_version timeout": (lambda bad, sides: sides.receiver.wait_version(9, bad), SECONDS, "timeout "),
    # the client
    "agent_rank": (lambda bad, sides: TensorBusClient(bad), [*WHOLE, -1, None], "agent_rank "),
    "client store": (lambda bad, sides: TensorBusClient(0, store=bad), TEXT, "store "),
    **{f"init {name}": (pairing(name), [*TEXT, None], f"{name} ") for name in ("pair_name", "local_name")},
    "expected_world_size": (pairing("expected_world_size"), [*WHOLE, 0, -1, None], "expected_world_size "),
    "init remote_name": (pairing("remote_name"), [*PEERS, None], "remote_name"),
    "init timeout": (pairing("timeout"), SECONDS, "timeout "),
    "client tensors": (lambda bad, sides: sides.client.register_tensors("b", bad), [5, "x", None, 2.5], "tensors "),
    "client pairs": (
        lambda bad, sides: sides.client.register_tensors("b", [bad]),
        [5, (1,), "xy", (1, 2)],
        "tensors: ",
    ),
    "batch_id": (lambda bad, sides: sides.client.register_tensors(bad, []), [*TEXT, *NAMES, None], "batch_id "),
    "client timeout": (lambda bad, sides: sides.client.register_tensors("b", [], bad), SECONDS, "timeout "),
    # values
    "Mesh": (lambda bad, sides: tessera.Mesh(bad), [*SIZES, 5, None, [2**31]], "Mesh: shape|mesh|axis"),
    "Mesh names": (lambda bad, sides: tessera.Mesh((1,), bad), [5, "x", [5], [SURROGATE]], "Mesh: names"),
    "Mesh ranks": (lambda bad, sides: tessera.Mesh((1,), ranks=bad), [*SHAPE, 5], "Mesh: ranks"),
    "coordinate": (lambda bad, sides: LAYOUT.mesh.coordinate(bad), [*WHOLE, None], "rank "),
    "Shard": (lambda bad, sides: tessera.Shard(bad), [*WHOLE, None, True], "Shard: dim"),
    "StridedShard": (lambda bad, sides: tessera.StridedShard(0, bad), [*WHOLE, None], "StridedShard: split_factor"),
    "RaggedShard": (lambda bad, sides: tessera.RaggedShard(0, bad), [*SHAPE, 5, None], "RaggedShard: bounds"),
    "Partial": (lambda bad, sides: tessera.Partial(bad), [*TEXT, "median", None], "Partial"),
    "Layout": (lambda bad, sides: tessera.Layout(bad), [5, None, "2:Q", "", SURROGATE, b"x"], ""),
    "Layout mesh": (lambda bad, sides: tessera.Layout(bad, []), [5, None, "x"], "mesh "),
    "Layout placements": (
        lambda bad, sides: tessera.Layout(LAYOUT.mesh, bad),
        [5, None, "S", [5], ["S0"]],
        "placement",
    ),
    "bind": (lambda bad, sides: LAYOUT.bind(bad), [*SHAPE, 5, None], "shape "),
    "shifted": (lambda bad, sides: LAYOUT.shifted(bad), [*WHOLE, None], "offset "),
    "with_ranks": (lambda bad, sides: LAYOUT.with_ranks(bad), [*SHAPE, 5, None], "ranks "),
    "local_shape": (lambda bad, sides: LAYOUT.local_shape(bad, 0), [*SHAPE, 5, None], "shape "),
    "local_shape rank": (lambda bad, sides: LAYOUT.local_shape((4,), bad), [*WHOLE, None], "rank "),
    "owned": (lambda bad, sides: LAYOUT.owned(bad, 0), [*SHAPE, 5, None], "shape "),
    "layout_of": (lambda bad, sides: tessera.layout_of(bad), [5, None, "x"], "has no layout of its own"),
    "AmaxHistory": (lambda bad, sides: tessera.AmaxHistory(bad), [*WHOLE, None, 0, -1], "history|AmaxHistory"),
    "push": (lambda bad, sides: tessera.AmaxHistory(3).push(bad), [None, "x", [], math.nan, -1], "amax"),
    # plans, memory, formats, maps
    "plan": (lambda bad, sides: tessera.plan(bad, "f32", "1:R", "1:R"), [*SIZES, 5, None], "shape "),
    "plan dtype": (
        lambda bad, sides: tessera.plan((4,), bad, "1:R", "1:R"),
        [5, "x", SURROGATE, [], {}, object()],
        "dtype",
    ),
    "plan src": (lambda bad, sides: tessera.plan((4,), "f32", bad, "1:R"), LIKE_LAYOUT, ""),
    "simulate": (lambda bad, sides: tessera.simulate(bad, {}), [5, None, "x"], "simulate"),
    "simulate arrays": (lambda bad, sides: tessera.simulate(PLAN, bad), [5, None, "x", []], "simulate"),
    "simulate ranks": (
        lambda bad, sides: tessera.simulate(PLAN, {bad: np.zeros(4, np.float32)}),
        ["x", 2.5, 2**70],
        "rank",
    ),
    "zeros": (lambda bad, sides: tessera.zeros(bad), [*SIZES, None, 2.5, 2**70], "shape "),
    "zeros dtype": (lambda bad, sides: tessera.zeros(3, bad), [5, "x", SURROGATE, [], {}, object()], "dtype"),
    "share_": (lambda bad, sides: tessera.share_(bad), [5, None, "x", []], "share_"),
    "quantize": (lambda bad, sides: tessera.quantize(bad, "mxfp8"), [5, None, "x", [], {}], "given to quantize"),
    "quantize format": (lambda bad, sides: tessera.quantize(weights()["w"], bad), [*TEXT, None, "fp4"], "format"),
    "hadamard": (quantizing("hadamard"), FLAG, "hadamard "),
    "rounding": (quantizing("rounding"), CHOICE, "rounding"),
    "seed": (quantizing("seed"), [5, -1, 2**70, "x"], "seed="),
    "eps": (quantizing("eps"), [None, "x", [], 2**5000], "eps="),
    "planes": (quantizing("planes"), [None, 5, "x", [], ["row", "x"], SURROGATE], "planes "),
    "amax=": (quantizing("amax"), ["x", [], [1, 2], {}, {"row": 1}], "amax"),
    "amax": (lambda bad, sides: tessera.amax(bad), [5, None, "", "x", {}, [5]], "given to amax"),
    "maps.transformers": (lambda bad, sides: tessera.maps.transformers(bad), [5, None, "x", []], "config "),
    "maps.engine": (lambda bad, sides: tessera.maps.engine(bad, 0, 1), [5, None, "x", []], "config "),
    **{
        f"maps.engine {field}": (engine(field), [2.5, "x", -1, 2**70, []], f"config: {field}")
        for field in ("num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "num_experts")
    },
    "tp_size": (
        lambda bad, sides: tessera.maps.engine({"num_attention_heads": 4, "hidden_size": 8, "vocab_size": 8}, 0, bad),
        [*WHOLE, 0, -1, None],
        "tp_size ",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_does_not_fit_is_refused_by_name(call: str, sides: Sides) -> None:
    function, values, words = CALLS[call]
    for bad in values:
        with pytest.raises(InvalidArgumentError, match=words):
            function(bad, sides)
    assert sides.bus._batches.keys() == {sides.sender.name}
    assert not sides.client._pairs and not sides.client._handlers


def test_infinity_is_refused_with_the_reason() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"timeout inf: every wait has a deadline: give seconds, 0 to 2592000"
    ):
        connect(timeout=math.inf)


def test_numbers_of_numpy_are_numbers(loopback: Loopback) -> None:
    with loopback.trainer.register(
        weights(), "numpy-numbers", snapshots=np.int64(3), pinned=np.bool_(True), timeout=np.float32(2.5)
    ) as batch:
        assert batch.names == ("w",)
    assert tessera.Shard(np.int32(1)) == tessera.Shard(1)
    assert LAYOUT.local_shape(np.array([4, 2]), np.uint8(0)) == (2, 2)


def test_a_mesh_contains_no_words() -> None:
    assert 0 in LAYOUT.mesh
    for other in ("x", None, 2.5, 2**70, SURROGATE):
        assert other not in LAYOUT.mesh


# --- containers


def test_a_dict_that_contains_itself_is_refused(loopback: Loopback) -> None:
    inner: dict[str, Any] = weights()
    inner["deeper"] = {"again": inner}
    listed: dict[str, Any] = {"many": [np.zeros(2)]}
    listed["many"].append(listed["many"])
    for tensors, where in (({"model": inner}, "model.deeper.again"), (inner, "deeper.again"), (listed, "many.1")):
        with pytest.raises(InvalidArgumentError, match=f"{where} is a (dict|list) that contains itself"):
            loopback.register(tensors)


def test_one_dict_in_two_places_contains_nothing_twice(loopback: Loopback) -> None:
    once = weights()
    with loopback.register({"a": once, "b": once}) as batch:
        assert batch.names == ("a.w", "b.w")


def test_dicts_may_be_nested_as_deep_as_they_like(loopback: Loopback) -> None:
    deep: dict[str, Any] = weights()
    for _ in range(5000):
        deep = {"d": deep}
    with loopback.register(deep) as batch:
        assert batch.names == ("d." * 5000 + "w",)


# --- one format for all


def test_one_wire_format_is_for_all_that_it_fits(loopback: Loopback) -> None:
    given = {
        "matrix": np.linspace(-1, 1, 32 * 32, dtype=np.float32).reshape(32, 32),
        "bias": np.linspace(-1, 1, 32, dtype=np.float32),
        "steps": np.arange(4, dtype=np.int64),
    }
    taken = {name: np.zeros_like(each) for name, each in given.items()}
    sender = loopback.trainer.register(given, "one-format", wire="nvfp4")
    receiver = loopback.inference.register(taken, "one-format")
    with sender, receiver:
        move(sender, receiver)
        assert receiver.stats.quantized_elements == 32 * 32
    expected = tessera.quantize(given["matrix"], "nvfp4", planes="row").dequantize()
    np.testing.assert_array_equal(taken["matrix"], expected)
    np.testing.assert_array_equal(taken["bias"], given["bias"])
    np.testing.assert_array_equal(taken["steps"], given["steps"])


# --- torch


def test_script_modules_are_refused_with_the_way_out(loopback: Loopback) -> None:
    torch = pytest.importorskip("torch")
    scripted = torch.jit.script(torch.nn.Linear(3, 2))
    holder = torch.nn.Sequential(torch.nn.ReLU(), scripted)
    for module, where in ((scripted, r"\(the model\)"), (holder, "1")):
        for call in (loopback.register, tessera.share_):
            with pytest.raises(
                InvalidArgumentError, match=f"module {where}: a ScriptModule .* register its state_dict"
            ):
                call(module)
    into = torch.nn.Linear(3, 2)
    sender, receiver = loopback.batches(scripted.state_dict(), into)
    sent = threading.Thread(target=sender.send, kwargs={"timeout": LIMIT})
    with sender, receiver:
        sent.start()
        receiver.recv(timeout=LIMIT)
        sent.join(LIMIT)
    assert torch.equal(into.weight, scripted.weight)
