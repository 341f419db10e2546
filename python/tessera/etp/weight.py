"""What the package knows of a sharded weight: `p.etp`."""

from __future__ import annotations

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._C import _from_dlpack as from_dlpack  # of a capsule
from torch.utils.hooks import RemovableHandle

from .._core import Layout, Mesh, QuantizedCopy, RaggedShard, Replicate
from .._errors import InternalError, InvalidArgumentError
from .anchors import TOLD_OF_INPUTS, is_reached, led_to
from .chunks import Cut
from .gathered_rows import gather_rows
from .gradient_memory import GradientMemory
from .inline import Reduce
from .main_grad import Lent, main_grad_of
from .matrix import Matrix
from .phase import Phase
from .placeholder import Placeholder
from .post_hooks import PostHooks
from .shared_states import SharedRows, SharedStates
from .store import CopyRecipe, Spec, Store, agree, digest_of, refuse_difference, stamp_of
from .telling import telling
from .tensor import LogicalTensor, copy_of, is_sharded
from .uses import refuse_twice

if TYPE_CHECKING:
    from .experts import Experts
    from .layers._tensor_parallel import TensorParallel
    from .model import ShardedModel

# Attributes that belong to one object: the package's own (those of LogicalTensor, too), and memory of one shape.
_OF_ONE = frozenset(
    (
        "__reduce_ex__",
        "_outline",
        "_saved",
        "chain",
        "etp",
        "etp_cut_of",
        "etp_gradient",
        "etp_made",
        "etp_part",
        "etp_replicated",
        "grad_added_to_main_grad",
        "main_grad",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "rows",
        "sharded_as",
        "spec",
        "store",
    )
)
UNKNOWN = (-1, False)  # where the runtime adds: it is told again
_will_execute = torch._C._will_engine_execute_node
torchs_grad: Any = torch.Tensor.grad
_grad_of, _put_grad = torchs_grad.__get__, torchs_grad.__set__  # to be called where torch sees no subclasses
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def dtype_name(dtype: torch.dtype) -> str:
    """Of a dtype that a sharded weight can have."""
    return _DTYPES[dtype]


def can_shard(dtype: torch.dtype) -> bool:
    return dtype in _DTYPES


def keep_part(full: torch.Tensor, parameter: torch.Tensor) -> None:
    """Copy the attributes that a model, or tensor parallelism, has given a parameter: optimisers group by them."""
    for attribute, value in vars(full).items():
        if attribute not in _OF_ONE:
            setattr(parameter, attribute, value)


