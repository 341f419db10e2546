"""Muon, whose matrices are orthogonalised by one rank each.

Momentum and the step itself are elementwise, on this rank's rows. Orthogonalisation needs whole matrices, and is nearly
all of the work: each matrix has an owner, planned by work, that reads the other ranks' rows of its momentum, and whose
result they read back. Reads are one-sided, so that a matrix goes to its owner only. Two exchanges of addresses order
them: behind the first all momentum is there, behind the second all results are. A buffer is written again only behind
an exchange that follows all reads of it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from .. import _core
from .._arguments import real
from .._errors import InvalidArgumentError
from .group import Group
from .replicated import is_replicated
from .stack import Stack
from .telling import numbers_of
from .weight import Weight

_BYTES = 2  # of an element that travels: bfloat16, in which matrices are orthogonalised
_PLACE = struct.Struct("=QQ")
Entry = tuple[torch.Tensor, dict[str, Any]]  # a parameter, and the group that has its options


class Piece(NamedTuple):
    """Elements of a matrix that one rank has."""

    rank: int
    at: int  # in what the rank sends
    into: int  # in the matrix
    length: int


class Matrix(NamedTuple):
    """One matrix that is orthogonalised."""

    number: int  # of its parameter
    shape: tuple[int, int]
    pieces: list[Piece]
    owner: int
    at: int  # in the owner's results


def _orthogonalised(matrix: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return about the nearest semi-orthogonal matrix of a bfloat16 matrix [F, K], which is overwritten: by the quintic
    Newton-Schulz iteration of https://kellerjordan.github.io/posts/muon/, with the operations of torch.optim.Muon."""
    a, b, c = options["ns_coefficients"]
    tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if tall else matrix
    found.div_(found.norm().clamp(min=options["eps"]))
    for _ in range(options["ns_steps"]):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


def _work(shape: tuple[int, int]) -> int:
    """Return multiplications of one iteration."""
    short, long = sorted(shape)
    return 2 * short * short * long + short**3


class _Plan:
    """Which rank orthogonalises what, for the parameters of one group that have gradients.

    Attributes:
        sizes: Elements that each rank sends.
        starts: Where each parameter begins in what this rank sends.
        matrices: All, in an order that ranks share.
        results: Elements that each rank owns.
    """

    def __init__(self, parameters: list[torch.Tensor], size: int, rank: int) -> None:
        self.sizes, self.starts, self.results = [0] * size, [], [0] * size
        self.matrices: list[Matrix] = []
        shapes: list[tuple[tuple[int, int], int, list[Piece]]] = []
        for number, parameter in enumerate(parameters):
            self.starts.append(self.sizes[rank])
            shapes += [(_matrix_of(parameter), number, pieces) for pieces in self._pieces(parameter, size)]
        loads = [0] * size
        order = sorted(range(len(shapes)), key=lambda place: -_work(shapes[place][0]))
        owners = {}
        for place in order:  # the largest first, to whoever has least
            owners[place] = min(range(size), key=loads.__getitem__)
            loads[owners[place]] += _work(shapes[place][0])
        for place, (shape, number, pieces) in enumerate(shapes):
            owner = owners[place]
            self.matrices.append(Matrix(number, shape, pieces, owner, self.results[owner]))
            self.results[owner] += math.prod(shape)

    def _pieces(self, parameter: torch.Tensor, size: int) -> Iterable[list[Piece]]:
        """Yield who has what of each matrix of a parameter, and count what each rank sends of it."""
        weight = weight_of(parameter)
        elements = math.prod(_matrix_of(parameter))
        count = _shape_of(parameter).numel() // max(elements, 1)
        ranges = []
        for rank in range(size):
            if weight is None:  # every rank has all of it
                ranges.append((0, count * elements))
            else:
                begin, end = weight.store.spec.bounds(rank)
                ranges.append((begin * weight.matrix[1], end * weight.matrix[1]))
        for number in range(count):
            pieces = []
            for rank, (begin, end) in enumerate(ranges):
                if isinstance(weight, Stack):  # each expert is cut
                    pieces.append(Piece(rank, self.sizes[rank] + number * (end - begin), begin, end - begin))
                    continue
                first, last = max(begin, number * elements), min(end, (number + 1) * elements)
                if first < last:
                    pieces.append(
                        Piece(rank, self.sizes[rank] + first - begin, first - number * elements, last - first)
                    )
            yield pieces
        for rank, (begin, end) in enumerate(ranges):
            self.sizes[rank] += (end - begin) * (count if isinstance(weight, Stack) else 1)


def weight_of(parameter: torch.Tensor) -> Weight | None:
    """Return the weight whose rows a row parameter has."""
    reference = getattr(parameter, "etp_rows_of", None)
    return None if reference is None else reference()


