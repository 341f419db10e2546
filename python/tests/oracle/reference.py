"""What every rank must hold, from torch itself: distribute_tensor, redistribute and full_tensor over gloo.

Where torch is not asked, and who answers instead:

- Gloo refuses the dtypes in REFUSED: their tensors travel as uint8 with one more dim, their Partials are not reduced.
- Gloo would multiply complex numbers part by part: products of c64 are not reduced by torch.
- In meshes whose ranks do not ascend along each axis torch's collectives mix up coordinates, because a process group
  sorts its ranks: as the next.
- Uneven _StridedShard: distribute_tensor cuts it on each rank for itself (src_data_rank=None), full_tensor and
  redistribute are not asked.
- A _StridedShard whose split factor is not what FSDP2 gives: redistribute mixes up pieces silently, and
  full_tensor raises where another axis cuts its dim, too.
- Partial sums of floats: torch's order is its own; bits are those of rank_order(), torch's are compared by tolerance.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .cases import UNSIGNED, Case, Grid, Side, sharded_dim, split_factor

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
    "f8_e8m0": torch.float8_e8m0fnu,
    "f4": torch.float4_e2m1fn_x2,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
}
REFUSED = frozenset({"f8_e4m3", "f8_e5m2", "f8_e8m0", "f4", "i16", "u64", "u32", "u16"})

# docs/formats of casts: every NaN that a cast gives is the positive quiet one without a payload.
NANS = {"f64": 0x7FF8000000000000, "f32": 0x7FC00000, "f16": 0x7E00, "bf16": 0x7FC0}
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size, with which torch can do more than with some dtypes."""
    return tensor.view(CARRIERS[tensor.dtype.itemsize])


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order."""
    return as_carrier(tensor).contiguous().numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(tuple(shape))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """As uint8, with the bytes of an element along one more dim."""
    return tensor.reshape(-1).view(torch.uint8).reshape(*tensor.shape, tensor.dtype.itemsize)


def from_byte_view(view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return view.contiguous().reshape(-1).view(dtype).reshape(view.shape[:-1])


# --- the contents of a case


def whole(case: Case, term: int = 0) -> torch.Tensor:
    """The global tensor; for a Partial source, one of its terms."""
    dtype = DTYPES[case.dtype]
    count = math.prod(case.shape)
    generator = torch.Generator().manual_seed(case.data_seed + term)

    def integers(low: int, high: int, n: int) -> torch.Tensor:
        return torch.randint(low, high, (n,), generator=generator)

    def bits(n: int) -> torch.Tensor:
        raw = integers(0, 2 if case.dtype == "bool" else 256, n * dtype.itemsize)
        return raw.to(torch.uint8).view(dtype)

    if case.content == "bits":
        flat = bits(count)
    elif case.content == "numbers":
        exponents = integers(-30, 30, count).double()
        scaled = (torch.randn(count, generator=generator, dtype=torch.float64) * exponents.exp2()).to(dtype)
        flat = torch.where(integers(0, 4, count) == 0, bits(count), scaled)
    else:
        parts = 2 if case.dtype == "c64" else 1
        values = _small_integers(case, integers, count * parts)
        if case.content == "floats":
            uniform = torch.rand(count * parts, generator=generator, dtype=torch.float64)
            values = (uniform + 0.5) * (integers(0, 2, count * parts) * 2 - 1)
            if case.src.reduce_op != "product":  # which would leave the range of f16
                values *= integers(-6, 4, count * parts).double().exp2()
        flat = torch.view_as_complex(values.float().reshape(-1, 2)) if parts == 2 else values.to(dtype)
    return flat.reshape(case.shape)


def _small_integers(case: Case, integers: Callable[[int, int, int], torch.Tensor], count: int) -> torch.Tensor:
    low = 0 if case.dtype in UNSIGNED else -4
    if case.src.reduce_op == "product":
        return integers(1, 3, count) * (integers(0, 2, count) * 2 - 1 if low < 0 else 1)
    return integers(low, 5, count) * (case.src.terms if case.src.reduce_op == "avg" else 1)


def rank_order(case: Case) -> torch.Tensor:
    """What a Partial source stands for: its terms in ascending order of their ranks, in fp32 (f64 in itself, integers
    in themselves, wrapping), rounded once to the source's dtype; avg divides last."""
    # Integers in whatever order: their sums are exact.
    terms = [whole(case, term) for term in sorted(case.src.term_orders())[0]]
    op = case.src.reduce_op
    if op in ("min", "max"):
        if terms[0].is_floating_point():  # there are no NaNs and no zeros of both signs
            return functools.reduce(torch.minimum if op == "min" else torch.maximum, terms)
        bound = min if op == "min" else max
        return _elementwise(lambda values: bound(values), terms)
    if not (terms[0].is_floating_point() or terms[0].is_complex()):
        fold = math.prod if op == "product" else sum
        return _elementwise(fold, terms)
    if terms[0].is_complex() and op == "product":
        return functools.reduce(_complex_product, terms)
    if terms[0].is_complex():
        terms = [torch.view_as_real(term) for term in terms]
    wide = [term.double() if term.dtype == torch.float64 else term.float() for term in terms]
    total = functools.reduce(operator.mul if op == "product" else operator.add, wide)
    if op == "avg":
        total = total / len(terms)
    rounded = total.to(terms[0].dtype)
    return torch.view_as_complex(rounded) if case.dtype == "c64" else rounded


