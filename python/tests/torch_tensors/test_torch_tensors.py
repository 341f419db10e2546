"""torch's tensors: what is accepted, where its memory is, what is refused and how the error helps."""

from __future__ import annotations

import re
import unittest.mock
from typing import Any

import pytest
import tessera
import torch
from loopback import Loopback
from tessera._tensors.tensors import source_of
from torch._subclasses.fake_tensor import FakeTensorMode


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


class Plain(torch.Tensor):
    """A subclass that only has methods of its own."""


class Dispatching(torch.Tensor):
    """A subclass that intercepts every operation, and may give it any meaning."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return function(*arguments, **(options or {}))


class Wrapping(Dispatching):
    """A subclass whose elements are elsewhere."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)


class Attributed(torch.nn.Parameter):
    """Like an engine's parameters, which know how they are loaded."""

    def __new__(cls, data: torch.Tensor, loader: Any = None) -> Attributed:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, loader: Any = None) -> None:
        self.loader = loader


class Switched(torch.Tensor):
    """One that gives plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class HandingOn(Attributed):
    """One that hands on to torch what is done with it, and that says so by its name: vLLM's parameters do."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return super().__torch_function__(function, types, arguments, options or {})


class OfVllm(HandingOn):
    pass


HandingOn.__module__, HandingOn.__qualname__ = "vllm.model_executor.parameter", "BasevLLMParameter"


class Quantised(torch.nn.Parameter):
    """A subclass with packed elements that stand for others."""

    scale = 0.5

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*(each * cls.scale if isinstance(each, cls) else each for each in arguments))


class Derived(Quantised):
    """Derived from one of those."""


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return counted(3, 4)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def in_vmap(bus: Loopback) -> None:
    torch.vmap(lambda row: bus.register({"w": row}) and row)(counted(3, 4))


# --- taken

TAKEN = {
    "plain": lambda: counted(3, 4),
    "transposed": lambda: counted(4, 3).t(),
    "every second": lambda: counted(3, 8)[:, ::2],
    "a window": lambda: counted(9, 9)[2:5, 1:5],
    "channels last": lambda: counted(1, 3, 2, 2).to(memory_format=torch.channels_last).reshape(3, 4),
    "a parameter": lambda: torch.nn.Parameter(counted(3, 4)),
    "requires grad": lambda: counted(3, 4).requires_grad_(),
    "no leaf": lambda: counted(3, 4).requires_grad_() * 1,
    "inference": inference,
    "a buffer": lambda: torch.nn.Buffer(counted(3, 4)),
    "a subclass": lambda: counted(3, 4).as_subclass(Plain),
    "an engine's parameter": lambda: Attributed(counted(3, 4), loader=len),
    "a parameter of vLLM": lambda: OfVllm(counted(3, 4)),
    "a subclass that torch does not ask": lambda: counted(3, 4).as_subclass(Switched),
    "shared": lambda: counted(3, 4).share_memory_(),
    "from NumPy": lambda: torch.from_numpy(counted(3, 4).numpy()),
}


@pytest.mark.parametrize("source", TAKEN)
def test_what_is_taken(source: str, loopback: Loopback) -> None:
    sent, taken = TAKEN[source](), TAKEN[source]()
    expected = sent.detach().clone()
    with torch.inference_mode():
        taken.fill_(-1)
    loopback.transfer({"w": sent}, {"w": taken})
    assert torch.equal(taken.detach(), expected)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 3), (1, 1, 1), (2, 1, 3, 1, 2)])
def test_few_elements_and_many_dims(shape: tuple[int, ...], loopback: Loopback) -> None:
    sent, taken, other = torch.full(shape, 2.5), torch.zeros(shape), counted(2)
    loopback.transfer({"w": sent, "other": other}, {"w": taken, "other": other + 0.0})
    assert torch.equal(taken, sent)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_moves_bit_by_bit(dtype: torch.dtype, loopback: Loopback) -> None:
    limit = 2 if dtype == torch.bool else 251
    bits = (torch.arange(15 * dtype.itemsize) % limit).to(torch.uint8).reshape(3, -1)
    taken = torch.zeros_like(bits)
    stats = loopback.transfer({"w": bits.view(dtype)}, {"w": taken.view(dtype)})
    assert torch.equal(taken, bits)
    assert stats.bytes_moved == bits.numel()


def test_no_dtype_is_left_out() -> None:
    assert {tessera._core.dtype(dtype) for dtype in DTYPES} == set(tessera._core.dtypes())


def test_pairs_of_4_bit_elements_are_counted_as_elements(loopback: Loopback) -> None:
    packed = torch.arange(12, dtype=torch.uint8).reshape(4, 3)
    at = source_of("w", packed.view(torch.float4_e2m1fn_x2)[::2]).locate()
    assert (at.dtype, at.shape, at.strides) == ("f4", (2, 6), (12, 1))
    taken = torch.zeros(2, 3, dtype=torch.uint8)
    loopback.transfer(
        {"w": packed.view(torch.float4_e2m1fn_x2)[::2]}, {"w": (taken.view(torch.float4_e2m1fn_x2), "1:S1", (2, 6))}
    )
    assert torch.equal(taken, packed[::2])


# --- refused

