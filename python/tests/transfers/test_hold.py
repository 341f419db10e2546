"""What a batch keeps alive, and what happens when a tensor is replaced: hold= of register()."""

from __future__ import annotations

import collections
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tessera
from loopback import Loopback, move
from ranks import LIMIT
from tessera.tensor_bus import TensorBusClient

torch = pytest.importorskip("torch")

SIZE = 6


class Exporter:
    """An array of a library that has only DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def of_numpy(value: float, *shape: int, dtype: str = "float32") -> Any:
    return np.full(shape or (SIZE,), value, dtype)


def of_torch(value: float, *shape: int, dtype: str = "float32") -> Any:
    return torch.full(shape or (SIZE,), value, dtype=getattr(torch, dtype))


def of_dlpack(value: float, *shape: int, dtype: str = "float32") -> Any:
    return Exporter(of_numpy(value, *shape, dtype=dtype))


Make = Callable[..., Any]
each_library = pytest.mark.parametrize("make", [of_numpy, of_torch, of_dlpack], ids=["numpy", "torch", "dlpack"])


class Received:
    """A receiver's dict, and what has arrived."""

    def __init__(self) -> None:
        self.tensors = {"w": np.zeros(SIZE, np.float32)}

    @property
    def value(self) -> float:
        assert len(set(self.tensors["w"])) == 1
        return float(self.tensors["w"][0])


def layouts(value: Any) -> list[Any]:
    """Kinds of layouts in a dict."""
    return [value, (value, "1:R"), (value, tessera.Layout("1:R"), (SIZE,))]


# --- strong


@pytest.mark.parametrize("beside", range(3), ids=["tensor", "tensor, layout", "tensor, layout, shape"])
@each_library
def test_a_tensor_that_nobody_else_keeps_is_kept(make: Make, beside: int, loopback: Loopback) -> None:
    received = Received()
    sender, receiver = loopback.batches({"w": layouts(make(3))[beside]}, received.tensors)
    gc.collect()
    with sender, receiver:
        for _ in range(3):
            move(sender, receiver)
        assert received.value == 3


@pytest.mark.parametrize("mode", ["inplace", "staged"])
@pytest.mark.parametrize("beside", range(3), ids=["tensor", "tensor, layout", "tensor, layout, shape"])
@each_library
def test_a_tensor_that_was_replaced_is_sent(make: Make, beside: int, mode: Any, loopback: Loopback) -> None:
    received, weights = Received(), {"w": layouts(make(1))[beside]}
    sender = loopback.trainer.register(weights, f"replaced-{make.__name__}-{beside}-{mode}", mode=mode)
    receiver = loopback.inference.register(received.tensors, sender.name)
    with sender, receiver:
        for value in (1, 2, 3, 3, 4):  # the first ones are located, the others watched
            if value > 1:
                weights["w"] = layouts(make(value))[beside]
            move(sender, receiver)
            assert received.value == value


@each_library
def test_so_is_one_in_a_container_that_was_replaced(make: Make, loopback: Loopback) -> None:
    received = Received()
    received.tensors = {"model.layers.0.1": received.tensors["w"]}
    state: dict[str, Any] = {"model": {"layers": {0: ["a word", make(1)]}}, "step": 1}
    sender, receiver = loopback.batches(state, received.tensors)

    def replace_tensor() -> None:
        state["model"]["layers"][0][1] = make(2)

    def replace_dict() -> None:
        state["model"]["layers"] = {0: [None, make(3)]}

    def replace_list() -> None:
        state["model"]["layers"][0] = [None, make(4)]

    def replace_all() -> None:
        state["model"] = {"layers": {0: [None, make(5)]}}

    with sender, receiver:
        for version, change in enumerate((lambda: None, replace_tensor, replace_dict, replace_list, replace_all), 1):
            change()
            move(sender, receiver)
            assert received.tensors["model.layers.0.1"].tolist() == [version] * SIZE


def test_one_of_another_library_may_take_its_place(loopback: Loopback) -> None:
    received, weights = Received(), {"w": of_numpy(1)}
    sender, receiver = loopback.batches(weights, received.tensors)
    with sender, receiver:
        for value, make in enumerate((of_numpy, of_torch, of_dlpack, of_torch, of_numpy), 1):
            weights["w"] = make(value)
            move(sender, receiver)
            assert received.value == value


@each_library
def test_what_was_replaced_is_let_go(make: Make, loopback: Loopback) -> None:
    received, weights = Received(), {"w": make(1)}
    sender, receiver = loopback.batches(weights, received.tensors)
    with sender, receiver:
        move(sender, receiver)
        old = weakref.ref(weights["w"])
        weights["w"] = make(2)
        gc.collect()
        assert old() is None
        move(sender, receiver)
        assert received.value == 2


