"""The C++ core of Tessera. Use it through the package `tessera`."""

from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
    Set
)
from typing import Annotated, Any, overload

import tessera._errors


def report_leaks(on: bool) -> None:
    """
    Whether nanobind reports values that are still alive when the interpreter ends.
    """

version: str = '0.1.0'

class Replicate:
    """Every rank along the axis holds the same elements."""

    def __init__(self) -> None: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __reduce__(self) -> tuple[type, tuple[object, ...]]: ...

    def __repr__(self) -> str: ...

class Shard:
    """
    Split along tensor dim `dim` like torch.chunk: ceil(n/k) elements per rank; the last ranks may have fewer or none.
    """

    def __init__(self, dim: int) -> None: ...

    @property
    def dim(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __reduce__(self) -> tuple[type, tuple[object, ...]]: ...

    def __repr__(self) -> str: ...

class StridedShard:
    """
    DTensor's _StridedShard: the dim is cut into `split_factor` chunks first, each of them along the axis; a rank's pieces are concatenated. What FSDP2 over tensor parallelism gives.
    """

    def __init__(self, dim: int, split_factor: int) -> None: ...

    @property
    def dim(self) -> int: ...

    @property
    def split_factor(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __reduce__(self) -> tuple[type, tuple[object, ...]]: ...

    def __repr__(self) -> str: ...

class RaggedShard:
    """
    Explicit bounds along tensor dim `dim`: k+1 of them for an axis of k ranks, from 0 to the dim's size. Must be the outermost axis on its dim.
    """

    def __init__(self, dim: int, bounds: Sequence[int]) -> None: ...

    @property
    def dim(self) -> int: ...

    @property
    def bounds(self) -> tuple[int, ...]: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __reduce__(self) -> tuple[type, tuple[object, ...]]: ...

    def __repr__(self) -> str: ...

class Partial:
    """
    Every rank along the axis holds a term of each element; `reduce_op` (sum, avg, min, max or product) makes one value of them. Of a source only.
    """

    def __init__(self, reduce_op: str = 'sum') -> None: ...

    @property
    def reduce_op(self) -> str: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __reduce__(self) -> tuple[type, tuple[object, ...]]: ...

    def __repr__(self) -> str: ...

class Mesh:
    """
    An n-d array of distinct ranks, row-major, with optional axis names. A value.

    Mesh((2, 4), names=('dp', 'tp')) numbers the ranks from 0; `ranks` gives other ranks, row-major.
    """

    def __init__(self, shape: Sequence[int], names: Sequence[str] | None = None, ranks: Sequence[int] | None = None) -> None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...

    @property
    def size(self) -> int: ...

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of `rank` on each axis; None if it is not in the mesh."""

    def __contains__(self, rank: object, /) -> bool: ...

    def __len__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __reduce__(self) -> tuple[type, tuple[object, ...]]: ...

    def __repr__(self) -> str: ...

class Layout:
    """
    How a tensor lies on the ranks of a mesh: one placement for each mesh axis, with the semantics of torch's DTensor. A value.

    Layout('dp=2,tp=4@0-7:R,S1') reads the text form; Layout(mesh, placements) takes Tessera's or torch's own DeviceMesh and placements.
    """

    @overload
    def __init__(self, text: str) -> None: ...

    @overload
    def __init__(self, mesh: Mesh | object, placements: Iterable[object]) -> None: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def placements(self) -> tuple[Replicate | Shard | StridedShard | RaggedShard | Partial, ...]: ...

    def shifted(self, offset: int) -> Layout:
        """The same layout over ranks that are `offset` higher."""

    def with_ranks(self, ranks: Sequence[int]) -> Layout:
        """The same placements; position i of the mesh becomes ranks[i]."""

    def __str__(self) -> str: ...

    def bind(self, shape: Sequence[int]) -> Layout:
        """
        The same layout with negative dims resolved; raises InvalidArgumentError if it does not fit `shape`.
        """

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """
        Shape of the local tensor on `rank` of a tensor of global `shape`; zeros for a rank outside the mesh.
        """

    def owned(self, shape: Sequence[int], rank: int) -> list[tuple[tuple[int, int], ...]] | None:
        """
        The intervals (begin, end) of each dim that `rank` holds, ascending. None if it holds nothing.
        """

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __reduce__(self) -> tuple[type, tuple[object, ...]]: ...

    def __repr__(self) -> str: ...

def sliced_layout(layout: Layout, shape: Sequence[int], slices: Sequence[tuple[int, int, int, bool]]) -> Layout:
    """
    The layout of a slice as a tensor of its own. `slices` has (begin, end, step, whether the dim is dropped) for each dim.
    """

def local_slices(layout: Layout, shape: Sequence[int], slices: Sequence[tuple[int, int, int, bool]], rank: int) -> list[tuple[int, int, int, bool]]:
    """
    The part of that slice that is in the local tensor of `rank`, as slices of the local tensor.
    """

class Route:
    """One region that one source rank provides."""

    @property
    def src(self) -> int:
        """The rank that sends the region."""

    @property
    def dsts(self) -> list[int]:
        """The ranks that receive it, ascending."""

    @property
    def kind(self) -> str:
        """'local', 'p2p' or 'multicast'."""

    @property
    def region(self) -> str:
        """In global coordinates: '[0:4,8:12][0:16]'."""

    @property
    def bytes(self) -> int:
        """Bytes of the region, counted once whatever the number of destinations."""

    def __repr__(self) -> str: ...

class Plan:
    """
    Who sends which elements of a tensor to whom, so that every destination element is written once. A value; a notebook shows its picture.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def src(self) -> Layout: ...

    @property
    def dst(self) -> Layout: ...

    @property
    def routes(self) -> list[Route]: ...

    @property
    def stats(self) -> dict[str, int]:
        """Byte totals of the plan. A multicast counts once at its source."""

    def egress(self) -> list[tuple[int, int]]:
        """(rank, bytes that it sends), ascending by rank."""

    def dump(self) -> str:
        """A stable text form, one route per line."""

    def explain(self) -> str:
        """Describes the plan in words and a table."""

    def to_json(self) -> str:
        """The JSON form of docs/formats/plan-json.md."""

    def to_svg(self) -> str:
        """A picture of the plan, as an SVG document."""

    def __repr__(self) -> str: ...

def plan(shape: Sequence[int], dtype: object, src: Layout, dst: Layout) -> Plan: ...

def simulate_bytes(plan: Plan, sources: dict[int, bytes], dtype: object | None = None) -> dict[int, bytes]: ...

def dtypes() -> list[str]:
    """The names of all element types."""

def torch_name(dtype: str) -> str:
    """What torch, NumPy and ml_dtypes call an element type: float32 for f32."""

def dtype(object: object) -> str:
    """
    Tessera's name of an element type, given as such a name or as a type of NumPy, torch or ml_dtypes.
    """

def bits_of(dtype: object) -> int:
    """Bits per element: 4 for f4, a multiple of 8 for the others."""

def local_digest(address: int, dtype: object, shape: Sequence[int], strides: Sequence[int]) -> str:
    """
    The digest of a local tensor's elements in row-major order (docs/formats/digest.md).
    """

def shared_bytes(bytes: int) -> Annotated[Any, dict(dtype='uint8', shape=(None,), device='cpu')]:
    """
    A zeroed block of shared memory, freed once nothing refers to it. Raises ResourceExhaustedError.
    """

def in_shared_memory(address: int, bytes: int) -> bool:
    """Whether one block of Tessera's shared memory holds all of it."""

class MatrixStack:
    """Matrices [..., M, K] in memory, dense along the last dim."""

    def __init__(self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], memory: object) -> None:
        """`memory` is kept alive as long as the stack."""

class QuantSpec:
    """
    A quantised format and its options. Raises InvalidArgumentError if they do not go together.
    """

    def __init__(self, format: str, scaling: str = '16x16', hadamard: bool = False, rounding: str = 'nearest', seed: int = 0, eps: float = 0.0, power_of_two: bool | None = None, margin: int = 0, nonfinite: str = 'error') -> None: ...

    @property
    def format(self) -> str: ...

    @property
    def scaling(self) -> str: ...

    @property
    def hadamard(self) -> bool: ...

    @property
    def needs_amax(self) -> bool: ...

    def plane_arrays(self, plane: str, rows: int, columns: int) -> tuple[tuple[str, int, int], tuple[str, int, int], tuple[str, int, int]]:
        """
        (dtype, rows, columns) of the codes, the scales and gemm_scales() of a matrix.
        """

    def places(self, planes: Sequence[str], matrices: int, rows: int, columns: int) -> tuple[int, dict[str, tuple[int, int, int]]]:
        """
        The bytes that `planes` of a stack take in one block of memory, and the offsets of each plane's codes, scales and amaxes.
        """

    def __reduce__(self) -> tuple[type, tuple[object, ...]]: ...

def formats() -> list[str]:
    """The names of all quantised formats."""

class PlaneAddresses:
    """
    The addresses of a plane's packed codes and scales, and the amax of each matrix if the format has one.
    """

    def __init__(self, codes: int, scales: int, amax: Sequence[float]) -> None: ...

def quantize(stack: MatrixStack, spec: QuantSpec, row: PlaneAddresses | None, column: PlaneAddresses | None) -> None:
    """Quantises to one plane or both."""

def dequantize(spec: QuantSpec, plane: str, n: int, rows: int, columns: int, addresses: PlaneAddresses, to: int, dtype: str) -> None:
    """Dequantises n packed matrices to the address `to`."""

def gemm_scales(spec: QuantSpec, plane: str, n: int, rows: int, columns: int, addresses: PlaneAddresses, to: int) -> None:
    """
    Writes the scales of n packed matrices to `to`, in the order that GEMM kernels read.
    """

def tensor_amaxes(tensors: Sequence[MatrixStack]) -> list[float]:
    """The largest magnitude of each tensor."""

def matrix_amaxes(stack: MatrixStack, hadamard: bool = False) -> list[float]:
    """
    The largest magnitude of each matrix, after the Hadamard transform if `hadamard`.
    """

class AmaxHistory:
    """
    The last amaxes of a tensor, for *delayed* scaling: the scale of a step comes from the amaxes of earlier steps, so that no extra pass over the tensor is needed. Pass the same history to every quantize() of the tensor.

    Args:
        length: The number of amaxes to keep; TransformerEngine's default is 1024.
        algorithm: The scale is computed from the largest of them ("max") or from the newest ("most_recent").
        margin: Scales are 2^margin smaller than they could be; -64 to 64.
    """

    def __init__(self, length: int = 1024, algorithm: str = 'max', margin: int = 0) -> None: ...

    def push(self, amax: float) -> None:
        """Adds the newest amax; drops the oldest if the history is full."""

    @property
    def amax(self) -> float:
        """
        The amax for the next scale; 0, which gives a scale of 1, while the history is empty.
        """

    @property
    def values(self) -> list[float]:
        """Newest first."""

    @property
    def length(self) -> int:
        """How many are kept."""

    @property
    def algorithm(self) -> str:
        """'max' or 'most_recent'."""

    @property
    def margin(self) -> int:
        """Scales are 2^margin smaller than they could be."""

    def __getstate__(self) -> tuple[int, str, int, list[float]]: ...

    def __setstate__(self, arg: tuple[int, str, int, Sequence[float]], /) -> None: ...

    def __repr__(self) -> str: ...

class TensorWatch:
    """
    Detects whether tensors of a library with DLPack's C exchange API have moved.
    """

    def __init__(self, api: object, storage_of: Callable[[object], object], sources: list[Callable[[], object]], tensors: list[object]) -> None: ...

    def hold(self) -> tuple[list[object], list[object]] | None:
        """
        (storages, tensors whose version counters count) of the tensors that the sources return, if their addresses, shapes and strides are unchanged; otherwise None.
        """

    @staticmethod
    def usable(api: object) -> bool:
        """
        Whether this version of the API (Tensor.__dlpack_c_exchange_api__) is known here.
        """

class QuantizedCopy:
    """
    Elements that lie elsewhere, quantised: what ETP publishes of a weight.
    """

    @property
    def format(self) -> str: ...

    @property
    def current(self) -> bool:
        """Whether it is of what the elements are now."""

class TensorSpec:
    """One tensor of a batch, as one rank holds it."""

    def __init__(self, name: str, address: int, dtype: object, shape: Sequence[int], layout: Layout | None = None, strides: Sequence[int] | None = None, source: str = '', slices: Sequence[tuple[int, int, int, bool]] = [], wire: str | None = None, planes: Sequence[str] = [], fused: tuple[str, tuple[int, int] | None] | None = None, quantized: QuantizedCopy | None = None) -> None:
        """
        `shape` is the global shape; `strides` are those of the local tensor, in elements. The address is 0 on a rank outside the mesh. A receiver may read `source` instead of the sender's tensor of the same name, or `slices` of it: (begin, end, step, whether the dim is dropped) for each dim. `wire` is the format on the wire. `planes` of that format are received, or sent, as they are: they lie in one block of memory at `address`. `fused` is the name of the tensor that this one is a part of, and (row, column) of its first element there, or None. `quantized` is what a sender has of the same elements.
        """

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def layout(self) -> Layout | None: ...

    @property
    def strides(self) -> tuple[int, ...]: ...

    @property
    def source(self) -> str: ...

    @property
    def slices(self) -> list[tuple[int, int, int, bool]]: ...

    @property
    def wire(self) -> str | None: ...

    @property
    def planes(self) -> list[str]: ...

    @property
    def fused(self) -> tuple[str, tuple[int, int] | None] | None: ...

    def __repr__(self) -> str: ...

def wire_format(name: str) -> str:
    """
    The name of a format, whatever its upper and lower case; an error lists all formats.
    """

class ManifestEntry:
    """One tensor that the sending side offers."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def wire(self) -> str | None:
        """The wire format that the sender registered, or None."""

    def __repr__(self) -> str: ...

class Progress:
    """What a transfer has done so far."""

    def __init__(self) -> None:
        """The progress of a transfer that has not begun."""

    @property
    def bytes_done(self) -> int: ...

    @property
    def bytes_total(self) -> int: ...

    @property
    def seconds(self) -> float:
        """Seconds since the data began to flow."""

    @property
    def gigabytes_per_second(self) -> float: ...

    def __repr__(self) -> str: ...

class BatchStats:
    """Facts about a batch, and what its transfers have cost."""

    @property
    def tensors(self) -> int: ...

    @property
    def skipped(self) -> int:
        """Tensors that only the sender has."""

    @property
    def routes(self) -> int: ...

    @property
    def bytes_moved(self) -> int:
        """Bytes that all ranks move in one transfer."""

    @property
    def bytes_lower_bound(self) -> int: ...

    @property
    def rank_bytes(self) -> int:
        """Bytes of one transfer that this rank sends or receives."""

    @property
    def transfers(self) -> int:
        """
        Versions that were sent or taken; one that is staged counts at its commit.
        """

    @property
    def sessions(self) -> int:
        """Times that the batch was matched with another job."""

    @property
    def snapshot_bytes(self) -> int:
        """
        Bytes of a staged batch's copies. Their number does not depend on how many jobs take them.
        """

    @property
    def register_seconds(self) -> float: ...

    @property
    def store_requests(self) -> int:
        """Requests to the store since registration."""

    @property
    def plans(self) -> int:
        """Batches planned since registration."""

    @property
    def allocations(self) -> int:
        """Allocations of staging, scratch and streams since registration."""

    @property
    def delta_routes(self) -> int:
        """
        Regions that travelled as deltas from or to this rank, over all transfers.
        """

    @property
    def delta_bytes(self) -> int:
        """Bytes of those deltas."""

    @property
    def delta_full_bytes(self) -> int:
        """Bytes that those regions would have taken in full."""

    @property
    def quantized_elements(self) -> int:
        """
        Elements that this rank quantises (sender) or receives quantised (receiver) in one transfer.
        """

    @property
    def quantized_bytes(self) -> int:
        """Bytes of those elements as they travel, with scales and amaxes."""

    @property
    def quantized_source_bytes(self) -> int:
        """Bytes of those elements in the sender's dtypes."""

    @property
    def quantized_elements_moved(self) -> int:
        """Quantised elements that all ranks move in one transfer."""

    @property
    def quantized_bytes_moved(self) -> int:
        """The planned bytes of those elements; a part of bytes_moved."""

    @property
    def amax_exchanges(self) -> int:
        """Exchanges in which all ranks of a sending job agreed on the amaxes."""

    @property
    def quantized_ratio(self) -> float:
        """
        quantized_bytes over the bytes of the same elements in bf16; 0 if nothing is quantised.
        """

    @property
    def batch_ratio(self) -> float:
        """
        bytes_moved over the bytes that would move if bf16 were sent instead of the quantised formats.
        """

    def __repr__(self) -> str: ...

class BatchPeer:
    """Another job of a batch, as this rank knows it."""

    @property
    def job(self) -> str: ...

    @property
    def attached(self) -> bool:
        """Whether all its ranks are there and have registered the batch."""

    @property
    def world(self) -> int:
        """The number of its ranks; 0 until it has been attached once."""

    @property
    def version(self) -> int:
        """
        The newest version that all its ranks have taken, as far as they read from this one; of a receiver's peer, the newest that it has offered.
        """

    @property
    def error(self) -> tessera._errors.Error | None:
        """
        Why it is not attached, though it was or tried to be, or why it has not taken the version that was sent last. None: nothing is wrong with it.
        """

    def __repr__(self) -> str: ...

class Handle:
    def wait(self, timeout: float | None = None) -> int: ...

    def wait_for(self, timeout: float | None = None) -> bool: ...

    def done(self) -> bool: ...

    def cancel(self) -> bool: ...

    def withdraw(self) -> bool: ...

    def progress(self) -> Progress: ...

    def version(self) -> int: ...

class Waiter:
    """Has a descriptor that becomes readable once a handle has ended."""

    def __init__(self, handle: Handle) -> None: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...

class Batch:
    def send(self, version: int | None = None, timeout: float | None = None) -> Handle: ...

    def recv(self, min_version: int | None = None, timeout: float | None = None) -> Handle: ...

    def stage(self, min_version: int | None = None, timeout: float | None = None) -> Handle: ...

    def commit(self) -> int: ...

    def relocate(self, tensors: Sequence[TensorSpec]) -> None: ...

    def version(self) -> int: ...

    def newest(self) -> int: ...

    def wait_version(self, version: int, timeout: float | None = None) -> int: ...

    def peers(self) -> list[BatchPeer]: ...

    def wait_peers(self, jobs: int, version: int = 0, timeout: float | None = None) -> None: ...

    def torn(self) -> bool: ...

    def undecided(self) -> bool: ...

    def stats(self) -> BatchStats: ...

    def digests(self) -> dict[str, str]: ...

    def close(self, linger: float = 0.0) -> tuple[int, list[str]]:
        """
        Returns a version and the jobs that were attached and have not taken it; 0 if there are none.
        """

class StopSource:
    """Ends the calls that are given it, those that begin later, too."""

    def __init__(self) -> None: ...

    def request_stop(self) -> None: ...

def check_name(what: str, name: str) -> None:
    """
    Raises InvalidArgumentError unless the text may name a job, pair, batch or namespace.
    """

class Bus:
    def __init__(self, *, job: str, rank: int, world: int, store: str = '', namespace: str = '', agent: str = '', threads: int = 0, digest: bool | str = True, timeout: float | None = None, stall: float | None = None, stop: StopSource | None = None) -> None: ...

    def register_batch(self, batch: str, tensors: Sequence[tuple[Pair, Sequence[TensorSpec]]], sends: bool, timeout: float | None = None, mode: str = 'inplace', snapshots: int = 2, pinned: bool = False, delta: bool = False, stop: StopSource | None = None, grace: float | None = None) -> Batch:
        """Of [(pair, tensors)]. Blocks until the other job has registered it."""

    @property
    def world(self) -> int:
        """Ranks of this job."""

    def close(self) -> None:
        """Leaves once its pairs and batches have gone. Idempotent."""

    def interrupt(self) -> None:
        """Ends what waits for other ranks now, on any thread; later calls work."""

    def end_waits(self) -> None:
        """Ends what waits for other ranks, on any thread, and what would later."""

    def alive(self) -> bool: ...

class Pair:
    def __init__(self, bus: Bus, name: str, peer: str, timeout: float | None = None, layout: Layout | None = None, peers: Sequence[str] = []) -> None:
        """
        Pairs this job with `peer`, or with several `peers`, which it does not wait for.
        """

    def close(self) -> None:
        """Leaves once its batches have gone. Idempotent."""

    def peer_world(self) -> int: ...

    def membership(self) -> int:
        """
        A number for the processes that hold this job's ranks, the same on all of them.
        """

    def all_gather(self, batch: str, value: str, timeout: float | None = None, stop: StopSource | None = None) -> list[str]: ...

    def give_up(self, batch: str, code: str, text: str) -> None:
        """
        Tells the ranks of both jobs that this one does not register the batch, and why.
        """

    def manifest(self, batch: str, timeout: float | None = None, stop: StopSource | None = None) -> list[ManifestEntry]: ...

class Checkpoint:
    """A safetensors file, or several with an index, opened for reading."""

    @staticmethod
    def open(path: str) -> Checkpoint:
        """A file, an index, or a folder that holds exactly one of either."""

    @property
    def path(self) -> str: ...

    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """
        (name, dtype, shape) of each, in the order of their bytes, file by file.
        """

    @property
    def metadata(self) -> dict[str, str]:
        """Of the first file."""

    @property
    def checksums(self) -> dict[str, str]:
        """
        Digests of tensors as they lie in the files, by name; empty if none are noted.
        """

    def read_slice(self, name: str, region: Sequence[Sequence[tuple[int, int]]], address: int, room: int) -> int:
        """
        Reads the elements of a region to `address`, packed; returns their bytes, at most `room`.
        """

class SharedSafetensors:
    """A safetensors file that several processes write, each its slices."""

    @staticmethod
    def create(path: str, tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> SharedSafetensors:
        """For one process: reserves the whole size and writes the header."""

    @staticmethod
    def open(path: str, tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> SharedSafetensors:
        """For the others: with the same tensors."""

    def write_slice(self, name: str, region: Sequence[Sequence[tuple[int, int]]], address: int, bytes: int) -> None:
        """Writes the elements of a region, which lie packed at `address`."""

    def sync(self) -> None:
        """Waits until what this process has written is on the disk."""

    @property
    def bytes(self) -> int:
        """Of the whole file."""

def write_safetensors(path: str, tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> int:
    """
    Writes a file of whole tensors, (name, dtype, shape, address) each; returns its size.
    """

def spread_over_files(tensors: Sequence[tuple[str, str, Sequence[int]]], files: int) -> list[int]:
    """Which file each tensor goes to, so that they have about equal bytes."""

def region_digest(dtype: str, shape: Sequence[int], region: Sequence[Sequence[tuple[int, int]]], address: int) -> tuple[int, int]:
    """
    The digest of a region's elements, which lie packed at `address` (docs/formats/digest.md): those of disjoint regions add up, modulo 2^64.
    """

def launch(rank: int | None, world: int | None, group: tuple[int, int] | None) -> tuple[int, int]:
    """
    (rank, world size) of this process: what is given, else what the first of TESSERA_*, torchrun, MPI and Slurm says that says both, else those of `group`, else (0, 1).
    """

def metrics() -> str:
    """What this process serves at /metrics, where it is asked to."""

class Reading:
    """What ShardGroup.reading() returns."""

class ShardGroup:
    """
    Ranks of one host that share weights. Collective calls are made by all ranks in one order.
    """

    @staticmethod
    def single(name: str) -> ShardGroup: ...

    @staticmethod
    def over(exchange: Callable[[bytes], list[bytes]], rank: int, size: int, name: str, timeout: float | None = None) -> ShardGroup:
        """
        Blocks until all ranks have joined. `exchange` gives every rank's bytes, in rank order.
        """

    @staticmethod
    def over_store(url: str, key: str, rank: int, size: int, name: str, timeout: float | None = None) -> ShardGroup:
        """Likewise, by way of a store."""

    def derive(self, name: str) -> ShardGroup:
        """Collective: another group of the same ranks."""

    def exchange(self, what: str, blob: bytes) -> list[bytes]:
        """Collective: every rank's bytes, in rank order."""

    def refuse(self, what: str, text: str, code: str = 'invalid-argument', forwarded: bool = False) -> None:
        """
        Takes part in the next collective call with a refusal: on the other ranks that call raises the error of `code`, "rank R: " and `text`; `text` alone if it is `forwarded`, since it names the rank that has refused. Does not wait for them. The group stays usable.
        """

    @property
    def refusals(self) -> int:
        """How many refusals this rank has told or been told."""

    @property
    def latest_refusal(self) -> tuple[str, str, bool] | None:
        """
        (code, text, whether it is this rank's own) of the last one; of another's, the text names its rank.
        """

    def gather_bytes(self, what: str, address: int, bytes: Sequence[int], to: int) -> None:
        """
        Collective: concatenates what lies at every rank's `address`, of the sizes `bytes`, at `to`.
        """

    def close(self) -> None: ...

    def reading(self) -> Reading:
        """
        While what it returns lives, other ranks keep what they have shown this one, also once they want it no more.
        """

    def keep_for_readers(self, memory: object) -> None:
        """
        Keeps an object until no other rank of the group reads, which reading() tells. Does not wait.
        """

    def leave(self) -> None:
        """close() without waiting."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

def set_sequence(address: int, count: int) -> None:
    """
    Stores the count of what other processes read meanwhile, odd while it is written: they see it behind all that this thread has written, and before all that it writes next.
    """

class MemoryReader:
    """
    Reads what the ranks of a group have in their memory, where they say that it is.
    """

    def __init__(self, group: ShardGroup, threads: int = 0) -> None:
        """Collective."""

    @property
    def refused(self) -> str:
        """
        Why private memory cannot be read between some ranks; empty if it can. The same on all ranks.
        """

    def refer(self, address: int, bytes: int) -> tuple[int, int]:
        """
        (arena, offset) for peers. If private memory cannot be read, it must be shared_bytes().
        """

    def read(self, reads: Sequence[tuple[int, int, int, int, int]]) -> None:
        """
        Copies each (rank, arena, offset, bytes, address here). A later call reads nothing that is older.
        """

def etp_norms(group: ShardGroup, parts: Sequence[tuple[int, int, int, int, str, int, int]], order: float, together: bool) -> list[float]:
    """
    Collective: the norm of each part, or of all of them together. A part is (address of this rank's rows, slices, rows of each, elements of a row, dtype, rows of every shard or 0 for what every rank has whole, rows of all).
    """

class WeightReport:
    """What this rank holds of one weight, in bytes."""

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> tuple[int, int]:
        """First and last + 1 of this rank's rows."""

    @property
    def version(self) -> int:
        """That was published last."""

    @property
    def chain(self) -> str: ...

    @property
    def format(self) -> str:
        """What travels."""

    @property
    def frozen(self) -> bool: ...

    @property
    def shard_bytes(self) -> int:
        """Its rows in shared memory."""

    @property
    def publication_bytes(self) -> int:
        """What peers read, if that is not the rows themselves."""

    @property
    def master_bytes(self) -> int:
        """Rows of a native weight, which are memory of torch."""

    @property
    def gradient_bytes(self) -> int:
        """Gradient rows in memory of the runtime; others are torch's."""

    @property
    def gathered_bytes(self) -> int:
        """Of buffers that hold it now."""

class PoolReport:
    """Buffers of gathered weights that may replace each other, in bytes."""

    @property
    def key(self) -> str:
        """Shape, format and chain, in words."""

    @property
    def bytes(self) -> int:
        """Now."""

    @property
    def peak_bytes(self) -> int:
        """At the most."""

class Report:
    """
    What a model holds on this rank now, in bytes, and what happened since it was sharded.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Ranks, of all replicas."""

    @property
    def weights(self) -> list[WeightReport]: ...

    @property
    def keys(self) -> list[PoolReport]:
        """The pools of gathered weights."""

    @property
    def shard_bytes(self) -> int:
        """This rank's rows, in shared memory."""

    @property
    def publication_bytes(self) -> int:
        """Planes of weights with a format, in shared memory."""

    @property
    def master_bytes(self) -> int:
        """Rows of native weights, in memory of torch."""

    @property
    def gradient_bytes(self) -> int:
        """
        Gradient rows in memory of the runtime: 0 where they are .grad or main_grad.
        """

    @property
    def gathered_bytes(self) -> int:
        """Whole weights, in memory of this rank."""

    @property
    def gathered_peak_bytes(self) -> int:
        """At the most so far."""

    @property
    def mapped_bytes(self) -> int:
        """
        Addresses of whole weights that are read in their owners' memory, and take none of their own.
        """

    @property
    def produced_bytes(self) -> int:
        """Buffers of whole gradients, in shared memory."""

    @property
    def produced_peak_bytes(self) -> int:
        """At the most so far."""

    @property
    def replicated_bytes(self) -> int:
        """
        The bucket in which gradients of what is whole are added, in shared memory.
        """

    @property
    def consumptions(self) -> int:
        """Uses of weights that found them gathered or gathered them."""

    @property
    def prefetched(self) -> int:
        """Uses that found their weight gathered, or on its way."""

    @property
    def on_demand(self) -> int:
        """Uses that did not."""

    @property
    def in_place(self) -> int:
        """Uses of the shard itself, where a replica has one rank."""

    @property
    def mapped(self) -> int:
        """Uses of the owners' memory, of which nothing was copied."""

    @property
    def mispredicted(self) -> int:
        """Prefetches that nobody used."""

    @property
    def refused(self) -> int:
        """Prefetches that did not fit below cap_bytes."""

    @property
    def over_cap(self) -> int:
        """Buffers beyond cap_bytes, for uses at one time that need more."""

    @property
    def bytes_gathered(self) -> int:
        """That travelled."""

    @property
    def rounds(self) -> int:
        """Gradients that this rank produced."""

    @property
    def folds(self) -> int:
        """Additions to rows of this rank."""

    @property
    def left_out(self) -> int:
        """Gradients that another rank did not give for a round."""

    @property
    def pool_grown(self) -> int:
        """Gradient buffers beyond three of a size."""

    @property
    def room_waits(self) -> int:
        """Gradients that waited for a buffer."""

    @property
    def publications(self) -> int:
        """Of weights."""

    @property
    def max_exchanges(self) -> int:
        """Agreements on the largest values of weights that are quantised."""

    @property
    def drains(self) -> int: ...

    @property
    def updates(self) -> int: ...

    @property
    def writes(self) -> int:
        """Of weights, between updates."""

    @property
    def write_seconds(self) -> float:
        """That writes waited for other ranks and their reads."""

    @property
    def exposed_seconds(self) -> float:
        """That uses waited for their weights."""

    def __repr__(self) -> str: ...

class Forecast:
    """Bytes that a rank will hold at its peak, before the first step."""

    @property
    def parameters(self) -> int:
        """This rank's rows, in shared memory."""

    @property
    def publication(self) -> int:
        """Planes of weights with a format, in shared memory."""

    @property
    def gradients(self) -> int:
        """Gradient rows, such as .grad."""

    @property
    def gathered(self) -> int:
        """Whole weights: the most that each pool holds."""

    @property
    def produced(self) -> int:
        """Whole gradients that are not added yet, in shared memory."""

    @property
    def replicated(self) -> int:
        """
        The bucket in which gradients of what is whole are added, in shared memory.
        """

    @property
    def masters(self) -> int:
        """Rows of native weights, in memory of torch; not in the total."""

    @property
    def total(self) -> int:
        """All of them, without the masters."""

    def __repr__(self) -> str: ...

class EtpModel:
    """What would be told to an EtpRuntime; for a forecast without one."""

    def __init__(self) -> None: ...

    def add(self, name: str, rows: int, columns: int, dtype: str, format: str = '', compute: str | None = None, accumulated: str | None = None, pad_for_alignment: int = 16, frozen: bool = False, native: bool = False, planes_only: bool = False, copied: bool = False) -> int: ...

    def add_stack(self, name: str, count: int, rows: int, columns: int, dtype: str, format: str = '', compute: str | None = None, accumulated: str | None = None, pad_for_alignment: int = 16, frozen: bool = False, native: bool = False, planes_only: bool = False) -> int: ...

    def add_experts(self, experts: Sequence[int]) -> None:
        """By what add() returned."""

    def add_replicated(self, elements: int, dtype: str) -> None: ...

    def forecast(self, rank: int, ranks: int, replicas: int = 1, prefetch: str = 'auto', distance: int = 1, expert_distance: int = 2, cap_bytes: int | None = None, graph_scope: Set[str] = ..., moe_shared_expert_overlap: bool = False, map_weights: bool = True, check: bool | None = None, paced: bool = False) -> Forecast: ...

class GradientBuffer:
    """Room for a gradient in shared memory."""

def check_graph_scope(names: Set[str]) -> None:
    """Throws for a name that no part of a model that can be captured has."""

class EtpStatus:
    """What of a weight is under way, and what is used around it."""

    @property
    def gather(self) -> str: ...

    @property
    def reduction(self) -> str: ...

    @property
    def prev(self) -> int | None: ...

    @property
    def next(self) -> int | None: ...

    @property
    def expert(self) -> int | None: ...

    @property
    def chain(self) -> str: ...

class EtpStream:
    """On which weights and gradients move beside the computation."""

    @property
    def name(self) -> str: ...

    @property
    def chain(self) -> str: ...

    @property
    def gathers(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

class EtpRuntime:
    """The weights of one model; tessera.etp is built on it."""

    def __init__(self, group: ShardGroup, reduction: str = 'mean', prefetch: str = 'auto', distance: int = 1, expert_distance: int = 2, cap_bytes: int | None = None, publish: str = 'update', nonfinite: str = 'error', replicas: int = 1, check: bool | None = None, coalesce_amax: bool = True, schedule_log: str | None = None, stream_bytes_per_second: float | None = None, graph_scope: Set[str] = ..., moe_shared_expert_overlap: bool = False, map_weights: bool = True) -> None: ...

    def add(self, name: str, rows: int, columns: int, dtype: str, format: str = '', compute: str | None = None, accumulated: str | None = None, pad_for_alignment: int = 16, frozen: bool = False, native: bool = False, planes_only: bool = False, copied: bool = False) -> int:
        """
        copied: uses of it may write what they get; else it is to be read, as it may be the owners' memory.
        """

    def add_stack(self, name: str, count: int, rows: int, columns: int, dtype: str, format: str = '', compute: str | None = None, accumulated: str | None = None, pad_for_alignment: int = 16, frozen: bool = False, native: bool = False, planes_only: bool = False) -> list[int]:
        """Weights NAME[0], NAME[1], ..., which are a list of experts."""

    def add_experts(self, experts: Sequence[int]) -> None: ...

    def add_replicated(self, name: str, elements: int, dtype: str) -> int: ...

    def start(self) -> None: ...

    def rows(self, weight: int) -> tuple[int, int]: ...

    def shard_rows(self, weight: int) -> int:
        """With padding, of every rank."""

    def version(self, weight: int) -> int: ...

    def is_mapped(self, weight: int) -> bool:
        """Whether uses of it read the owners' memory, which they must not write."""

    def status(self, weight: int) -> EtpStatus: ...

    def shard(self, weight: int) -> Any:
        """A DLPack capsule over this rank's rows; None where it has none."""

    def stack_shard(self, stack: Sequence[int]) -> Any:
        """
        A DLPack capsule over this rank's rows of all weights of a stack; None where it has none.
        """

    def quantized_copy(self, weights: Sequence[int]) -> QuantizedCopy | None:
        """
        The planes that are published of this rank's rows of these weights, for the tensor bus; None where there are none of use.
        """

    def set_master(self, weight: int, rows: int, dtype: str) -> None:
        """
        The address of what a native weight is quantised from at each publication; of one with planes_only, at the next.
        """

    def read_rows(self, weight: int, to: int, dtype: str) -> None:
        """Writes what uses of the weight see of this rank's rows to an address."""

    def set_gradient(self, weight: int, rows: int, dtype: str, empty: bool = False) -> None:
        """
        Where folds add; 0: memory of the runtime's own. `empty`: the first fold does not read it.
        """

    def take_gradient(self, weight: int, to: int) -> None:
        """
        Moves what has been folded into the runtime's own memory to an address.
        """

    def set_frozen(self, weight: int, frozen: bool) -> None: ...

    def remove(self, weights: Sequence[int]) -> None:
        """
        This rank uses these weights no more. Their memory is freed once all ranks have said so.
        """

    def classify(self, graph_scope: Set[str], moe_shared_expert_overlap: bool = False) -> None: ...

    def acquire(self, weight: int, phase: str, micro_batch: int = 0, expects_backward: bool = False, first_micro_batch: bool = False, version: int | None = None) -> tuple[Any, int]:
        """Gathers a weight: a DLPack capsule over [F, K], and the version."""

    def acquire_experts(self, experts: Sequence[int], phase: str, micro_batch: int = 0, expects_backward: bool = False, first_micro_batch: bool = False, versions: Sequence[int] | None = None) -> tuple[list[Any], list[int]]:
        """
        Gathers a list of experts: DLPack capsules over [F, K], or one over all of a stack; and their versions.
        """

    def gradient_buffer(self, weight: int, micro_batch: int = 0) -> tuple[GradientBuffer, Any]:
        """Room for a gradient, and a DLPack capsule over it."""

    def produce(self, gradient: GradientBuffer) -> None: ...

    def produce_experts(self, gradients: Sequence[GradientBuffer]) -> None: ...

    def give_replicated(self, replicated: int, gradient: int, accumulated: int, accumulated_dtype: str) -> None:
        """
        Addresses, or 0 for no gradient of this rank; they are used by the next drain.
        """

    def replicated_ranks(self) -> list[int]:
        """
        Return how many ranks gave a gradient at the last drain, for each replicated tensor.
        """

    def added(self) -> list[tuple[int, int, int]]: ...

    def drain(self) -> list[tuple[int, int, int]]: ...

    def abandon(self, lost: bool = False) -> bool: ...

    def begin_update(self, weights: Sequence[int], what: str = 'an update', timeout: float | None = None) -> None: ...

    def end_update(self) -> None: ...

    def begin_write(self, weights: Sequence[int], what: str, told: bytes, begins: bool = True, timeout: float | None = None) -> list[bytes]:
        """
        What all ranks have told; a write of these weights has begun if it is the same and `begins` holds.
        """

    def end_write(self) -> None: ...

    def next_step(self) -> None: ...

    def publish(self, weights: Sequence[int]) -> None: ...

    def streams(self) -> list[EtpStream]: ...

    def synchronize(self, chain: str, gathers: bool) -> None: ...

    def report(self) -> Report: ...

    def forecast(self) -> Forecast: ...

    def explain(self, step: int = -1) -> str: ...

    def close(self) -> None: ...
