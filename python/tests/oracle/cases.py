"""Random cases: which tensor goes from which layout into which other one, and what it holds.

A case depends only on (seed, launch, index), so that one can be run again without the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import tessera

CASES = 250  # a launch
SEED = 20261

FLOATS = ("f64", "f32", "f16", "bf16")
SIGNED = ("i64", "i32", "i16", "i8")
UNSIGNED = ("u64", "u32", "u16", "u8")
ALL = (*FLOATS, "f8_e4m3", "f8_e5m2", "f8_e8m0", "f4", *SIGNED, *UNSIGNED, "bool", "c64")
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 31)
LARGE = (
    (300, 257),
    (64, 33, 40),
    (90_001,),
    (7, 8_192),
    (128, 640),
)  # shares of a replicated source are cut from 64 KiB


@dataclass(frozen=True)
class Launch:
    """Some processes, of which these are the ranks 0, 1, ... of the two jobs. A process may be in both."""

    name: str
    trainers: tuple[int, ...]
    inference: tuple[int, ...]
    sender: str = "inplace"
    receiver: str = "inplace"

    @property
    def world(self) -> int:
        return max(*self.trainers, *self.inference) + 1


def _launch(trainers: int, inference: int, first: int, sender: str = "inplace", receiver: str = "inplace") -> Launch:
    """`first` is the process that is rank 0 of the inference job; rank 0 of the trainer is process 0."""
    apart = first >= trainers
    name = f"{trainers}to{inference}" if apart else f"{trainers}and{inference}"
    return Launch(
        name=name if apart or first == 0 else f"{name}at{first}",
        trainers=tuple(range(trainers)),
        inference=tuple(range(first, first + inference)),
        sender=sender,
        receiver=receiver,
    )


LAUNCHES = (
    _launch(2, 2, first=2),
    _launch(4, 2, first=4, sender="staged"),
    _launch(2, 4, first=2, receiver="staged"),
    _launch(3, 3, first=3),
    _launch(1, 4, first=1),
    _launch(4, 1, first=4, sender="staged", receiver="staged"),
    # From here on processes are ranks of both jobs.
    _launch(4, 4, first=0),
    _launch(3, 3, first=0, receiver="staged"),
    _launch(6, 6, first=0),
    _launch(4, 4, first=2, sender="staged"),
    _launch(6, 4, first=0),
    _launch(8, 8, first=0),
)


@dataclass(frozen=True)
class Grid:
    """A mesh before there is a process group: its shape, and its processes in row-major order."""

    shape: tuple[int, ...]
    processes: tuple[int, ...]

    @property
    def ascending(self) -> bool:
        """Whether processes ascend along every axis (though maybe not in row-major order)."""
        stride = len(self.processes)
        for size in self.shape:
            stride //= size
            for at, process in enumerate(self.processes):
                if at // stride % size > 0 and process < self.processes[at - stride]:
                    return False
        return True


@dataclass(frozen=True)
class Side:
    """Placements are written as in Tessera's text form: R, S0, S-1, S0*2, Psum."""

    grid: Grid
    placements: tuple[str, ...]

    @property
    def text(self) -> str:
        ranks = ",".join(map(str, self.grid.processes))
        return f"{','.join(map(str, self.grid.shape))}@{ranks}:{','.join(self.placements)}"

    @property
    def reduce_op(self) -> str | None:
        """The reduction of a Partial layout."""
        return next((each[1:] for each in self.placements if each.startswith("P")), None)

    def layout(self) -> tessera.Layout:
        """The layout over the numbers of the processes."""
        return tessera.Layout(self.text)

    def coordinate(self, process: int) -> tuple[int, ...]:
        position = self.grid.processes.index(process)
        coordinate = []
        for size in reversed(self.grid.shape):
            position, at = divmod(position, size)
            coordinate.append(at)
        return tuple(reversed(coordinate))

    def cuts(self, dim: int, ndim: int) -> int:
        """The most pieces into which `dim` is cut."""
        pieces = 1
        for size, placement in zip(self.grid.shape, self.placements, strict=True):
            if sharded_dim(placement, ndim) == dim:
                pieces *= size * split_factor(placement)
        return pieces

    def pieces_right_of(self, axis: int, ndim: int) -> int:
        """The number of pieces into which the axes to its right cut the dim that it shards."""
        dims = [sharded_dim(each, ndim) for each in self.placements]
        right = range(axis + 1, len(dims))
        return math.prod(self.grid.shape[other] for other in right if dims[other] == dims[axis])

    # --- for a Partial side

    @property
    def terms(self) -> int:
        """The number of terms of an element."""
        return math.prod(
            size for size, each in zip(self.grid.shape, self.placements, strict=True) if each.startswith("P")
        )

    def term_of(self, process: int) -> int:
        """The term that the process holds: its row-major position along the Partial axes."""
        term = 0
        for at, size, placement in zip(self.coordinate(process), self.grid.shape, self.placements, strict=True):
            if placement.startswith("P"):
                term = term * size + at
        return term

    def term_orders(self) -> set[tuple[int, ...]]:
        """The terms in ascending order of the processes that hold them: of every group that holds one part."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for process in sorted(self.grid.processes):
            at = zip(self.coordinate(process), self.placements, strict=True)
            key = tuple(place for place, placement in at if not placement.startswith("P"))
            groups.setdefault(key, []).append(self.term_of(process))
        return {tuple(terms) for terms in groups.values()}


def sharded_dim(placement: str, ndim: int) -> int | None:
    if not placement.startswith("S"):
        return None
    return int(placement[1:].partition("*")[0]) % ndim


def split_factor(placement: str) -> int:
    return int(placement.partition("*")[2] or 1)


@dataclass(frozen=True)
class Case:
    """One tensor. `shape` is torch's: for f4 its last dim counts pairs."""

    seed: int  # of the run
    launch: str
    index: int
    shape: tuple[int, ...]
    dtype: str
    target: str  # the destination's dtype
    src: Side
    dst: Side
    content: str  # bits: any; numbers: floats of all sizes; integers: small ones, whose sums are exact; floats
    scattered_src: bool = False  # local tensors that are not contiguous
    scattered_dst: bool = False
    dtensors: bool = False  # given as DTensors where job ranks are torch's ranks, else with a layout beside them

    @property
    def name(self) -> str:
        return f"case{self.index}"

    @property
    def elements_shape(self) -> tuple[int, ...]:
        """The shape in Tessera's terms."""
        return (*self.shape[:-1], 2 * self.shape[-1]) if self.dtype == "f4" else self.shape

    @property
    def data_seed(self) -> int:
        return random.Random(f"{self.seed}/{self.launch}/{self.index}/data").getrandbits(48)

    def __str__(self) -> str:
        memory = [
            f"{side} tensors not contiguous"
            for side, is_so in (("source", self.scattered_src), ("destination", self.scattered_dst))
            if is_so
        ]
        what = "x".join(map(str, self.shape)) or "scalar"
        return (
            f"seed {self.seed}, launch {self.launch}, case {self.index}: {what} {self.dtype} -> {self.target}, "
            f"{', '.join([self.content, *memory])}\n"
            f"  source      {self.src.text}\n"
            f"  destination {self.dst.text}\n"
            f"  again: TESSERA_ORACLE_SEED={self.seed} TESSERA_ORACLE_CASE={self.launch}/{self.index} "
            "python -m pytest python/tests/oracle"
        )