SPARSE = r"torch\.sparse_coo tensors cannot be moved: register its values, or to_dense\(\)"
REFUSED = {
    "expanded": (
        lambda: counted(1, 4).expand(3, 4),
        r"it is expanded \(shape \(3, 4\), strides \(0, 1\)\).*; clone it, or",
    ),
    "overlapping": (lambda: counted(9).as_strided((4, 3), (1, 1)), r"its elements overlap in memory .*: clone it"),
    "overlapping rows": (lambda: counted(9).as_strided((3, 2), (2, 3)), "its elements overlap in memory"),
    "conj": (lambda: counted(3, dtype=torch.complex64).conj(), r"a conjugate view, .*: resolve_conj\(\) it"),
    "neg": (lambda: counted(3, dtype=torch.complex64).conj().imag, r"a negative view, .*: resolve_neg\(\) it"),
    "meta": (lambda: torch.empty(3, device="meta"), r"on the meta device and has no memory: .*\(to_empty\)"),
    "sparse": (lambda: counted(3, 4).to_sparse(), SPARSE),
    "sparse rows": (lambda: counted(3, 4).to_sparse_csr(), SPARSE.replace("coo", "csr")),
    "mkldnn": (lambda: counted(3, 4).to_mkldnn(), r"torch\._mkldnn tensors cannot be moved"),
    "nested": (
        lambda: torch.nested.nested_tensor([counted(2), counted(3)]),
        r"nested tensors .*values\(\) and offsets\(\)",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([counted(2), counted(3)], layout=torch.jagged),
        r"nested tensors .*values\(\) and offsets\(\)",
    ),
    "quantised": (
        lambda: torch.quantize_per_tensor(counted(3), 0.1, 0, torch.qint8),
        r"quantised tensors of torch cannot be moved: register int_repr\(\) and the scales",
    ),
    "dispatching": (
        lambda: counted(3).as_subclass(Dispatching),
        r"a .*\.Dispatching cannot be moved: register what it",
    ),
    "wrapping": (lambda: Wrapping(counted(3)), r"a .*\.Wrapping cannot be moved: register what it wraps"),
    "quantised by a library": (
        lambda: Quantised(counted(3, dtype=torch.uint8), requires_grad=False),
        r"a .*\.Quantised cannot be moved: register what it wraps",
    ),
    "derived from one": (
        lambda: counted(3).as_subclass(Derived),
        r"a .*\.Derived cannot be moved: register what it wraps",
    ),
    "fake": (fake, r"a torch\._subclasses\.fake_tensor\.FakeTensor cannot be moved"),
    "uninitialised": (torch.nn.UninitializedParameter, "it is not initialised yet: run a lazy module once"),
    "functional": (lambda: torch._to_functional_tensor(counted(3)), "it is a tensor of a transform"),
    "complex128": (
        lambda: counted(3, dtype=torch.complex128),
        r"dtype torch\.complex128 is not one .*: f64, .*; cast it",
    ),
    "complex32": (lambda: counted(3, dtype=torch.complex32), r"dtype torch\.complex32 is not one"),
    "E4M3 of another kind": (
        lambda: torch.zeros(3).to(torch.float8_e4m3fnuz),
        r"dtype torch\.float8_e4m3fnuz is not one",
    ),
    "bits": (
        lambda: counted(3, dtype=torch.uint8).view(torch.bits8),
        r"dtype torch\.bits8 is not one .* as another type",
    ),
    "a column of 4-bit pairs": (
        lambda: counted(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).t(),
        r"4-bit elements lie in pairs along the last dim, which must be dense .*: register a contiguous\(\) copy",
    ),
    "one 4-bit pair": (
        lambda: torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "4-bit elements lie in pairs along the last dim",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_moved_is_refused_by_name(case: str, loopback: Loopback) -> None:
    make, why = REFUSED[case]
    with pytest.raises(tessera.InvalidArgumentError, match=f"tensor model.w: .*{why}") as caught:
        loopback.register({"model": {"w": make()}})
    assert "tensor(" not in str(caught.value), "an error does not print elements"


def test_a_module_of_quantised_parameters_is_refused_by_name(loopback: Loopback) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].weight = Quantised(counted(2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(tessera.InvalidArgumentError, match=r"tensor 0\.weight: a .*\.Quantised cannot be moved"):
        loopback.register(model)
    loopback.register(model, ignore=r".*weight").close()


def test_nothing_is_registered_from_within_a_transform(loopback: Loopback) -> None:
    with pytest.raises(
        tessera.InvalidArgumentError, match="tensor w: it is a tensor of a transform .vmap.*outside of it"
    ):
        in_vmap(loopback)


def test_other_devices_are_not_built(loopback: Loopback) -> None:
    """(The one device that every torch has beside the CPU is meta, which has its own words.)"""
    tensor = counted(3)
    elsewhere = unittest.mock.PropertyMock(return_value=torch.device("cuda", 1))
    with (
        unittest.mock.patch.object(Plain, "device", elsewhere, create=True),
        pytest.raises(
            tessera.UnimplementedError, match=re.escape("tensor w: it is on cuda:1; this build moves only host")
        ) as e,
    ):
        loopback.register({"w": tensor.as_subclass(Plain)})
    assert "register a copy on the CPU" in str(e.value)


def test_a_layout_beside_a_tensor_must_be_one(loopback: Loopback) -> None:
    with pytest.raises(tessera.InvalidArgumentError, match=r"tensor w: layout 5: give .*; give \(tensor, layout\)"):
        loopback.register({"w": (counted(3), 5)})
    with pytest.raises(tessera.InvalidArgumentError, match=r'tensor w: layout "2:Q" at 3'):
        loopback.register({"w": (counted(3), "2:Q")})
    with pytest.raises(
        tessera.InvalidArgumentError, match=r"tensor w: 1:S0 gives rank 0 \(5,\) of a tensor of shape \(5,\)"
    ):
        loopback.register({"w": (counted(3), "1:S0", (5,))})


def test_a_failed_registration_leaves_nothing_behind(loopback: Loopback) -> None:
    with pytest.raises(tessera.InvalidArgumentError):
        loopback.trainer.register({"good": counted(3), "bad": counted(3, dtype=torch.complex128)}, "again")
    loopback.trainer.register({"good": counted(3)}, "again").close()
