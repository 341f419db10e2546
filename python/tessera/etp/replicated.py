"""Parameters that every rank has whole (norms, biases, what is too small to be cut): their gradients are added over the
group when its ranks meet, and hooks get what has been added, as those of sharded weights do."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction
from torch.utils.hooks import RemovableHandle

from .post_hooks import PostHooks
from .state_names import forget_name
from .weight import can_shard, dtype_name, keep_part

if TYPE_CHECKING:
    from .model import ShardedModel


TensorHook = Callable[[torch.Tensor], Any]

_register_hook: Callable[..., RemovableHandle] = torch.Tensor.register_hook  # which gradient_hooks.py replaces


def is_replicated(parameter: torch.Tensor) -> bool:
    """Whether it is one of them, or was until a wrapper took it."""
    return hasattr(parameter, "etp_replicated")


def replicated_of(parameter: Any) -> Replicated | None:
    """Return what its model knows of a parameter; None: it is no such parameter, or a wrapper has taken it."""
    found = parameter.__dict__.get("etp_replicated") if issubclass(type(parameter), torch.nn.Parameter) else None
    return found() if isinstance(found, weakref.ref) else None


class Replicated:
    """One of them. Autograd would add this backward's gradient to .grad at once: what has been accumulated before is
    put aside meanwhile, as the additions begin with it."""

    def __init__(self, model: ShardedModel, name: str, parameter: torch.nn.Parameter) -> None:
        self.model = model
        self.name = name
        self.parameter = parameter
        self._number: int | None = None  # in the runtime; None: it does not know the dtype
        self._form: tuple[int, torch.dtype] = (0, parameter.dtype)  # which the runtime knows
        self._add()
        self.hooks = PostHooks()
        self.tensor_hooks: OrderedDict[int, TensorHook] = OrderedDict()
        self._fresh = False  # .grad is of this backward only
        self._ranks = 0  # that had a gradient in this backward
        self._before: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._handle: RemovableHandle | None = None
        parameter.etp_replicated = True  # type: ignore[attr-defined]

    def _add(self) -> None:
        """Add it to the runtime: as it is now, which an assignment of .data may have changed."""
        parameter = self.parameter
        self._form, self._number = (parameter.numel(), parameter.dtype), None
        if can_shard(parameter.dtype):
            self._number = self.model.runtime.add_replicated(self.name, parameter.numel(), dtype_name(parameter.dtype))

    def attach(self) -> None:
        """Autograd would call hooks before the other ranks' gradients are there: they are kept here. Their handles know
        the dict that they are in."""
        parameter: Any = self.parameter
        parameter.etp_replicated = weakref.ref(self)
        if parameter._backward_hooks and self._handle is None:
            self.tensor_hooks, parameter._backward_hooks = parameter._backward_hooks, None
        if parameter._post_accumulate_grad_hooks:
            self.hooks = PostHooks(parameter._post_accumulate_grad_hooks)
            parameter._post_accumulate_grad_hooks = OrderedDict()  # None would leave autograd the old one
        parameter.__dict__["__reduce_ex__"] = self._reduce
        self.follow()

    def _reduce(self, protocol: Any) -> Any:
        """Be a plain parameter in a file, with the attributes that are the program's."""
        plain = torch.nn.Parameter(self.parameter.detach(), self.parameter.requires_grad)
        keep_part(self.parameter, plain)
        forget_name(plain)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def hooked(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what tensor hooks make of a gradient."""
        for hook in list(self.tensor_hooks.values()):
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
        return gradient

    def detach(self) -> None:
        """Leaves the parameter as it was."""
        self.parameter.__dict__["etp_replicated"] = True
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.parameter.__dict__.pop("__reduce_ex__", None)
        if self.hooks:
            self.parameter._post_accumulate_grad_hooks = self.hooks.entries
        if self.tensor_hooks:
            self.parameter._backward_hooks = self.tensor_hooks

    def forget(self) -> None:
        """Leave a parameter that is the model's no longer."""
        self.detach()
        self.parameter.__dict__.pop("etp_replicated", None)

    def register_tensor_hook(self, hook: TensorHook) -> RemovableHandle:
        """Register what is called with each backward's gradient of all ranks, and may return another one."""
        if not self.parameter.requires_grad:  # as torch says
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        handle = RemovableHandle(self.tensor_hooks)
        self.tensor_hooks[handle.id] = hook
        return handle

    def follow(self) -> None:
        """Have this backward's gradient told. A parameter that wants no gradient takes no hook."""
        attribute = self.parameter.__dict__.get("etp_replicated")
        if self._handle is not None and (attribute is True or attribute is None or attribute() is not self):
            # torch.utils.swap_tensors() has given it the attributes of another one, and what its hooks are called for.
            self._handle.remove()
            self._handle = None
            self.parameter._backward_hooks = None
            self.attach()
        elif self._handle is None and self.parameter.requires_grad:
            if not self.parameter._backward_hooks:
                self.parameter._backward_hooks = None  # a dict that torch.utils.swap_tensors() has left is not called
            with DisableTorchFunction():  # `with torch.device(...)` would come to what replaces it
                self._handle = _register_hook(self.parameter, self._arrives)

    def _arrives(self, _: torch.Tensor) -> None:
        self.model.enter_backward()
        if not self._fresh:
            self._fresh = True
            self._before, self.parameter.grad = self.parameter.grad, None

    def give(self) -> None:
        parameter = self.parameter
        self._ranks = 0
        if self._form != (parameter.numel(), parameter.dtype):
            self._add()
        if self._fresh:
            self._fresh = False
            self._gradient, parameter.grad = parameter.grad, self._before
            self._before = None
        elif not parameter.requires_grad:
            return
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            parameter.grad = parameter.grad.to_dense()
        if self._gradient is not None:
            self._gradient = self._gradient.to_dense() if self._gradient.is_sparse else self._gradient
            self._gradient = self._gradient.contiguous()
        if self._number is None:
            return
        if parameter.grad is not None and not self._changes_sums:
            self._sum = parameter.grad.contiguous()
        elif self._gradient is not None:
            self._sum = self._gradient
        else:
            self._sum = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        gradient = 0 if self._gradient is None else self._gradient.data_ptr()
        self.model.runtime.give_replicated(self._number, gradient, self._sum.data_ptr(), dtype_name(parameter.dtype))

    @property
    def _changes_sums(self) -> bool:
        """Tell whether the runtime adds to other memory than .grad."""
        return self.model.rescales or bool(self.tensor_hooks) or self._number is None

    @property
    def is_beside_runtime(self) -> bool:
        """Tell whether the runtime cannot add its gradients: they are of float64, or complex."""
        return self._number is None

    def take_sum(self, total: torch.Tensor | None) -> None:
        """Take what all ranks' gradients of this backward add up to, beside the runtime; None: no rank has one."""
        self._sum, self._ranks = total, int(total is not None)

    def was_given(self, ranks: Sequence[int]) -> None:
        """Note how many ranks had a gradient in this backward: `ranks` has it for each number of the runtime."""
        if self._number is not None:
            self._ranks = ranks[self._number]

    @property
    def added_gradient(self) -> torch.Tensor | None:
        """Return what has been added over the ranks: within a backward, that of earlier ones."""
        return self._before if self._fresh else self.parameter.grad

    @property
    def fresh_gradient(self) -> torch.Tensor | None:
        """This rank's gradient of the backward that has ended, between give() and take()."""
        return self._gradient

    @property
    def wants_gradient(self) -> bool:
        """Tell whether it is trained, or has got a gradient in the backward that is under way."""
        return self._fresh or self.parameter.requires_grad

    def has_none(self) -> bool:
        """Tell whether nothing had been accumulated before this backward."""
        return self.added_gradient is None

    def put_back(self) -> None:
        """Forget the gradient of a backward that has not ended."""
        if self._fresh:
            self._fresh = False
            self.parameter.grad, self._before = self._before, None
        self._gradient = self._sum = None

    def discard(self) -> None:
        self._sum = self._gradient = self.parameter.grad = None

    def take(self) -> bool:
        """Make .grad of the sum, and tell whether a rank had a gradient."""
        parameter, result = self.parameter, self._sum
        self._sum = self._gradient = None
        if result is None or self._ranks == 0:
            return False
        if self._changes_sums:
            result = self.hooked(result * self.model.factor if self.model.rescales else result)
            if parameter.grad is not None:
                parameter.grad.add_(result)
                return True
        if parameter.grad is None:
            parameter.grad = result
        elif parameter.grad.data_ptr() != result.data_ptr():
            parameter.grad.copy_(result)
        return True