def draw_cases(seed: int, launch: Launch, count: int = CASES) -> list[Case]:
    return [draw_case(seed, launch, index) for index in range(count)]


def draw_case(seed: int, launch: Launch, index: int) -> Case:
    return _Draw(seed, launch, index).case()


def grids(seed: int, launch: Launch, processes: tuple[int, ...]) -> list[Grid]:
    """The few meshes that a launch has over one job's processes: of one axis, two and three; one that is transposed,
    one in any order, and one that leaves a process out."""
    rng = random.Random(f"{seed}/{launch.name}/{len(processes)}")
    shapes = sorted(_factorings(len(processes)))
    made = [Grid((len(processes),), processes)]
    for axes in (2, 3):
        shape = rng.choice([shape for shape in shapes if len(shape) == axes])
        plain = [each for each in shapes if len(each) == axes and 1 not in each]
        made.append(Grid(rng.choice(plain) if plain else shape, processes))
    rows, columns = rng.choice([shape for shape in shapes if len(shape) == 2])
    transposed = [processes[row + rows * column] for row in range(rows) for column in range(columns)]
    made.append(Grid((rows, columns), tuple(transposed)))
    made.append(Grid(rng.choice(shapes), tuple(rng.sample(processes, len(processes)))))
    if len(processes) > 2:
        fewer = tuple(sorted(rng.sample(processes, len(processes) - 1)))
        made.append(Grid(rng.choice(sorted(_factorings(len(fewer)))), fewer))
    return sorted(set(made), key=lambda grid: (grid.shape, grid.processes))