def _elementwise(fold: Callable[[list[int]], int], terms: list[torch.Tensor]) -> torch.Tensor:
    """Of integers, which torch cannot add in every dtype."""
    dtype = terms[0].dtype
    columns = zip(*(term.flatten().tolist() for term in terms), strict=True)
    modulus = 1 << (8 * dtype.itemsize)
    results = [fold(list(column)) % modulus for column in columns]
    data = b"".join(result.to_bytes(dtype.itemsize, "little") for result in results)
    return from_bytes(data, dtype, terms[0].shape)


def _complex_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b, c, d = x.real, x.imag, y.real, y.imag
    return torch.complex(a * c - b * d, a * d + b * c)


def cast(tensor: torch.Tensor, target: str) -> torch.Tensor:
    """As torch casts, except for NaNs, which are one value."""
    dtype = DTYPES[target]
    if tensor.dtype == dtype:
        return tensor
    made = tensor.to(dtype)
    carrier = as_carrier(made)
    nan = torch.tensor(NANS[target], dtype=carrier.dtype)
    return torch.where(made.isnan(), nan, carrier).view(dtype)


# --- torch's results


def torch_placement(text: str, ndim: int) -> Placement:
    if text == "R":
        return Replicate()
    if text.startswith("P"):
        return Partial(text[1:])
    dim = sharded_dim(text, ndim)
    assert dim is not None
    return _StridedShard(dim, split_factor=split_factor(text)) if "*" in text else Shard(dim)


def scatters(side: Side, shape: Sequence[int]) -> bool:
    """Whether torch can distribute it from one process."""
    strided = {sharded_dim(each, len(shape)) for each in side.placements if "*" in each}
    even = all(shape[dim] % side.cuts(dim, len(shape)) == 0 for dim in strided if dim is not None)
    return even and side.grid.ascending


def gathers(side: Side, shape: Sequence[int]) -> bool:
    """Whether torch can do that, and get it back with full_tensor."""
    dims = [sharded_dim(each, len(shape)) for each in side.placements]
    shared = [dim for dim in dims if dims.count(dim) > 1]
    return scatters(side, shape) and not any(dims[axis] in shared for axis in _odd_factors(side, len(shape)))


def redistributes(side: Side, shape: Sequence[int]) -> bool:
    """Whether torch can redistribute it, or to it."""
    return gathers(side, shape) and not _odd_factors(side, len(shape))


def _odd_factors(side: Side, ndim: int) -> list[int]:
    """The axes of each _StridedShard that is not what FSDP2 gives: whose split factor is not the number of pieces into
    which the axes right of it cut its dim."""
    return [
        axis
        for axis, each in enumerate(side.placements)
        if "*" in each and split_factor(each) != side.pieces_right_of(axis, ndim)
    ]


