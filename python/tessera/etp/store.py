"""The rows that one rank holds of a tensor, where they lie in the whole, and how the whole is gathered and written.

A `Spec` says which rows of which shape are whose. A `Store` has this rank's rows and counts, by a stamp, what has
gone into them. A store is *kept* if it is one thing that all ranks share: a parameter, a gradient, a state of an
optimiser. A store that is not kept becomes the rank's own once ranks write different values into it.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._errors import InvalidArgumentError
from .digests import bytes_of
from .group import Group
from .telling import answers_of, known, told_of
from .tracers import refuse_tracers

if TYPE_CHECKING:
    from .model import ShardedModel
    from .shared_states import SharedRows
    from .tensor import LogicalTensor
    from .weight import Weight

_STAMP_BYTES = 8


class Spec:
    """Which rows of a tensor each rank of a group has.

    Attributes:
        group: The ranks that share it.
        shape: The whole's.
        dim: The dim that is cut. None: rows of the whole, flattened to [rows, K], which begin within a slice of dim 0.
        rows: How many there are.
        step: Rows of a full share: rank r has [min(r * step, rows), min((r + 1) * step, rows)).
    """

    __slots__ = ("begin", "dim", "end", "group", "rows", "shape", "step")

    def __init__(self, group: Group, shape: torch.Size, dim: int | None, rows: int, step: int) -> None:
        self.group, self.shape, self.dim, self.rows, self.step = group, shape, dim, rows, step
        self.begin, self.end = self.bounds(group.rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first row of a rank, and the row after its last one."""
        return min(rank * self.step, self.rows), min((rank + 1) * self.step, self.rows)

    def is_like(self, other: Spec | None) -> bool:
        """Tell whether both cut tensors of one shape in the same way."""
        return self is other or (
            other is not None
            and self.group is other.group
            and self.dim == other.dim
            and self.step == other.step
            and self.shape == other.shape
        )

    def of_view(self, shape: torch.Size, dim: int) -> Spec:
        """Return the spec of a view that has all rows."""
        return Spec(self.group, shape, dim, self.rows, self.step)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor of the whole's shape, as a view where that can be."""
        if self.dim is None:
            return whole.reshape(self.rows, -1)[self.begin : self.end]
        return whole.narrow(self.dim, self.begin, self.end - self.begin)

    def fits(self, operand: torch.Tensor) -> bool:
        """Tell whether an elementwise operand is broadcast to the shape, or goes along with its rows."""
        behind = len(self.shape) - operand.dim()
        return behind >= 0 and all(
            size in (1, whole) for size, whole in zip(operand.shape, self.shape[behind:], strict=True)
        )

    def cut_operand(self, operand: torch.Tensor) -> torch.Tensor:
        """Return what goes with this rank's rows of an operand that fits."""
        if operand.dim() == 0:
            return operand
        if self.dim is None:
            return self.cut(operand.expand(self.shape))
        dim = self.dim - len(self.shape) + operand.dim()
        if dim < 0 or operand.shape[dim] != self.rows or (self.rows == 1 and self.end > self.begin):
            return operand
        return operand.narrow(dim, self.begin, self.end - self.begin)

    def gather(self, what: str, rows: torch.Tensor, stamp: int) -> tuple[torch.Tensor, list[int]]:
        """Return the whole tensor of all ranks' rows, in memory of its own, and every rank's stamp. Collective."""
        dim = self.dim or 0
        own = rows.detach().resolve_conj().resolve_neg().movedim(dim, 0).contiguous()
        inner = own.shape[1:]
        row_bytes = math.prod(inner) * own.element_size()
        sent = torch.cat([own.view(torch.uint8).reshape(-1) if own.numel() else own.new_empty(0, dtype=torch.uint8),
                          torch.tensor([stamp], dtype=torch.int64).view(torch.uint8)])  # fmt: skip
        counts = [end - begin for begin, end in map(self.bounds, range(self.group.size))]
        sizes = [count * row_bytes + _STAMP_BYTES for count in counts]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        self.group.core.gather_bytes(what, sent.data_ptr(), sizes, received.data_ptr())
        whole = torch.empty((self.rows, *inner), dtype=own.dtype)
        stamps, into = [], whole.view(torch.uint8).reshape(-1) if whole.numel() else received[:0]
        at = 0
        for count, part in zip(counts, torch.split(received, sizes), strict=True):
            into[at : at + count * row_bytes] = part[: count * row_bytes]
            at += count * row_bytes
            stamps.append(int.from_bytes(bytes(part[count * row_bytes :].tolist()), "little", signed=True))
        return (whole.view(self.shape) if self.dim is None else whole.movedim(0, dim)), stamps


