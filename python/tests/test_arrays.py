"""NumPy arrays, and arrays of any library with DLPack: their memory layouts, and what is refused by name."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import tessera
from loopback import Loopback, move

ml_dtypes = pytest.importorskip("ml_dtypes")


def counted(shape: tuple[int, ...] = (3, 4), dtype: Any = numpy.float32) -> numpy.ndarray[Any, Any]:
    return numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape).astype(dtype)


class Exporter:
    """An array of a library that only supports DLPack 1.0."""

    def __init__(self, array: numpy.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class OldExporter(Exporter):
    """A library with DLPack 0.8, which cannot say that memory is writable."""

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__(stream=stream)


class OnGpu(Exporter):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1


class Broken(Exporter):
    def __dlpack__(self, **_: Any) -> Any:
        raise ValueError("it is being moved")


class Silent:
    """Only half of the DLPack interface."""

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("not asked")


def unaligned(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """A copy that begins at an odd address."""
    room = numpy.zeros(array.nbytes + 2, numpy.uint8)
    start = 1 - room.ctypes.data % 2
    made = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[:] = array
    assert made.ctypes.data % 2
    return made


def a_field() -> numpy.ndarray[Any, Any]:
    records = numpy.zeros((3, 4), dtype=[("noise", "i4"), ("value", "f4")])
    records["value"] = counted()
    return records["value"]


LAID_OUT = {
    "rows": lambda: counted(),
    "columns": lambda: numpy.asfortranarray(counted()),
    "transposed": lambda: counted((4, 3)).T,
    "every second": lambda: counted((3, 8))[:, ::2],
    "a window": lambda: counted((9, 9))[2:5, 1:5],
    "unaligned": lambda: unaligned(counted()),
    "a field of records": a_field,
    "a matrix": lambda: counted().view(numpy.matrix),
    "DLPack": lambda: Exporter(counted()),
    "DLPack, columns": lambda: Exporter(numpy.asfortranarray(counted())),
}


def seen(value: Any) -> numpy.ndarray[Any, Any]:
    return value.array if isinstance(value, Exporter) else numpy.asarray(value)


@pytest.mark.parametrize("source", LAID_OUT)
@pytest.mark.parametrize("target", LAID_OUT)
def test_memory_of_every_shape(source: str, target: str, loopback: Loopback) -> None:
    sent, taken = LAID_OUT[source](), LAID_OUT[target]()
    expected = seen(sent).copy()
    seen(taken)[...] = -1
    loopback.transfer({"w": sent}, {"w": taken})
    numpy.testing.assert_array_equal(seen(taken), expected)


def test_what_lies_between_elements_is_not_touched(loopback: Loopback) -> None:
    room = numpy.full((6, 8), -1, numpy.float32)
    loopback.transfer({"w": counted()}, {"w": room[::2, 1::2]})
    assert (room[::2, 1::2] == counted()).all()
    room[::2, 1::2] = -1
    assert (room == -1).all()


DTYPES = [
    *("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: numpy.dtype(dtype).name)
def test_every_dtype_that_numpy_has(dtype: Any, loopback: Loopback) -> None:
    size = numpy.dtype(dtype).itemsize
    count = numpy.arange(15 * size) % (2 if dtype == "?" else 251)
    sent = count.astype(numpy.uint8).view(dtype).reshape(3, 5)
    taken = numpy.zeros((3, 5), dtype)
    loopback.transfer({"w": sent}, {"w": taken})
    assert taken.tobytes() == sent.tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 3), (1, 1, 1), (2, 1, 3, 1, 2)])
def test_few_elements_and_many_dims(shape: tuple[int, ...], loopback: Loopback) -> None:
    sent, taken = numpy.full(shape, 7, numpy.float32), numpy.zeros(shape, numpy.float32)
    loopback.transfer({"w": sent, "other": counted()}, {"w": taken, "other": counted()})
    assert taken.tobytes() == sent.tobytes()


def test_directions_in_which_nobody_walks_do_not_matter(loopback: Loopback) -> None:
    taken = numpy.zeros((1, 4), numpy.float32)[::-1]
    loopback.transfer({"w": counted((1, 4))[::-1], "none": counted((0, 4))[::-1]}, {"w": taken})
    assert (taken == counted((1, 4))).all()


def test_arrays_with_layouts_of_their_own(loopback: Loopback) -> None:
    taken = counted((4, 3)) * 0
    loopback.transfer({"w": (counted((4, 3)), "dp=1:S0", (4, 3)), "b": (counted(), "1:R")}, {"w": taken})
    assert (taken == counted((4, 3))).all()


# --- refusals

REFUSED = {
    "backwards": (
        lambda: counted()[::-1],
        r"it runs backwards in memory \(shape \(3, 4\), strides \(-4, 1\)\): copy it",
    ),
    "broadcast": (
        lambda: numpy.broadcast_to(counted((1, 4)), (3, 4)),
        "it is expanded .*clone it, or register what was",
    ),
    "overlapping": (
        lambda: numpy.lib.stride_tricks.sliding_window_view(counted((6,)), 3),
        r"its elements overlap in memory \(shape \(4, 3\), strides \(1, 1\)\): clone it",
    ),
    "big-endian": (lambda: counted().astype(">f4"), r"not in this machine's byte order \(>f4\): register array.astype"),
    "records": (
        lambda: numpy.zeros(3, dtype=[("a", "f4"), ("b", "i4")]),
        r"its elements are records: register its fields \(a, b\)",
    ),
    "a field that straddles": (
        lambda: numpy.zeros(3, dtype=[("a", "f4"), ("b", "i1")])["a"],
        r"its strides \(5,\) are not whole elements of 4 bytes: copy it",
    ),
    "masked": (lambda: numpy.ma.masked_array(counted(), counted() > 3), "a masked array .* register its .data"),
    "objects": (lambda: numpy.array([None]), r"dtype dtype\('O'\) is not one that Tessera moves: f64.*; cast it"),
    "strings": (lambda: numpy.array(["a"]), r"dtype dtype\('<U1'\) is not one"),
    "dates": (lambda: numpy.zeros(3, "M8[s]"), r"dtype dtype\('<M8\[s\]'\) is not one"),
    "complex128": (lambda: numpy.zeros(3, complex), r"dtype dtype\('complex128'\) is not one .*; cast it"),
    "longdouble": (lambda: numpy.zeros(3, numpy.longdouble), "is not one that Tessera moves"),
    "int4": (lambda: numpy.zeros(3, ml_dtypes.int4), r"dtype\(int4\) is not one"),
    "broken DLPack": (
        lambda: Broken(counted()),
        "NumPy cannot read what a .*Broken exports by DLPack: it is being moved",
    ),
    "half of DLPack": (Silent, r"a .*Silent does not say on which device it is \(__dlpack_device__\)"),
    "a layout that is none": (lambda: (counted(), 5), r"layout 5: give a tessera.Layout.*; give \(tensor, layout\) or"),
    "a shape that is none": (
        lambda: (counted(), "1:S0", 7),
        r"give \(tensor, layout\) or \(tensor, layout, global shape\)",
    ),
    "another local shape": (
        lambda: (counted((5, 4)), "1:S0", (3, 4)),
        r"1:S0 gives rank 0 \(3, 4\) of a tensor of shape \(3, 4\); what it holds is \(5, 4\)",
    ),
    "a layout that does not fit": (lambda: (counted(), "1:S2", (3, 4)), "there is no dim 2 among 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_moved_is_refused_by_name(case: str, loopback: Loopback) -> None:
    make, why = REFUSED[case]
    with pytest.raises(tessera.InvalidArgumentError, match=f"tensor model.w: .*(?:{why})") as caught:
        loopback.register({"model": {"w": make()}})
    assert "[0" not in str(caught.value), "an error does not print elements"


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_small_floats_do_not_come_by_dlpack_alone(dtype: str, loopback: Loopback) -> None:
    """NumPy's reader of DLPack does not know them: the guide says what to do."""
    torch = pytest.importorskip("torch")

    class Foreign(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            return torch.zeros(4, dtype=torch.uint8).view(getattr(torch, dtype)).__dlpack__(**options)

    with pytest.raises(
        tessera.InvalidArgumentError,
        match=r"tensor w: NumPy cannot read what a .*Foreign exports by DLPack: .*; register a NumPy array of",
    ):
        loopback.register({"w": Foreign(counted())})


def test_other_devices_are_not_built(loopback: Loopback) -> None:
    with pytest.raises(
        tessera.UnimplementedError, match=r"tensor w: a .*OnGpu is on device 1 of DLPack's type 2; .*copy"
    ):
        loopback.register({"w": OnGpu(counted())})


def frozen() -> numpy.ndarray[Any, Any]:
    array = counted()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (frozen, "the array is read-only and cannot be received into: register one that can be written"),
        (lambda: Exporter(frozen()), "the array is read-only"),
        (
            lambda: OldExporter(counted()),
            "the array is read-only and cannot be received into (a test_arrays.OldExporter",
        ),
    ],
)
def test_what_is_read_only_can_be_sent_and_not_received(make: Any, why: str, loopback: Loopback) -> None:
    taken = counted() * 0
    loopback.transfer({"w": make()}, {"w": taken})
    assert (taken == counted()).all()
    sender, receiver = loopback.batches({"w": counted()}, {"w": make()})
    with sender, receiver, pytest.raises(tessera.InvalidArgumentError, match=re.escape(f"tensor w: {why}")):
        receiver.recv(timeout=5)