def other_dtype(weights: dict[str, Any], make: Make) -> None:
    weights["w"] = make(2, dtype="float64")


def other_shape(weights: dict[str, Any], make: Make) -> None:
    weights["w"] = make(2, SIZE + 1)


def other_layout(weights: dict[str, Any], make: Make) -> None:
    weights["w"] = (make(2), "2:S0")


def other_global_shape(weights: dict[str, Any], make: Make) -> None:
    weights["w"] = (make(2), "1:R", (SIZE, 1))


def removed(weights: dict[str, Any], make: Make) -> None:
    del weights["w"]


def no_tensor(weights: dict[str, Any], make: Make) -> None:
    weights["w"] = 7


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_dtype, "tensor w: its dtype has changed from f32 to f64 since it was registered: close the batch"),
        (other_shape, r"tensor w: its shape has changed from \(6,\) to \(7,\)"),
        (other_layout, "tensor w: its layout has changed from 1:R to 2:S0"),
        (other_global_shape, r"tensor w: its global shape has changed from None to \(6, 1\)"),
        (removed, "tensor w: the dict that was registered has no tensor there any more: put one back, or close"),
        (no_tensor, "tensor w: the dict that was registered has no tensor there any more"),
    ],
)
@each_library
def test_one_that_does_not_fit_is_an_error_before_anything_is_sent(
    make: Make, change: Callable[[dict[str, Any], Make], None], why: str, loopback: Loopback
) -> None:
    received, kept = Received(), np.zeros(SIZE, np.float32)
    received.tensors["kept"] = kept
    weights = {"w": (make(1), "1:R"), "kept": make(1)}
    sender = loopback.trainer.register(weights, f"misfit-{make.__name__}-{change.__name__}")
    receiver = loopback.inference.register(received.tensors, sender.name)
    with sender, receiver:
        move(sender, receiver)
        before = dict(weights)
        change(weights, make)
        weights["kept"] = make(2)
        with pytest.raises(tessera.InvalidArgumentError, match=why):
            sender.send(timeout=LIMIT)
        assert receiver.newest == 1 and received.value == 1 and kept[0] == 1
        weights |= {"w": before["w"]}
        move(sender, receiver)
        assert received.value == 1 and kept[0] == 2


def test_also_before_the_first_send(loopback: Loopback) -> None:
    weights = {"w": of_torch(1)}
    with loopback.register(weights) as batch:
        other_dtype(weights, of_torch)
        with pytest.raises(tessera.InvalidArgumentError, match="tensor w: its dtype has changed"):
            batch.send(timeout=LIMIT)


@pytest.mark.parametrize("make", [of_numpy, of_torch], ids=["numpy", "torch"])
def test_what_is_received_in_place_stays_where_it_is(make: Make, loopback: Loopback) -> None:
    into = {"w": make(0)}
    sender, receiver = loopback.batches({"w": of_numpy(5)}, into)
    with sender, receiver:
        move(sender, receiver)
        kept, into["w"] = into["w"], make(0)
        with pytest.raises(tessera.InvalidArgumentError, match="tensor w: its memory has moved .* close it and regis"):
            receiver.recv(timeout=LIMIT)
        into["w"] = kept
        move(sender, receiver)
    assert set(kept.tolist()) == {5}


@pytest.mark.parametrize("make", [of_numpy, of_torch], ids=["numpy", "torch"])
def test_a_staged_receiver_writes_into_what_is_there_now(make: Make, loopback: Loopback) -> None:
    into = {"w": make(0)}
    sender, receiver = loopback.batches({"w": of_numpy(5)}, into, mode="staged")
    with sender, receiver:
        move(sender, receiver)
        old, into["w"] = into["w"], make(0)
        old[:] = 1
        move(sender, receiver)
    assert set(into["w"].tolist()) == {5} and set(old.tolist()) == {1}


def test_keys_that_are_added_are_not_part_of_the_batch(loopback: Loopback) -> None:
    received, weights = Received(), {"w": of_torch(1)}
    sender, receiver = loopback.batches(weights, received.tensors)
    with sender, receiver:
        weights["another"] = of_torch(1)
        move(sender, receiver)
        assert sender.names == ("w",)


def test_the_dict_may_make_what_it_lacks(loopback: Loopback) -> None:
    """A defaultdict is not made to by looking."""
    weights: Any = collections.defaultdict(lambda: of_torch(9), w=of_torch(1))
    with loopback.register(weights) as batch:
        del weights["w"]
        with pytest.raises(tessera.InvalidArgumentError, match="has no tensor there any more"):
            batch.send(timeout=LIMIT)
        assert "w" not in weights