class Recipe:
    """How a result on rows is made again as a whole: the operation, on what its operands are as long as nobody has
    written them. A rank that reads such a result alone asks nobody."""

    MOST = 8  # operations in a row: what a program makes of its own results again and again is gathered

    __slots__ = ("_make", "_operands", "depth")
    depth: int

    def __init__(self, make: Callable[[], torch.Tensor], operands: Iterable[LogicalTensor]) -> None:
        """`make` computes the whole of its operands, as they are now."""
        self._make = make
        self._operands = [(tensor, tensor.store, tensor.store.version) for tensor in operands]
        depths = [0 if store.recipe is None else store.recipe.depth for _, store, _ in self._operands]
        self.depth = 1 + max(depths, default=0)

    def stands(self) -> bool:
        return all(
            tensor.store is store and store.version == version and store.asks_nobody()
            for tensor, store, version in self._operands
        )

    def make(self) -> torch.Tensor:
        return self._make()


class CopyRecipe:
    """How a copy is made again as a whole: what it is a copy of, as long as that is there and has not been written. It
    keeps nothing alive."""

    __slots__ = ("_source", "_version")
    depth = 1

    def __init__(self, source: Store) -> None:
        self._source, self._version = weakref.ref(source), source.version

    def stands(self) -> bool:
        source = self._source()
        return source is not None and source.version == self._version and source.asks_nobody()

    def make(self) -> torch.Tensor:
        source = self._source()
        assert source is not None
        return source.whole()


class Store:
    """This rank's rows of one tensor, and what has gone into them.

    Attributes:
        model: The model that it belongs to.
        spec: Which rows.
        rows: Their memory. None: of a weight that is kept quantised only.
        stride: The whole's. None: contiguous.
        stamp: A hash of the operations, numbers and stamps that its values come from, equal on all ranks while they do
            the same.
        name: In messages.
        kept: One thing that all ranks share.
        weight: Of a parameter: how it is pulled and written. None: another tensor.
        held: What its rows are a part of, as `p.etp`.
        own: Once it is the rank's own: the whole tensor, which counts as plain.
        blank: Nothing has been written into it: what empty_like() gives.
        recipe: How the whole is made again of what can be pulled. None: by a gather of rows.
        writes: How often it has been written.
        saved: It is a value of a state_dict(): programs that save it may ask for memory with all of it.
        shared: Of a gradient, or an optimiser's state: its rows where other ranks read them.
    """

    __slots__ = (
        "__weakref__",
        "_aliases",
        "_memory",
        "blank",
        "dtype",
        "held",
        "kept",
        "model",
        "name",
        "own",
        "recipe",
        "rows",
        "saved",
        "shared",
        "spec",
        "stamp",
        "stride",
        "weight",
        "writes",
    )

    def __init__(
        self,
        model: ShardedModel,
        spec: Spec,
        rows: torch.Tensor | None,
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
        stamp: int = 0,
        name: str = "",
        *,
        kept: bool = False,
        weight: Weight | None = None,
        held: Any = None,
    ) -> None:
        self.model, self.spec, self.rows, self.dtype = model, spec, rows, dtype
        self.stride, self.stamp, self.name = stride, stamp, name
        self.kept, self.weight, self.held = kept, weight, held
        self.own: torch.Tensor | None = None
        self.saved = weight is not None
        self.blank = False
        self.recipe: Recipe | CopyRecipe | None = None
        self.shared: SharedRows | None = None
        self.writes = 0
        self._memory: tuple[int, weakref.ref[torch.Tensor]] | None = None  # of which version, as long as one has it
        self._aliases: weakref.WeakValueDictionary[int, torch.Tensor] | None = None  # by id: tensors are not compared

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        return self

    def __str__(self) -> str:
        return f"sharded tensor {self.name}" if self.name else f"a sharded tensor of {tuple(self.spec.shape)}"

    def outline(self) -> torch.Tensor:
        """Return a meta tensor of the whole's sizes and strides."""
        if self.stride is None:
            return torch.empty(self.spec.shape, dtype=self.dtype, device="meta")
        return torch.empty_strided(self.spec.shape, tuple(self.stride), dtype=self.dtype, device="meta")

    def whole(self, product: bool = False) -> torch.Tensor:
        """Return the whole tensor, to be read. Of a parameter, a gradient and an optimiser's state it is pulled, and
        nobody is asked; of others this is collective.

        Args:
            product: It becomes a factor of a product, which takes what a weight's format makes of its values.
        """
        refuse_tracers(self.name or str(self))
        if self.own is not None:
            return self.own
        if self.blank:
            found = torch.empty(self.spec.shape, dtype=self.dtype)
        elif self.weight is not None and (self.rows is None or not (self.model.updating and self.model.batch)):
            found = self.weight.pull(product)
        elif self.recipe is not None and self.recipe.stands():
            return self.recipe.make()
        else:
            assert self.rows is not None
            what = f"the rows of {self}"
            if self.shared is not None and self.shared.readable:
                found, stamps = self.shared.read(what, self.spec, self.rows, self.stamp)
            else:
                found, stamps = self.spec.gather(what, self.rows, self.stamp)
            self.require_same(stamps)
        if self.stride is None:
            return found.contiguous()
        return torch.empty_strided(self.spec.shape, tuple(self.stride), dtype=found.dtype).copy_(found)

    def in_memory(self) -> torch.Tensor:
        """Return a plain copy of the whole tensor, to be read: the same one as long as somebody has it and nothing has
        been written."""
        found = self._memory[1]() if self._memory is not None and self._memory[0] == self.version else None
        if found is None:
            version, whole = self.version, self.whole()
            found = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype).copy_(whole)
            self._memory = version, weakref.ref(found)
        return found

    def note_alias(self, alias: torch.Tensor) -> None:
        """Remember a tensor that has the memory of a weight as the parameter has it: .data, detach(), a view."""
        if self._aliases is None:
            self._aliases = weakref.WeakValueDictionary()
        self._aliases[id(alias)] = alias

    def forget_alias(self, alias: torch.Tensor) -> None:
        """Have no reference to it: torch swaps no tensor that has one."""
        if self._aliases is not None:
            self._aliases.pop(id(alias), None)

    def take_aliases(self) -> list[Any]:
        """Return those that somebody still has, once."""
        aliases, self._aliases = self._aliases, None
        return [] if aliases is None else list(aliases.values())

    @property
    def version(self) -> int:
        """Count what has changed its values."""
        return self.writes if self.weight is None else self.weight.version

    def asks_nobody(self) -> bool:
        """Tell whether the whole can be had without a call of all ranks."""
        if self.own is not None or self.blank:
            return True
        if self.weight is not None:
            return self.weight.asks_nobody()
        if self.shared is not None and self.shared.readable:
            return True
        return self.recipe is not None and self.recipe.stands()

    def written(self, stamp: int) -> None:
        """Note that all ranks have written its rows."""
        self.move_stamp(stamp)
        if self.model.batch is not None:
            self.model.batch.note(self)

    def move_stamp(self, stamp: int) -> None:
        """Note what its values come from now."""
        self.stamp = stamp
        self.writes += 1
        self.blank, self.recipe = False, None
        if self.shared is not None:
            self.shared.note(stamp)

    def require_same(self, stamps: list[int]) -> None:
        """Throw if the stamps of ranks differ: they have not written the same."""
        other = next((rank for rank, stamp in enumerate(stamps) if stamp != stamps[0]), None)
        if other is not None:
            raise InvalidArgumentError(
                f"{self}: ranks 0 and {other} have not written the same into it: they differ in operations, or in the "
                "Python numbers that went into them (a learning rate, a factor); give all ranks the same"
            )

    def take(self, whole: torch.Tensor) -> None:
        """Keep this rank's rows of what all ranks have agreed on."""
        rows = self.rows if self.weight is None else self.weight.rows_to_write()
        assert rows is not None
        rows.copy_(self.spec.cut(whole).reshape(rows.shape))

    def has(self, whole: torch.Tensor) -> bool:
        """Tell whether it is kept quantised only and has just these values: encoding decoded values again may change
        them."""
        return self.rows is None and self.weight is not None and digest_of([self.whole()]) == digest_of([whole])

    def become_own(self, whole: torch.Tensor) -> None:
        """Become the rank's own: ranks have written different values."""
        self.own = whole
        self.rows = None
        self.writes += 1


