"""Tensor parallelism as Megatron's: a layer's columns or rows are cut over the ranks of a torch process group, which
see the same tokens; with sequence parallelism each has a part of the sequence (dim 0) between such layers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed

from ..._arguments import flag
from ..._errors import InvalidArgumentError, MismatchError
from ..chunks import Cut
from ..group import Group
from ..norms import PartGradient, of_part
from ..parameter import LogicalParameter
from ..tensor import LogicalTensor

_Step = Callable[[torch.Tensor, Any], torch.Tensor]


def _same(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x.view_as(x)


def _reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(x, group=group)
    return x


def _gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, x, group=group)
    return torch.cat(parts)


def _scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's part of the sum."""
    size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    if x.dim() == 0 or x.shape[0] % size != 0:
        raise InvalidArgumentError(
            f"sequence_parallel=True: a sequence of {tuple(x.shape)[:1]} cannot be cut over {size} ranks: its length "
            "(dim 0) has to be a multiple of that"
        )
    return _reduce(x, group).chunk(size)[rank].contiguous()  # gloo has no reduce_scatter of tensors


class _Exchange(torch.autograd.Function):
    """One step in forward, its counterpart in backward, and so on for further derivatives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: _Step, back: _Step, group: Any) -> torch.Tensor:
        ctx.there, ctx.back, ctx.group = there, back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _Exchange.apply(gradient, ctx.back, ctx.there, ctx.group), None, None, None  # type: ignore[no-untyped-call]


def _is_process_group(group: Any) -> bool:
    if not torch.distributed.is_available():
        return False
    nobody = torch.distributed.GroupMember.NON_GROUP_MEMBER
    return isinstance(group, torch.distributed.ProcessGroup) or group is nobody


class TensorParallel:
    """What a layer does with its tp_group; without one, or with one rank, nothing."""

    def __init__(self, group: Any = None, sequence_parallel: bool = False, cuts: bool = True) -> None:
        """`cuts`: the layer has a parallel_mode."""
        sequence_parallel = flag("sequence_parallel", sequence_parallel)
        if not (group is None or _is_process_group(group)):
            raise InvalidArgumentError(
                f"tp_group={group!r}: give a torch ProcessGroup; of an axis of a mesh it is mesh['tp'].get_group()"
            )
        if sequence_parallel and not cuts and group is not None:
            raise InvalidArgumentError(
                "sequence_parallel=True without a parallel mode: ranks would see parts of the sequence, and nobody "
                "adds the gradients of a weight that all of them have"
            )
        group = group if cuts else None
        self.group = group
        self.size = 1 if group is None else torch.distributed.get_world_size(group)
        self.rank = 0 if group is None else torch.distributed.get_rank(group)
        if self.rank < 0:
            raise InvalidArgumentError("tp_group: this process is none of its ranks")
        self.sequence = sequence_parallel and self.size > 1

    def __deepcopy__(self, memo: Any) -> TensorParallel:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgumentError("layers with a parallel_mode cannot be pickled: save their state_dict()")

    # --- parameters

    def range_of(self, total: int, rank: int | None = None) -> tuple[int, int]:
        """This rank's, or another's; the first ranks have one more where it does not divide."""
        rank = self.rank if rank is None else rank
        each, more = divmod(total, self.size)
        begin = rank * each + min(rank, more)
        return begin, begin + each + (rank < more)

    def shape_of(self, shape: tuple[int, ...], cut: int | None, halves: int, name: str) -> tuple[int, ...]:
        """Of this rank's part."""
        if cut is None:
            return shape
        total = shape[cut]
        uneven = cut == 0 and halves == 1  # rows: what comes out is apart, and need not fit a next layer
        if total < self.size if uneven else total % (self.size * halves) != 0:
            raise InvalidArgumentError(
                f"{name}: {total} of {shape} cannot be cut over {self.size} ranks of the tp_group"
                + (f" in {halves} halves" if halves > 1 else "")
            )
        begin, end = self.range_of(total)
        return (*shape[:cut], end - begin, *shape[cut + 1 :])

    def cut_of(self, shape: tuple[int, ...], cut: int | None, halves: int) -> Cut | None:
        """This rank's part of a whole; None if every rank has all of it."""
        if cut is None or self.size == 1:
            return None
        return Cut(cut, halves, shape[cut], *self.range_of(shape[cut] // halves))

    def gather_parts(self, part: torch.Tensor, dim: int, halves: int, total: int) -> torch.Tensor:
        """The whole, of every rank's part. Collective over the tp_group."""
        sizes = [self.range_of(total // halves, rank) for rank in range(self.size)]
        most = max(end - begin for begin, end in sizes)
        blocks = []
        for block in part.chunk(halves, dim):
            own = block.new_zeros((*block.shape[:dim], most, *block.shape[dim + 1 :]))
            own.narrow(dim, 0, block.shape[dim]).copy_(block)
            found = [torch.empty_like(own) for _ in sizes]
            torch.distributed.all_gather(found, own, group=self.group)
            blocks += [each.narrow(dim, 0, end - begin) for each, (begin, end) in zip(found, sizes, strict=True)]
        return torch.cat(blocks, dim)

    def require_orthogonal(self, group: Group, name: str) -> None:
        """Throws unless all ranks of an ETP group have the same part. Collective over it."""
        own = struct.pack("=q", self.rank)
        for rank, other in enumerate(group.core.exchange(f"the parts of {name}", own)):
            if other != own:
                raise MismatchError(
                    f"{name}: ranks {group.rank} and {rank} of {group!r} are different ranks of their tp_group: it has "
                    "to be orthogonal to the ETP group, as the axes of a DeviceMesh are"
                )

    def mark(self, parameter: torch.Tensor, dim: int | None, cut: Cut | None) -> None:
        """By Megatron's attributes; and for norms, GradScaler and states. `dim`: that a parallel_mode cuts."""
        parameter.tensor_model_parallel = cut is not None  # type: ignore[attr-defined]
        parameter.partition_dim = -1 if dim is None else dim  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]
        if cut is not None:
            parameter.etp_parallel = self  # type: ignore[attr-defined]
            parameter.etp_cut = cut  # type: ignore[attr-defined]
            if not isinstance(parameter, LogicalParameter):
                parameter.register_post_accumulate_grad_hook(self._give_type)  # type: ignore[no-untyped-call]

    def _give_type(self, parameter: torch.Tensor) -> None:
        """To what autograd has accumulated."""
        gradient = parameter.grad
        if gradient is not None and not isinstance(gradient, (PartGradient, LogicalTensor)):
            parameter.grad = of_part(gradient, self)

    def of_all_ranks(self, value: float) -> list[float]:
        """Collective over the tp_group."""
        own = torch.tensor(value, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        torch.distributed.all_gather(found, own, group=self.group)
        return [float(each) for each in found]

    # --- activations

    def to_column(self, x: torch.Tensor) -> torch.Tensor:
        """The input of a layer whose outputs are cut."""
        if self.size == 1:
            return x
        return self._exchange(x, _gather, _scatter) if self.sequence else self._exchange(x, _same, _reduce)

    def from_row(self, x: torch.Tensor) -> torch.Tensor:
        """The output of a layer whose inputs are cut."""
        if self.size == 1:
            return x
        return self._exchange(x, _scatter, _gather) if self.sequence else self._exchange(x, _reduce, _same)

    def whole(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """A parameter that all ranks have, and use on their parts of the sequence: its gradients are added."""
        return self._exchange(parameter, _same, _reduce) if parameter is not None and self.sequence else parameter

    def _exchange(self, x: torch.Tensor, there: _Step, back: _Step) -> torch.Tensor:
        return _Exchange.apply(x, there, back, self.group)  # type: ignore[no-untyped-call, no-any-return]