class Torch:
    """One process' view of torch: its meshes, of which each is made once, by all processes in one order."""

    def __init__(self, process: int, cases: Sequence[Case]) -> None:
        self._process = process
        wanted = {side.grid for case in cases for side in (case.src, case.dst)}
        self._meshes = {
            grid: DeviceMesh("cpu", torch.tensor(grid.processes).reshape(grid.shape))
            for grid in sorted(wanted, key=lambda grid: (grid.shape, grid.processes))
        }

    def mesh(self, grid: Grid) -> DeviceMesh:
        return self._meshes[grid]

    def placements(self, side: Side, shape: Sequence[int]) -> list[Placement]:
        return [torch_placement(each, len(shape)) for each in side.placements]

    def distribute(self, tensor: torch.Tensor, side: Side, dtype: str, own: bool = False) -> DTensor:
        """Of REFUSED dtypes the byte view is distributed. Everyone gives the tensor, but it comes from the mesh's first
        process, which alone gives its values, unless every process cuts its `own`."""
        placements = self.placements(side, tensor.shape)
        own = own or not scatters(side, tensor.shape)
        if not own and self._process != side.grid.processes[0]:
            tensor = torch.zeros_like(as_carrier(tensor)).view(tensor.dtype)
        wire = byte_view(tensor) if dtype in REFUSED else tensor
        return distribute_tensor(wire, self.mesh(side.grid), placements, src_data_rank=None if own else 0)

    def local(self, tensor: DTensor, dtype: str) -> torch.Tensor:
        local = tensor.to_local()
        return from_byte_view(local, DTYPES[dtype]) if dtype in REFUSED else local

    def source(self, case: Case) -> DTensor:
        """Of this rank of the source mesh; maybe of bytes."""
        if case.src.reduce_op is None:
            return self.distribute(whole(case), case.src, case.dtype)
        term = whole(case, case.src.term_of(self._process))
        replicated = Side(case.src.grid, tuple("R" if each.startswith("P") else each for each in case.src.placements))
        local = self.distribute(term, replicated, case.dtype, own=True).to_local()
        shape = (*case.shape, DTYPES[case.dtype].itemsize) if case.dtype in REFUSED else case.shape
        return DTensor.from_local(
            local,
            self.mesh(case.src.grid),
            self.placements(case.src, case.shape),
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )

    def full(self, case: Case, source: DTensor) -> torch.Tensor:
        """The global tensor again, gathered and reduced by torch."""
        full = source.full_tensor()
        return from_byte_view(full, DTYPES[case.dtype]) if case.dtype in REFUSED else full

    def redistributed(self, case: Case, source: DTensor) -> torch.Tensor:
        """The destination's local tensor, if both sides have the same mesh."""
        moved = source.redistribute(self.mesh(case.dst.grid), self.placements(case.dst, case.shape))
        return self.local(moved, case.dtype)


def asks_for_full(case: Case) -> bool:
    if not gathers(case.src, case.shape):
        return False
    return case.src.reduce_op is None or not (
        case.dtype in REFUSED or (case.dtype == "c64" and case.src.reduce_op == "product")
    )


def asks_for_redistribute(case: Case) -> bool:
    one_mesh = case.src.grid == case.dst.grid and asks_for_full(case)
    return one_mesh and all(redistributes(side, case.shape) for side in (case.src, case.dst))


def broadcast(tensor: torch.Tensor, process: int) -> torch.Tensor:
    """Broadcasts what `process` has to all."""
    data = byte_view(tensor).contiguous()
    dist.broadcast(data, process)
    return from_byte_view(data, tensor.dtype)


def slack(case: Case) -> torch.Tensor:
    """How far torch's reduction of floats may be from the rank-order one: what another order of rounding may do."""
    terms = [whole(case, term).abs().double() for term in range(case.src.terms)]
    folded = functools.reduce(operator.mul if case.src.reduce_op == "product" else operator.add, terms)
    unit = torch.finfo(DTYPES[case.dtype])
    # c64: a product of n has up to 2n roundings a part, and a part is bounded by the magnitudes' product.
    return 4 * len(terms) * (unit.eps * folded + unit.tiny)


def near(reduced: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> bool:
    return bool(((reduced - exact).abs().double() <= bound).all())