def stamp_of(name: str, numbers: Iterable[Any], stamps: Iterable[int]) -> int:
    """Return a hash that is equal in all processes."""
    text = repr((name, list(numbers), list(stamps))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=_STAMP_BYTES).digest(), "little", signed=True)


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a digest of shapes, dtypes and values of plain tensors."""
    total = hashlib.blake2b(digest_size=32)
    for tensor in tensors:
        total.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        if tensor.numel() > 0:
            total.update(bytes_of(tensor if tensor.layout is torch.strided else tensor.to_dense()).numpy().data)
    return total.digest()


def agree(store: Store, what: str, digest: bytes, error: BaseException | None = None) -> bool:
    """Tell whether all ranks, of replicas too, have the same digest. An error of one rank is raised on all.
    Collective."""
    return are_same(store.model.core.exchange(what, told_of(what, digest, error)), error)


def are_same(answers: Sequence[bytes], error: BaseException | None = None) -> bool:
    """Tell whether all ranks have told the same digest. An error of one rank is raised on all."""
    told = answers_of(answers, error)
    return all(each == told[0] for each in told)


def refuse_difference(what: str) -> InvalidArgumentError:
    """Return the error of a write whose values differ between ranks, which all of them have found."""
    return known(
        InvalidArgumentError(
            f"{what} would write different values on different ranks, and there is one such tensor: give all ranks the "
            "same operands, numbers and seeds (etp.local(t) is this rank's rows); nothing was written"
        )
    )