def _factorings(count: int) -> Iterator[tuple[int, ...]]:
    """All shapes of one to three axes with so many places."""
    yield (count,)
    for outer in range(1, count + 1):
        if count % outer == 0:
            rest = count // outer
            yield (outer, rest)
            for middle in range(1, rest + 1):
                if rest % middle == 0:
                    yield (outer, middle, rest // middle)


class _Draw:
    def __init__(self, seed: int, launch: Launch, index: int) -> None:
        self._seed = seed
        self._launch = launch
        self._index = index
        self._rng = random.Random(f"{seed}/{launch.name}/{index}")

    def case(self) -> Case:
        rng = self._rng
        content = rng.choices(("bits", "numbers", "integers", "floats"), (48, 20, 19, 13))[0]
        shape = self._shape()
        sources, destinations = (
            grids(self._seed, self._launch, ranks) for ranks in (self._launch.trainers, self._launch.inference)
        )
        from_grid, to_grid = rng.choice(sources), rng.choice(destinations)
        if from_grid in destinations and rng.random() < 0.5:  # torch's own redistribute needs one mesh
            to_grid = from_grid
        reduce_op = None
        if content in ("integers", "floats"):
            reduce_op = rng.choice(("sum", "sum", "avg", "min", "max", "product"))
        src = self._side(from_grid, shape, reduce_op)
        dst = self._side(to_grid, shape, None)
        if content == "floats" and len(src.term_orders()) > 1:
            content = "integers"  # replicas would add up in different orders
        dtype = self._dtype(content, reduce_op)
        if dtype == "f4" and not (
            shape and all(shape[-1] % side.cuts(len(shape) - 1, len(shape)) == 0 for side in (src, dst))
        ):
            dtype = "u8"  # pairs and elements would be cut in different places
        return Case(
            seed=self._seed,
            launch=self._launch.name,
            index=self._index,
            shape=shape,
            dtype=dtype,
            target=self._target(content, dtype),
            src=src,
            dst=dst,
            content=content,
            scattered_src=rng.random() < 0.3,
            scattered_dst=rng.random() < 0.3,
            dtensors=rng.random() < 0.5,
        )

    def _shape(self) -> tuple[int, ...]:
        rng = self._rng
        if rng.random() < 0.02:
            return rng.choice(LARGE)
        ndim = rng.choices(range(5), (4, 25, 40, 22, 9))[0]
        sizes = SIZES if ndim < 3 else SIZES[:9]
        return tuple(0 if rng.random() < 0.03 else rng.choice(sizes) for _ in range(ndim))

    def _dtype(self, content: str, reduce_op: str | None) -> str:
        rng = self._rng
        if content == "bits":
            return rng.choice((*ALL, "f4", "f4"))
        if content == "numbers":
            return rng.choice(FLOATS)
        complex_too = ("c64",) if reduce_op in ("sum", "avg", "product") else ()
        if content == "floats":
            return rng.choice((*FLOATS, "f32", "f16", "bf16", *complex_too))
        if reduce_op == "avg":
            return rng.choice((*FLOATS, *complex_too))
        return rng.choice((*FLOATS, *FLOATS, *SIGNED, *UNSIGNED, *complex_too))

    def _target(self, content: str, dtype: str) -> str:
        rng = self._rng
        if content == "numbers":
            return rng.choice([each for each in FLOATS if each != dtype])
        if content != "bits" and dtype in FLOATS and rng.random() < 0.5:
            return rng.choice(FLOATS)
        return dtype

    def _side(self, grid: Grid, shape: tuple[int, ...], reduce_op: str | None) -> Side:
        rng = self._rng
        placements = [self._placement(shape) for _ in grid.shape]
        if reduce_op is not None:
            partial = {rng.randrange(len(placements))}
            partial |= {axis for axis in range(len(placements)) if rng.random() < 0.2}
            for axis in partial:
                placements[axis] = f"P{reduce_op}"
        side = Side(grid, tuple(placements))
        for axis, placement in enumerate(placements):
            if "*" in placement and rng.random() < 0.6:  # what FSDP2 over tensor parallelism gives
                factor = side.pieces_right_of(axis, len(shape))
                placements[axis] = f"{placement.partition('*')[0]}*{factor}"
        return Side(grid, tuple(placements))

    def _placement(self, shape: tuple[int, ...]) -> str:
        rng = self._rng
        kind = rng.choices(("shard", "strided", "replicate"), (55, 22, 23))[0]
        if kind == "replicate" or not shape:
            return "R"
        dim = rng.randrange(len(shape))
        if kind == "shard":
            return f"S{dim - len(shape) if rng.random() < 0.2 else dim}"
        return f"S{dim}*{rng.randint(1, 4)}"