def test_what_is_no_tensor_is_skipped_and_listed(loopback: Loopback) -> None:
    state = {
        "w": counted(),
        "step": 3,
        "loss": numpy.float32(2.5),  # a number, though NumPy's
        "kind": numpy.ndarray,
        "nothing": None,
        "betas": (0.9, 0.999),
        "groups": [{"lr": 0.1}],
        "nested": {"b": counted(), "name": "adam", "deeper": {"c": counted()}},
        "listed": [counted(), "text", (counted(), "1:R")],
        "both": (counted(), counted()),
    }
    with loopback.register(state) as batch:
        assert set(batch.names) == {"w", "nested.b", "nested.deeper.c", "listed.0", "listed.2", "both.0", "both.1"}
        assert set(batch.skipped) == {
            *("step", "loss", "kind", "nothing", "betas", "groups"),
            *("nested.name", "listed.1"),
        }


def test_two_tensors_of_one_name_are_refused(loopback: Loopback) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=r"tensor a\.b: two tensors have that name"):
        loopback.register({"a": {"b": counted()}, "a.b": counted()})


def test_only_dicts_and_modules_can_be_registered(loopback: Loopback) -> None:
    with pytest.raises(
        tessera.InvalidArgumentError, match=r"a builtins\.list cannot be registered: give a torch module or"
    ):
        loopback.register([counted()])


def test_a_batch_keeps_its_arrays(loopback: Loopback) -> None:
    taken = counted() * 0
    sender, receiver = loopback.batches({"w": counted()}, {"w": taken})
    with sender, receiver:
        assert move(sender, receiver) == 1
    assert (taken == counted()).all()