def stride_of(full: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides that the whole of a parameter keeps, which decide about kernels and hence bits, such as those
    of channels_last. None: it is contiguous, or becomes so as it does not fill its memory."""
    order = sorted(range(full.dim()), key=full.stride, reverse=True)
    if full.is_contiguous() or not full.permute(order).is_contiguous():
        return None
    return full.stride()


class Weight(Matrix):
    """What a sharded parameter is a part of; `p.etp`.

    Attributes:
        name: The dotted name in the model.
        shape: The logical one.
        matrix: [F, K]: the shape of what is cut along dim 0; of a stack, each expert's.
        lead: Dims in front of it: none, or (E,) of a stack.
        local: This rank's rows, [rows, K] behind `lead`, as a plain tensor over the parameter's memory; without a
            master, NaN.
        group: The etp.Group.
        rows: (begin, end) of this rank; of a stack, of each expert.
        shard_rows: Of every rank, with padding.
        format: What travels; empty: the parameter's dtype.
        native: The shard is its quantised planes, and the parameter is the master that they are made from.
        planes_only: It is native, and no master is kept: rows are in memory while they are being loaded.
        has_rows: Whether they are now.
        departed: It is in no module of its model any longer, and does not keep its parameter alive.
        compute: The dtype of the gathered weight.
        stride: The whole's; None: contiguous.
    """

    # Makes the parameter that a user sees: parameter.py, which imports this module, sets it.
    parameter_of: ClassVar[Callable[[Weight, bool], Any]]
    tensor_hooks: Any = None  # of register_hook(), which autograd does not call

    def __init__(
        self,
        model: ShardedModel,
        numbers: Sequence[int],
        name: str,
        full: torch.Tensor,
        matrix: torch.Size,
        format: str,
        compute: torch.dtype,
        native: bool = False,
        planes_only: bool = False,
    ) -> None:
        runtime, number = model.runtime, numbers[0]
        super().__init__(model, number, name, torch.Size(full.shape), full.dtype)
        self.numbers = numbers  # the runtime's: one, or each expert's
        self.matrix = matrix
        self.format = format
        self.compute = compute
        self.native = native
        self.planes_only = planes_only
        self.has_rows = True
        self.group = model.group
        self.rows = runtime.rows(number)
        self.shard_rows = runtime.shard_rows(number)
        self.hooks = PostHooks(full._post_accumulate_grad_hooks)
        self.fuses = False  # gradients are added to p.main_grad, and .grad stays as it is
        self.frozen = not full.requires_grad
        self.copied = True  # uses of it may write what they gather
        self.departed = False
        self.started = True  # else the ranks have not told each other where its rows lie
        self.together: Experts | None = None  # weights that are gathered with it
        self.local = rows = self._room()
        with torch.no_grad():
            rows.copy_(self.cut(full))
        self.stride = stride_of(full)
        self._store: Any = self._make_store()  # this and the parameter; once it has departed, references to them
        self._gradient: LogicalTensor | None = None
        self.tensor_hooks = full._backward_hooks
        self._parameter: Any = Weight.parameter_of(self, full.requires_grad)
        keep_part(full, self.parameter)
        full.sharded_as = name  # type: ignore[attr-defined]  # for optimisers that hold it still
        if model.inline:
            self.parameter._post_accumulate_grad_hooks = self.hooks.entries
            self.hooks = PostHooks()
        self.address = rows.data_ptr()
        # Of the round in flight: where folds add, and whether that is what .grad is or becomes.
        self._memory: torch.Tensor | None = None
        self._pointed: torch.Tensor | None = None  # what the runtime may still add to, also after an exception
        self._announced: int | None = None  # the micro-batch in which a use by the dispatcher has announced a gradient
        self._direct = True
        # An address, and whether a fold has yet to write there, as the runtime knows it.
        self._registered = (0, False)
        self.lent = Lent()
        self._unreduced: list[torch.Tensor] = []  # rows of inline reductions that have failed
        self._row_parameter: torch.nn.Parameter | None = None
        self._master: SharedRows | None = None  # where other ranks read a master that does not travel
        self._gradient_memory = GradientMemory()

    @property
    def parameter(self) -> Any:
        """Return what the model's modules have. None: it has departed, and nobody has that any longer."""
        return self._parameter() if self.departed else self._parameter

    @parameter.setter
    def parameter(self, parameter: Any) -> None:
        self._parameter = weakref.ref(parameter) if self.departed else parameter

    @property
    def gradient(self) -> LogicalTensor | None:
        """Return .grad of a deferred weight, which keeps the weight alive. The parameter has that of a departed one."""
        if not self.departed:
            return self._gradient
        parameter = self.parameter
        return None if parameter is None else parameter.__dict__.get("etp_gradient")

    @gradient.setter
    def gradient(self, gradient: LogicalTensor | None) -> None:
        if not self.departed:
            self._gradient = gradient
            return
        parameter = self.parameter
        if parameter is not None:
            parameter.__dict__["etp_gradient"] = gradient

    def has_lost_parameter(self) -> bool:
        """Tell whether what it has as its parameter has been swapped with another one."""
        parameter = self.parameter
        return not isinstance(parameter, LogicalTensor) or parameter.store.weight is not self

    @property
    def store(self) -> Store:
        """Return its rows as those of a logical tensor."""
        store: Store = self._store() if self.departed else self._store
        return store

    def _make_store(self) -> Store:
        """Return the rows as those of a logical tensor, in the whole's dims where they are slices of one."""
        lead = len(self.lead)
        sliced = self.shape[lead] == self.matrix[0]
        spec = Spec(self.group, self.shape, lead if sliced else None, self.matrix[0], self.shard_rows)
        rows = self.local
        if sliced:
            rows = rows.view(*self.lead, rows.shape[lead], *self.shape[lead + 1 :])
        kept = None if self.planes_only else rows
        stride, name = self.stride, self.name
        return Store(self.model, spec, kept, self.dtype, stride, name=name, kept=True, weight=self, held=self)

    @property
    def row_parameter(self) -> torch.nn.Parameter:
        """This rank's rows as a plain parameter, for the time of an elementwise optimiser's step."""
        if self._row_parameter is None:
            assert self.store.rows is not None
            self._row_parameter = torch.nn.Parameter(self.store.rows, requires_grad=True)
            self._row_parameter.etp_rows_of = weakref.ref(self)  # type: ignore[attr-defined]
        return self._row_parameter

    def asks_nobody(self) -> bool:
        """Tell whether its values can be pulled."""
        return not self.model.updating and (self.travels_as(False) or self._reads_master)

    @property
    def _reads_master(self) -> bool:
        return self._master is not None and self._master.readable

    @property
    def wants_master_shown(self) -> bool:
        """Tell whether its master does not travel, is kept, and other ranks do not know where it lies."""
        return self._master is None and not (self.planes_only or self.in_place)

    def show_master(self, states: SharedStates) -> None:
        """Let other ranks read its master alone. All ranks do so, while states may be written."""
        self._master = states.show(self.number, "master", self.local)

    def hide_master(self) -> None:
        """Other ranks cannot find it any longer."""
        self._master = None

    def pull(self, product: bool) -> torch.Tensor:
        """Return the whole weight, to be read, in its own dtype. A weight with a format has its master's values, except
        as a factor of a product, which takes what the format makes of them. Within an update ranks read what their rows
        are now; that, and what is decoded of a weight that is kept quantised only, is collective."""
        model = self.model
        if self.departed:
            model.damage.refuse_use(self)
        if model.is_unsharded:
            self._refuse_unsharded()
        if not (model.updating or self.travels_as(product)) and self._master is not None and self._reads_master:
            model.reading_phase()
            rows, spec = self.store.rows, self.store.spec
            assert rows is not None
            return self._master.read(f"the master of {self.name}", spec, rows, 0)[0]
        if model.updating or not self.travels_as(product):
            model.require_alone(f"a read of {self.name} that asks all ranks")
            return self.part_from(self.values())
        phase = model.reading_phase()
        self.follow_released()
        expects = phase is Phase.FORWARD and not (model.inline or self.frozen) and self._announced != model.micro_batch
        expects = expects and model.threads.trains_here()
        if expects:
            self._announced = model.micro_batch
        full, _ = self.gather(phase, expects)
        return full.to(self.dtype).view(self.shape)

    def travels_as(self, product: bool) -> bool:
        """Tell whether what travels has the values that are read: those of the master, or as a factor of a product."""
        return product or self.in_place or (self.planes_only and self.compute is self.dtype)

    @property
    def in_place(self) -> bool:
        """Whether what travels is the master."""
        return not self.format or (dtype_name(self.dtype) == self.format.lower() and self.compute is self.dtype)

    def rows_to_write(self) -> torch.Tensor:
        """Return the rows, within an update."""
        self.make_rows()
        return self.local if self.store.rows is None else self.store.rows

    def _room(self) -> torch.Tensor:
        """Memory of this rank's rows, which peers read unless the weight is native."""
        shape = (*self.lead, self.rows[1] - self.rows[0], self.matrix[1])
        capsule = None if self.native else self._shard()
        rows = torch.empty(shape, dtype=self.dtype) if capsule is None else from_dlpack(capsule)
        if rows.numel() != math.prod(shape) or (capsule is None and rows.numel() > 0 and not self.native):
            raise InternalError(f"{self.name}: {rows.numel()} elements, not {shape}")
        if self.native:
            self._set_master(rows)
        return rows.view(shape)

    @property
    def lead(self) -> torch.Size:
        return torch.Size()

    def _shard(self) -> Any:
        return self.model.runtime.shard(self.number)

    @property
    def parallel(self) -> TensorParallel | None:
        """Tensor parallelism that has cut it before."""
        return getattr(self.parameter, "etp_parallel", None)

    @property
    def tp_cut(self) -> Cut | None:
        return getattr(self.parameter, "etp_cut", None)

    def _set_master(self, rows: torch.Tensor) -> None:
        self.model.runtime.set_master(self.number, rows.data_ptr(), dtype_name(self.dtype))

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor of the logical shape, as a view where that can be."""
        return full.reshape(self.matrix)[self.rows[0] : self.rows[1]]

    def rename(self, name: str) -> None:
        self.name = name

    @property
    def next(self) -> Weight | None:
        """What is expected to be used after its first use in a step; None before that is known."""
        return self._numbered(self.model.runtime.status(self.number).next)

    @property
    def prev(self) -> Weight | None:
        """And before it."""
        return self._numbered(self.model.runtime.status(self.number).prev)

    def _numbered(self, number: int | None) -> Weight | None:
        found = next((each for each in self.model.weights if number in each.numbers), None)
        return found if isinstance(found, Weight) else None

    @property
    def pad_length(self) -> int:
        """Rows of padding, over all ranks."""
        return self.shard_rows * self.group.size - self.matrix[0]

    @property
    def is_padded_last_rank(self) -> bool:
        """Whether this rank has fewer rows than shard_rows."""
        return self.rows[1] - self.rows[0] < self.shard_rows

    @property
    def bounds(self) -> list[int]:
        """Rank r of the group has rows bounds[r] to bounds[r + 1]."""
        return [min(rank * self.shard_rows, self.matrix[0]) for rank in range(self.group.size + 1)]

    @property
    def layout(self) -> Layout:
        """Of [lead, F, K], over the ranks of the job that have it. If nobody numbers these, rank d * N + r is rank r
        of replica d."""
        return self.layout_of(len(self.lead), self.bounds)

    def layout_of(self, dim: int, bounds: Sequence[int]) -> Layout:
        """Of a view of it, which those bounds cut along `dim`."""
        mesh = Mesh([self.model.replicas, self.group.size], ["dp", "etp"], self.model.job_ranks)
        return Layout(mesh, [Replicate(), RaggedShard(dim, bounds)])

    @functools.cached_property
    def published(self) -> QuantizedCopy | None:
        """This rank's rows as they are published, for the tensor bus; None if they are not quantised."""
        return self.model.runtime.quantized_copy(self.numbers) if self.format else None

    def __repr__(self) -> str:
        return f"Weight({self.name!r}, rows={self.rows}, shape={tuple(self.shape)}, format={self.format!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        return self  # of what is copied, too, such as a state that is staged

    # --- uses

    def gather(
        self, phase: Phase, expects_backward: bool = False, version: int | None = None
    ) -> tuple[torch.Tensor, int]:
        self.follow_released()
        if self.departed:
            self.model.damage.refuse_use(self)
        if self.model.is_unsharded:
            self._refuse_unsharded()
        if self.together is not None and version in (None, self.version) and self.model.threads.trains_here():
            return self.together.one(self.number, phase, expects_backward)
        return Matrix.gather(self, phase, expects_backward, version)

    def _refuse_unsharded(self) -> None:
        """Throw for a use of what unshard_() has made whole."""
        raise InvalidArgumentError(
            f"{self.name} is used as it was sharded, and etp.unshard_() has made its model whole: take the parameters "
            "that its modules have now"
        )

    def wanted(self) -> bool:
        """Tell whether the backward that is under way is to give it a gradient: one with inputs= may not, and it may
        have been frozen since its forward."""
        if not self._trains():
            return False
        chosen = self.model.wanted
        if chosen is not None:
            return self.number in chosen
        if TOLD_OF_INPUTS:
            return _will_execute(self.model.anchor_node)
        return is_reached(self.parameter)

    def _trains(self) -> bool:
        """Tell whether its parameter wants a gradient now."""
        parameter = self.parameter
        with DisableTorchFunctionSubclass():
            return parameter is None or bool(parameter.requires_grad)

    def anchor(self) -> torch.Tensor:
        """What the graph of a use has in its place."""
        return self.model.anchor if TOLD_OF_INPUTS else led_to(self.model.anchor, (self.parameter,))

    def prepare(self) -> None:
        if self._memory is None:
            with DisableTorchFunctionSubclass():
                self.register()

    def lend(self) -> torch.Tensor:
        """Room for a gradient of the whole weight; take_back() then produces it."""
        return self.lent.lend(*self.room())

    def take_back(self, gradient: torch.Tensor) -> None:
        buffer = self.lent.take(gradient, self.name)
        assert buffer is not None
        self.model.enter_backward()
        self.produce(buffer)

    # --- gradients that arrive at the parameter

    def arrive(self, gradient: torch.Tensor) -> torch.Tensor:
        """Take the whole gradient that autograd has for the parameter. Returns what autograd is to accumulate."""
        if self.model.inline:
            reduced: torch.Tensor = Reduce.apply(gradient, self)  # type: ignore[no-untyped-call]
            for hook in list((self.tensor_hooks or {}).values()):
                reduced = self._hooked(hook, reduced)
            return reduced
        refuse_twice(self)
        self.model.enter_backward()
        if self._trains() and (self.model.wanted is None or self.number in self.model.wanted):
            with torch.no_grad():
                self.give(_dense(gradient))
        if gradient.is_sparse:  # autograd wants one of the same layout, and has no operations on a placeholder of it
            return torch.zeros(gradient.shape, dtype=gradient.dtype, layout=torch.sparse_coo)
        return Placeholder.like(self.parameter)

    def _hooked(self, hook: Callable[[torch.Tensor], Any], reduced: torch.Tensor) -> torch.Tensor:
        """Return what a hook makes of a reduced gradient. It gets a copy: autograd would make .grad a plain tensor
        where the hook keeps what becomes it."""
        if not is_sharded(reduced) or reduced.requires_grad:
            replaced = hook(reduced)
            return reduced if replaced is None else replaced
        shown = copy_of(reduced)
        shown.store.recipe = CopyRecipe(reduced.store)
        replaced = hook(shown)
        if replaced is None or replaced is shown:
            if shown.store.writes > 0 and reduced.rows is not None:
                assert shown.rows is not None
                reduced.rows.copy_(shown.rows)
                reduced.store.move_stamp(shown.store.stamp)
            return reduced
        return self.as_gradient(replaced) if not replaced.requires_grad else replaced

    def register_tensor_hook(self, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
        if self.tensor_hooks is None:
            self.tensor_hooks = OrderedDict()
        handle = RemovableHandle(self.tensor_hooks)
        self.tensor_hooks[handle.id] = hook
        return handle

    def as_gradient(self, value: torch.Tensor) -> LogicalTensor:
        """Return what .grad becomes by an assignment. A whole plain tensor is compared over the ranks."""
        with telling(f".grad = of sharded parameter {self.name}", [self.model.member.family]):
            return self._as_gradient(value)

    def _as_gradient(self, value: torch.Tensor) -> LogicalTensor:
        if value.dtype is not self.dtype or value.shape != self.shape:
            raise RuntimeError(
                f"assigned grad of sharded parameter {self.name} is {value.dtype} of {tuple(value.shape)}, and the "
                f"parameter {self.dtype} of {tuple(self.shape)}: give a tensor like it, or etp.from_local(rows, like=p)"
            )
        if is_sharded(value) and value.rows is not None and self.store.spec.is_like(value.spec):
            if not value.chain and value.store.weight is None:
                value.store.kept, value.store.held = True, self
                value.store.name = value.store.name or f"the gradient of {self.name}"
                self._show_assigned(value.store)
                return value
            return self.gradient_of(value.rows.detach().clone(), value.store.stamp)
        what = f".grad = of sharded parameter {self.name}"
        with torch.no_grad():
            whole = _dense(value).detach()
            if not agree(self.store, what, digest_of([whole])):
                raise refuse_difference(what)
            rows = self.cut(whole)
            apart = self.model.in_backward() and not self.model.inline
            if self.model.updating or apart:  # ranks may be at different places
                return self.gradient_of(rows.clone(memory_format=torch.contiguous_format))
            with self.model.writing_states():
                return self.shown_gradient(rows)

    def _show_assigned(self, store: Store) -> None:
        """Let other ranks read what a program has made of gradients, where they read private memory. Within updates and
        backwards ranks may be at different places."""
        states, rows = self.model.states, store.rows
        if states is None or rows is None or store.shared is not None or not states.reads_private:
            return
        if rows.is_contiguous() and not (states.writing or states.adding or self.model.updating):
            store.shared = states.show_assigned(self.number, rows, store.stamp)

    def gradient_of(self, rows: torch.Tensor, stamp: int = 0) -> LogicalTensor:
        """Return a gradient that has these rows."""
        spec = self.store.spec
        if spec.dim is not None:
            rows = rows.view(*self.lead, rows.shape[len(self.lead)], *self.shape[len(self.lead) + 1 :])
        name = f"the gradient of {self.name}"
        stride = self.stride
        store = Store(self.model, spec, rows, rows.dtype, stride, stamp, name, kept=True, held=self)
        return LogicalTensor.of(store)

    def shown_gradient(self, rows: torch.Tensor, stamp: int = 0) -> LogicalTensor:
        """Return a gradient that has these rows, in memory that other ranks read. All ranks make it, while states may
        be written."""
        states = self.model.states
        if states is None:
            return self.gradient_of(rows, stamp)
        rows, shared = self._gradient_memory.show(rows, states, self.number)
        gradient = self.gradient_of(rows, stamp)
        gradient.store.shared = shared
        shared.note(stamp)
        return gradient

    def rows_as_value(self, rows: torch.Tensor) -> LogicalTensor:
        """Return a tensor, not kept, that has these rows."""
        spec = self.store.spec
        if spec.dim is not None:
            rows = rows.reshape(*self.lead, rows.shape[len(self.lead)], *self.shape[len(self.lead) + 1 :])
        return LogicalTensor.of(Store(self.model, spec, rows, rows.dtype, self.stride, name=self.name, held=self))

    def state_of(self, key: str, rows: torch.Tensor) -> LogicalTensor:
        """Return an optimiser's state that has these rows; within an update, in memory that other ranks read."""
        spec, states = self.store.spec, self.model.states
        name = f"the state {key!r} of {self.name}"
        placed = None if states is None else states.place(self.number, key, rows)
        rows, shared = (rows, None) if placed is None else placed
        store = Store(self.model, spec, rows, rows.dtype, self.stride, name=name, kept=True, held=self)
        store.saved, store.shared = True, shared
        return LogicalTensor.of(store)

    @property
    def scale(self) -> float:
        return self.model.scale

    def reduce(self, gradient: torch.Tensor) -> LogicalTensor:
        """Return the scaled sum of all ranks' gradients, in the parameter's dtype. Collective."""
        model = self.model
        model.enter_backward()
        model.core.exchange(f"the gradient of {self.name}", b"")  # that ranks differ is an error with both names
        rows = torch.zeros(self.local.shape, dtype=torch.float32 if self.dtype == torch.float16 else self.dtype)
        self._point_at(rows)
        try:
            self.send(_dense(gradient))
            model.runtime.drain()
        except BaseException:
            # The runtime may still add to these rows, and then refuses to forget them: that must not hide the cause.
            self._unreduced.append(rows)
            raise
        self._point_at(None)
        with model.writing_states():
            return self.shown_gradient(rows.to(self.dtype))

    def part_from(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks' rows, in the logical shape; the tp_group's part. Collective."""
        return gather_rows(self.group.core, self, rows).view(self.shape)

    # --- without a master

    def values(self) -> torch.Tensor:
        """This rank's rows: its memory or, where they are not in memory, a copy of what uses of the weight see."""
        if self.has_rows:
            return self.local
        rows = torch.empty(self.local.shape, dtype=self.dtype)
        self._read_rows(rows)
        return rows

    def _read_rows(self, into: torch.Tensor) -> None:
        self.model.runtime.read_rows(self.number, into.data_ptr(), dtype_name(self.dtype))

    def make_rows(self, publishes: bool = True) -> None:
        """Within an update, on all ranks: they are in memory until its end, which publishes them."""
        if not self.has_rows:
            rows = self.values()
            if publishes:
                self._set_master(rows)
            self._put_rows(rows, True)

    def drop_rows(self) -> None:
        """Once they are published."""
        if self.planes_only and self.has_rows:
            self._put_rows(torch.full((1,), torch.nan, dtype=self.dtype).expand(self.local.shape), False)

    def _put_rows(self, rows: torch.Tensor, kept: bool) -> None:
        self.local, self.address, self.has_rows = rows, rows.data_ptr(), kept

    def require_rows(self) -> None:
        if not self.has_rows:
            raise InvalidArgumentError(
                f"{self.name} is kept as {self.format} only, and no rows of it are in memory: etp.whole(p) and "
                "state_dict() give the values that uses of it see, load_state_dict() new ones; masters='all' keeps the "
                "rows"
            )

    def require_trainable(self) -> None:
        if self.planes_only:
            raise InvalidArgumentError(
                f"{self.name} is kept as {self.format} only, without a master that could be trained: shard it with "
                "masters='all', or before it is frozen"
            )

    # --- gradients

    def register(self) -> None:
        """Says where the next folds add: into .grad where that can be, for rounding and the order of additions are then
        those of one process. Called where torch sees no subclasses."""
        if self.fuses and self.parameter is not None:
            self._memory = main_grad_of(self.parameter, self.name, self.local.shape)
            self._point_at(self._memory)
            return
        grad = self.gradient
        direct = not self.tensor_hooks and self.dtype is not torch.float16 and not self.model.rescales
        if direct and grad is not None and grad.rows is not None and grad.rows.is_contiguous():
            self._memory, self._direct = grad.rows.view(self.local.shape), True
            self._point_at(self._memory)
            return
        self._direct = direct and grad is None
        rows = self.local
        if self._direct and self.group.size > 1:
            self._memory = memory = self._gradient_memory.room(rows)
        else:
            dtype = torch.float32 if self.dtype is torch.float16 else self.dtype
            self._memory = memory = torch.empty_like(rows, dtype=dtype)
        self._point_at(memory, empty=True)

    def before_drain(self) -> None:
        """Other ranks may have gradients for these rows where this one had none. Called where torch sees no subclasses,
        as after_drain()."""
        if self._memory is not None or self.frozen or self.model.inline:
            return
        if self.fuses or self.gradient is not None:
            self.register()
        else:
            self._point_at(None)

    def _point_at(self, memory: torch.Tensor | None, empty: bool = False) -> None:
        self._pointed = memory
        place = (0 if memory is None else memory.data_ptr(), empty)
        if place != self._registered:
            self._set_gradient(memory, dtype_name(self.dtype if memory is None else memory.dtype), empty)
            self._registered = place
        if self.departed:
            self.model.departed.receive(self, memory is not None)

    def _set_gradient(self, memory: torch.Tensor | None, dtype: str, empty: bool) -> None:
        address = 0 if memory is None else memory.data_ptr()
        self.model.runtime.set_gradient(self.number, address, dtype, empty)

    def release(self) -> None:
        """Let go of where gradients are added: the runtime has ended."""
        self._pointed = None

    def receive_no_more(self) -> None:
        """Have the runtime add to memory of its own: it may die now, and with it the memory that it has shown."""
        self._point_at(None)

    def before_abandon(self) -> None:
        """Other ranks may have gradients for these rows, which are worth nothing, and are added somewhere nevertheless:
        where this backward's are, or in memory of the runtime. Called where torch sees no subclasses."""
        if self._pointed is None and not self.frozen and not self.model.inline:
            self._point_at(None)

    def after_abandon(self) -> None:
        """Nothing is under way. Called where torch sees no subclasses."""
        self.after_drain(set())
        self._pointed, self._registered = None, UNKNOWN
        if self.departed:
            self.receive_no_more()

    def is_among(self, added: set[int]) -> bool:
        """Whether a gradient of it has been added, by numbers of the runtime."""
        return self.number in added

    def after_drain(self, added: set[int]) -> None:
        """Makes .grad of what has been added."""
        memory, self._memory = self._memory, None
        self._announced = None
        self.lent.clear()
        parameter = self.parameter
        if not self.model.inline and parameter is not None:
            _put_grad(parameter, None)  # autograd's placeholder
        if self.together is not None:
            self.together.clear()
        if self.is_among(added):
            self._registered = (self._registered[0], False)
            if parameter is not None:
                self._take_added(parameter, memory, added)

    def _take_added(self, parameter: Any, memory: torch.Tensor | None, added: set[int]) -> None:
        """Have .grad be what has been added to `memory`; None: to the runtime's."""
        if self.fuses:
            parameter.grad_added_to_main_grad = True
            return
        if memory is None:  # only other ranks had a gradient
            memory = self._from_runtime(added)
            self._direct = self.gradient is None and not self.tensor_hooks and not self.model.rescales
        if self._direct:
            if self.gradient is None:
                self.gradient = self.shown_gradient(memory)
            else:
                _note_added(self.gradient, self.gradient.store.stamp, 0)
            return
        if self.model.rescales:
            memory = memory.mul(self.model.factor)
        gradient: Any = self.shown_gradient(memory.to(self.dtype))
        for hook in list((self.tensor_hooks or {}).values()):
            replaced = hook(gradient)
            gradient = gradient if replaced is None else self.as_gradient(replaced)
        if gradient.store.shared is None and gradient.store.rows is not None:
            gradient = self.shown_gradient(gradient.store.rows, gradient.store.stamp)
        if self.gradient is None:
            self.gradient = gradient
        else:
            before = self.gradient.store.stamp
            _note_added(self.gradient.add_(gradient), before, gradient.store.stamp)

    def discard(self) -> None:
        """What is accumulated is worth nothing. Some of it may have been added where the next gradient will lie."""
        self.gradient = None
        self._registered = UNKNOWN
        if self.parameter is None:
            return
        if self.model.inline:
            _put_grad(self.parameter, None)
        if self.fuses:
            main_grad_of(self.parameter, self.name, self.local.shape).zero_()

    def _from_runtime(self, added: set[int]) -> torch.Tensor:
        if self.local.numel() == 0:
            return torch.zeros_like(self.local)
        own = torch.zeros_like(self.local, dtype=torch.float32 if self.dtype == torch.float16 else self.dtype)
        self._take_gradient(own, added)
        return own

    def _take_gradient(self, into: torch.Tensor, added: set[int]) -> None:
        self.model.runtime.take_gradient(self.number, into.data_ptr())

    # --- structure

    def depart(self) -> None:
        """Be in no module of its model any longer. Whoever has the parameter may use it on. REQUIRES: no gradient is
        under way."""
        self._row_parameter = None
        self._point_at(None)
        parameter, store = self.parameter, self.store
        self.departed = True
        self._parameter, self._store = weakref.ref(parameter), weakref.ref(store)
        if not isinstance(parameter, LogicalTensor):  # which has been swapped with another one
            self._parameter = _nothing
        self.gradient, self._gradient = self._gradient, None
        together = self.together
        if together is not None and all(each.departed for each in together.weights):
            for each in together.weights:
                each.together = None

    def come_back(self, parameter: Any) -> None:
        """Be a module's again, which has this parameter of it."""
        store, gradient = self.store, self.gradient
        self.gradient = None  # of the parameter
        self.departed = False
        self._parameter, self._store, self._gradient = parameter, store, gradient

    # --- updates

    def follow_released(self) -> None:
        """Follow a weight that is trained again, where no forward of the root has told."""
        if self.frozen and self.model.idle and self.model.threads.trains_here():
            with DisableTorchFunctionSubclass():
                if self.parameter.requires_grad:
                    self.follow_frozen()

    def follow_frozen(self) -> None:
        """Called with torch functions of subclasses disabled."""
        if self.parameter is None:
            return
        frozen = not self.parameter.requires_grad
        if frozen != self.frozen:
            self.require_trainable()
            for number in self.numbers:
                self.model.runtime.set_frozen(number, frozen)
            self.frozen = frozen
            if frozen:
                self._gradient_memory = GradientMemory()


def _nothing() -> None:
    """Stand for a reference to a parameter that is not known."""


def _note_added(gradient: Any, before: int, added: int) -> None:
    """Give a gradient a stamp that tells which backwards it is of, and not how they were added: one rank may have
    dropped what was accumulated before, or alone have a hook that looks at gradients."""
    gradient.store.move_stamp(stamp_of("a backward", [], [before, added]))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a whole, dense gradient."""
    if isinstance(gradient, LogicalTensor):
        gradient = gradient.whole()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
