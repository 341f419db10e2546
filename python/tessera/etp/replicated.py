"""Parameters that every rank has whole (norms, biases, what is too small to be cut): their gradients are added over the
group when its ranks meet."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from .post_hooks import PostHook, PostHooks
from .weight import dtype_name

if TYPE_CHECKING:
    from .model import ShardedModel


def is_replicated(parameter: torch.Tensor) -> bool:
    """Whether it is one of them, or was until a wrapper took it."""
    return hasattr(parameter, "etp_replicated")


class Replicated:
    """One of them. Autograd would add this backward's gradient to .grad at once: what has been accumulated before is
    put aside meanwhile, as the additions begin with it."""

    def __init__(self, model: ShardedModel, number: int, name: str, parameter: torch.nn.Parameter) -> None:
        self.model = model
        self.number = number
        self.name = name
        self.parameter = parameter
        self.hooks = PostHooks()
        self._fresh = False  # .grad is of this backward only
        self._before: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._handle: RemovableHandle | None = None
        parameter.etp_replicated = True  # type: ignore[attr-defined]

    def attach(self) -> None:
        """Autograd would call post-accumulate hooks before the other ranks' gradients are there: they are kept here.
        Their handles know the dict that they are in."""
        parameter = self.parameter
        if parameter._post_accumulate_grad_hooks:
            self.hooks = PostHooks(parameter._post_accumulate_grad_hooks)
            parameter._post_accumulate_grad_hooks = OrderedDict()  # None would leave autograd the old one
        parameter.register_post_accumulate_grad_hook = self.register_hook  # type: ignore[method-assign]
        self.follow()

    def detach(self) -> None:
        """Leaves the parameter as it was."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.parameter.__dict__.pop("register_post_accumulate_grad_hook", None)
        if self.hooks:
            self.parameter._post_accumulate_grad_hooks = self.hooks.entries

    def forget(self) -> None:
        """Leave a parameter that is the model's no longer."""
        self.detach()
        self.parameter.__dict__.pop("etp_replicated", None)

    def register_hook(self, hook: PostHook) -> RemovableHandle:
        return self.hooks.register(hook)

    def follow(self) -> None:
        """A parameter that wants no gradient takes no hook."""
        if self._handle is None and self.parameter.requires_grad:
            self._handle = self.parameter.register_hook(self._arrives)  # type: ignore[no-untyped-call]

    def _arrives(self, _: torch.Tensor) -> None:
        self.model.enter_backward()
        if not self._fresh:
            self._fresh = True
            self._before, self.parameter.grad = self.parameter.grad, None

    def give(self) -> None:
        parameter = self.parameter
        if self._fresh:
            self._fresh = False
            self._gradient, parameter.grad = parameter.grad, self._before
            self._before = None
        elif not parameter.requires_grad:
            return
        if self._gradient is not None:
            self._gradient = self._gradient.to_dense() if self._gradient.is_sparse else self._gradient
            self._gradient = self._gradient.contiguous()
        if parameter.grad is not None and not self.model.rescales:
            self._sum = parameter.grad.contiguous()
        elif self._gradient is not None:
            self._sum = self._gradient
        else:
            self._sum = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        gradient = 0 if self._gradient is None else self._gradient.data_ptr()
        self.model.runtime.give_replicated(self.number, gradient, self._sum.data_ptr(), dtype_name(parameter.dtype))

    def has_none(self) -> bool:
        """Tell whether nothing had been accumulated before this backward."""
        return (self._before if self._fresh else self.parameter.grad) is None

    def put_back(self) -> None:
        """Forget the gradient of a backward that has not ended."""
        if self._fresh:
            self._fresh = False
            self.parameter.grad, self._before = self._before, None
        self._gradient = self._sum = None

    def discard(self) -> None:
        self._sum = self._gradient = self.parameter.grad = None

    def take(self) -> bool:
        """Makes .grad of the sum; returns whether there is one."""
        parameter, result, gradient = self.parameter, self._sum, self._gradient
        self._sum = self._gradient = None
        if result is None:
            return False
        if self.model.rescales:
            result = result * self.model.factor
            if parameter.grad is not None:
                parameter.grad.add_(result)
                return gradient is not None
        if parameter.grad is None:
            if gradient is None and not bool(result.any()):
                return False  # no rank had one
            parameter.grad = result
        elif parameter.grad.data_ptr() != result.data_ptr():
            parameter.grad.copy_(result)
        return gradient is not None