def _shape_of(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of the whole of a parameter, or of what a row parameter has rows of."""
    weight = weight_of(parameter)
    return parameter.shape if weight is None else weight.shape


def _matrix_of(parameter: torch.Tensor) -> tuple[int, int]:
    *_, rows, columns = _shape_of(parameter)
    return rows, columns


class _Ranks:
    """What one group's ranks move. Collective, where several ranks are."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._reader = _core.MemoryReader(group.core) if group.size > 1 else None
        self._key: Any = None
        self._plan = _Plan([], 1, 0)
        self._sent = self._results = self._back = torch.empty(0, dtype=torch.bfloat16)

    def room(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory for what this rank has of each parameter's momentum, of its shape."""
        key = [id(weight_of(parameter) or parameter) for parameter in parameters]
        if key != self._key:
            rank = self.group.rank
            self._plan = plan = _Plan(parameters, self.group.size, rank)
            self._sent = self._shown(plan.sizes[rank])
            self._results = self._shown(plan.results[rank])
            self._back = torch.empty(plan.sizes[rank], dtype=torch.bfloat16)
            self._key = key
        return self._views(self._sent, parameters)

    def _shown(self, elements: int) -> torch.Tensor:
        """Return memory that other ranks can read."""
        if self._reader is None or not self._reader.refused:
            return torch.empty(elements, dtype=torch.bfloat16)
        shared = from_dlpack(_core.shared_bytes(max(elements, 1) * _BYTES))
        return shared[: elements * _BYTES].view(torch.bfloat16)

    def _views(self, memory: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            memory[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(self._plan.starts, parameters, strict=True)
        ]

    def orthogonalise(self, entries: list[Entry]) -> list[torch.Tensor]:
        """Return the orthogonal matrices of the momentum in room(), as this rank has them of each parameter."""
        plan, rank = self._plan, self.group.rank
        places = self._show("the momentum of matrices", self._sent)
        for matrix in plan.matrices:
            if matrix.owner != rank:
                continue
            result = self._results[matrix.at : matrix.at + math.prod(matrix.shape)]
            self._gather(matrix, result, places)
            whole = result.view(matrix.shape)
            whole.copy_(_orthogonalised(whole, entries[matrix.number][1]))
        places = self._show("orthogonal matrices", self._results)
        reads: list[tuple[int, int, int, int, int]] = []
        for matrix in plan.matrices:
            arena, offset = places[matrix.owner]
            for piece in matrix.pieces:
                if piece.rank != rank or not piece.length:
                    continue
                begin = matrix.at + piece.into
                into = self._back[piece.at : piece.at + piece.length]
                if matrix.owner == rank:
                    into.copy_(self._results[begin : begin + piece.length])
                else:
                    reads.append((matrix.owner, arena, offset + begin * _BYTES, piece.length * _BYTES, into.data_ptr()))
        self._read(reads)
        return self._views(self._back, [parameter for parameter, _ in entries])

    def _gather(self, matrix: Matrix, result: torch.Tensor, places: list[tuple[int, int]]) -> None:
        """Read all pieces of a matrix."""
        rank = self.group.rank
        reads: list[tuple[int, int, int, int, int]] = []
        whole = all(piece.length == result.numel() for piece in matrix.pieces) and len(matrix.pieces) > 1
        for piece in matrix.pieces:
            into = result[piece.into : piece.into + piece.length]
            if piece.rank == rank:
                into.copy_(self._sent[piece.at : piece.at + piece.length])
            elif piece.length and not whole:
                arena, offset = places[piece.rank]
                reads.append((piece.rank, arena, offset + piece.at * _BYTES, piece.length * _BYTES, into.data_ptr()))
        self._read(reads)

    def _show(self, what: str, memory: torch.Tensor) -> list[tuple[int, int]]:
        """Return where each rank's memory is, once all of it is written."""
        if self._reader is None:
            return [(0, 0)]
        place = self._reader.refer(memory.data_ptr(), memory.nbytes) if memory.numel() else (0, 0)
        told = self.group.core.exchange(what, _PLACE.pack(*place))
        return [(arena, offset) for arena, offset in numbers_of(told, _PLACE.format, what)]

    def _read(self, reads: list[tuple[int, int, int, int, int]]) -> None:
        if reads:
            assert self._reader is not None
            self._reader.read(reads)


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/), with the results of torch.optim.Muon bit for bit, for sharded
    and plain parameters of two dims, and stacks [E, F, K], of which each matrix [F, K] is orthogonalised by itself.
    Parameters of bf16 differ in rounding; and there, without nesterov, torch's own step also divides its moving average
    by the norm, as it takes it for a copy, which this one does not.

    Each matrix is orthogonalised by one rank of the group. It is as fast as it can be on N ranks if there are at least
    4 N matrices. Embeddings, heads, biases and norms belong to another optimiser (AdamW).

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        weight_decay: Factor of decoupled weight decay.
        momentum: Factor of the moving average of gradients.
        nesterov: Whether the gradient is added to the average once more.
        ns_coefficients: Of the Newton-Schulz polynomial.
        eps: Smallest norm that a matrix is divided by.
        ns_steps: Iterations.
        adjust_lr_fn: "original" (None): lr is scaled by sqrt(max(1, F / K)); "match_rms_adamw": by
            0.2 sqrt(max(F, K)).

    Raises:
        InvalidArgumentError: A parameter has other than two or three dims, an option is out of range, or, in a step,
            tensor parallelism has cut a parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise InvalidArgumentError(f"etp.Muon: lr has {lr.numel()} elements: give one number")
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not real(f"etp.Muon: {name}", value) >= 0:
                raise InvalidArgumentError(f"etp.Muon: {name} is {value}: give 0 or more")
        if len(ns_coefficients) != 3 or not 0 <= ns_steps < 100:
            raise InvalidArgumentError(
                f"etp.Muon: ns_coefficients {ns_coefficients}, ns_steps {ns_steps}: give three numbers, and less than "
                "100 steps"
            )
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise InvalidArgumentError(f"etp.Muon: adjust_lr_fn {adjust_lr_fn!r}: give 'original' or 'match_rms_adamw'")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._ranks: dict[Group | None, _Ranks] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() not in (2, 3):
                raise InvalidArgumentError(
                    f"etp.Muon takes matrices and stacks of them, and a parameter is {tuple(parameter.shape)}: leave "
                    "it to another optimiser (AdamW)"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_ranks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.setdefault("_ranks", {})
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step. Collective, if parameters are sharded.

        Args:
            closure: Computes gradients, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [(parameter, group) for group in self.param_groups for parameter in group["params"]
                 if parameter.grad is not None]  # fmt: skip
        groups = list(dict.fromkeys(weight.group for parameter, _ in found if (weight := weight_of(parameter))))
        shared: dict[Group | None, list[Entry]] = {}
        for parameter, options in found:
            weight = weight_of(parameter)
            if weight is not None and weight.parallel is not None:
                raise InvalidArgumentError(
                    f"etp.Muon: {weight.name} is cut by tensor parallelism, and this rank's part is another matrix: "
                    "leave it to another optimiser (AdamW)"
                )
            ranks = None if weight is None else weight.group
            if is_replicated(parameter) and len(groups) == 1:
                ranks = groups[0]
            shared.setdefault(ranks, []).append((parameter, options))
        for ranks, entries in shared.items():
            self._step(ranks, entries)
        return loss

    def _step(self, group: Group | None, entries: list[Entry]) -> None:
        momenta = [self._momentum(parameter, options) for parameter, options in entries]
        if group is None or group.size == 1:
            results = [
                _each_orthogonalised(momentum, parameter, options)
                for momentum, (parameter, options) in zip(momenta, entries, strict=True)
            ]
        else:
            ranks = self._ranks.get(group)
            if ranks is None:
                ranks = self._ranks[group] = _Ranks(group)
            for room, momentum in zip(ranks.room([each for each, _ in entries]), momenta, strict=True):
                room.copy_(momentum)
            results = ranks.orthogonalise(entries)
        for (parameter, options), result in zip(entries, results, strict=True):
            lr = float(options["lr"])
            parameter.mul_(1 - lr * options["weight_decay"])
            parameter.add_(result, alpha=-_adjusted(lr, options["adjust_lr_fn"], *_matrix_of(parameter)))

    def _momentum(self, parameter: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Take a gradient into the moving average; return what is to be orthogonalised."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        average: torch.Tensor = state["momentum_buffer"]
        average.lerp_(gradient, 1 - options["momentum"])
        return gradient.lerp(average, options["momentum"]) if options["nesterov"] else average


def _each_orthogonalised(momentum: torch.Tensor, parameter: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return the orthogonal matrices of a momentum that is all here."""
    result = torch.empty(momentum.shape, dtype=torch.bfloat16).copy_(momentum)
    for matrix in result.view(-1, *_matrix_of(parameter)):
        matrix.copy_(_orthogonalised(matrix, options))
    return result


def _adjusted(lr: float, function: str | None, rows: int, columns: int) -> float:
    if function == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


Muon.step.computes_on_rows = True  # type: ignore[attr-defined]  # see optimizers.py