def test_a_state_dict_keeps_the_memory_it_shows(loopback: Loopback) -> None:
    """It is its own owner of the storages: a parameter that is given other memory is not followed, the module is."""
    model, received = torch.nn.Linear(SIZE, 1, bias=False), np.zeros((1, SIZE), np.float32)
    torch.nn.init.constant_(model.weight, 1)
    sender, receiver = loopback.batches(model.state_dict(), {"weight": received})
    with sender, receiver:
        move(sender, receiver)
        model.weight.data.fill_(2)
        move(sender, receiver)
        assert received[0, 0] == 2
        model.weight.data = torch.full((1, SIZE), 3.0)
        move(sender, receiver)
        assert received[0, 0] == 2


def test_storage_that_was_freed_by_resizing_is_refused(loopback: Loopback) -> None:
    weights = {"w": of_torch(1)}
    with loopback.register(weights) as batch:
        weights["w"].untyped_storage().resize_(8)
        with pytest.raises(tessera.InvalidArgumentError, match="tensor w: its storage has 8 bytes, and it needs 24"):
            batch.send(timeout=LIMIT)


# --- weak


@each_library
def test_weakly_nothing_is_kept(make: Make, loopback: Loopback) -> None:
    weights = {"w": make(1), "beside": (make(1), "1:R")}
    alive = [weakref.ref(weights["w"]), weakref.ref(weights["beside"][0])]
    with loopback.trainer.register(weights, f"weak-{make.__name__}", hold="weak") as batch:
        weights.clear()
        gc.collect()
        assert [each() for each in alive] == [None, None]
        with pytest.raises(tessera.InvalidArgumentError, match=r"tensor w: it(s memory)? was freed; .*hold='strong'"):
            batch.send(timeout=LIMIT)


@each_library
def test_weakly_the_tensors_are_those_that_were_registered(make: Make, loopback: Loopback) -> None:
    received, weights = Received(), {"w": make(1)}
    sender, receiver = loopback.batches(weights, received.tensors, "weak")
    with sender, receiver:
        kept, weights["w"] = weights["w"], make(2)
        move(sender, receiver)
        assert received.value == 1
        del kept


def test_a_module_may_go(loopback: Loopback) -> None:
    model = torch.nn.Linear(SIZE, 1)
    there = weakref.ref(model)
    with loopback.register(model, hold="weak") as batch:
        del model
        gc.collect()
        assert there() is None
        with pytest.raises(tessera.InvalidArgumentError, match="tensor weight: its memory was freed"):
            batch.send(timeout=LIMIT)


def test_what_knows_no_weak_references_cannot_be_held_so(loopback: Loopback) -> None:
    class Slotted:
        __slots__ = ("_array",)
        __init__ = Exporter.__init__
        __dlpack__ = Exporter.__dlpack__
        __dlpack_device__ = Exporter.__dlpack_device__

    with pytest.raises(tessera.InvalidArgumentError, match="tensor w: a .*Slotted cannot be held weakly"):
        loopback.register({"w": Slotted(of_numpy(1))}, hold="weak")


@pytest.mark.parametrize("hold", ["strongly", None, 1, ["weak"]])
def test_hold_is_one_of_two(hold: Any, loopback: Loopback) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match="hold .*: 'strong' and 'weak' are possible"):
        loopback.register({"w": of_numpy(1)}, hold=hold)


# --- a list of tensors


@pytest.mark.parametrize("hold", ["strong", "weak"])
def test_a_client_keeps_what_its_list_has(hold: Any) -> None:
    sent = []

    def work(role: str, peer: str, tensors: list[Any], done: Callable[[Any], None]) -> None:
        with TensorBusClient(agent_rank=0, namespace=f"client-{hold}") as client:
            client.init_pair("weights", role, peer, 1)
            handler = client.register_tensors("policy", [(each, "weights") for each in tensors], hold=hold)
            if hold == "strong":
                tensors.clear()
            done(handler)

    into = [of_numpy(0), of_torch(0)]
    kept = list(into)
    trainer = threading.Thread(
        target=work,
        args=(
            "trainer",
            "inference",
            [of_numpy(1), of_torch(2)],
            lambda handler: sent.append(handler.transfer("send")),
        ),
    )
    trainer.start()
    work("inference", "trainer", into, lambda handler: handler.transfer("recv"))
    trainer.join(LIMIT)
    assert sent and [each.tolist()[0] for each in kept] == [1, 2]
