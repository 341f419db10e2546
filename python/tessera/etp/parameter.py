"""The parameter that a user sees: a logical tensor over a weight's rows in shared memory."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType
from typing import Any, ClassVar

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch.utils.hooks import RemovableHandle

from .._errors import InvalidArgumentError, UnimplementedError
from .compile import left_out, opaque
from .post_hooks import PostHook
from .refusals import refuse_fully_shard
from .registered import RowsSource
from .stack import PARTS, Stack, expert_uses
from .tensor import LogicalTensor, is_sharded
from .tracers import refuse_tracers
from .weight import Weight, keep_part, torchs_grad

_torchs_hooks: Any = torch.Tensor._backward_hooks
# gradient_hooks.py replaces it.
_register_post_hook: Callable[..., RemovableHandle] = torch.Tensor.register_post_accumulate_grad_hook
_tracing_state = torch._C._get_tracing_state
_makes_parameters = torch.nn.Parameter.__new__.__code__
_CUTS = (torch.chunk, torch.Tensor.chunk)
_TORCH = os.sep + "torch" + os.sep  # in names of files
_asks_operands = torch.overrides.handle_torch_function.__code__


@left_out
def _grad_of(parameter: LogicalParameter) -> torch.Tensor | None:
    weight = parameter.etp
    if not weight.model.inline:
        if weight.parameter is not parameter and weight.has_lost_parameter():
            weight.parameter = parameter
        return weight.gradient if weight.parameter is parameter else None
    with DisableTorchFunctionSubclass():
        return torchs_grad.__get__(parameter)  # type: ignore[no-any-return]


@left_out
def _set_grad(parameter: LogicalParameter, gradient: torch.Tensor | None) -> None:
    weight = parameter.etp
    if gradient is not None and not isinstance(gradient, torch.Tensor):  # in torch's words
        raise TypeError(f"assigned grad expected to be a Tensor or None but got grad of type {type(gradient).__name__}")
    taken = None if gradient is None else weight.as_gradient(gradient)
    if not weight.model.inline:
        weight.gradient = taken
        return
    with DisableTorchFunctionSubclass():
        torchs_grad.__set__(parameter, taken)


@left_out
def _forget_grad(parameter: LogicalParameter) -> None:
    _set_grad(parameter, None)


def _hooks_of(parameter: LogicalParameter) -> Any:
    """Return those of register_hook()."""
    return parameter.etp.tensor_hooks


def _set_hooks(parameter: LogicalParameter, hooks: Any) -> None:
    parameter.etp.tensor_hooks = hooks


def _replaced_by(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of torch in whose place a program has put `func`. torch's functions in Python ask operands
    by their global names, where they find what has called them: it would be called again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _asks_operands:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    if caller is None or _TORCH not in caller.f_code.co_filename or caller.f_code.co_freevars:
        return func
    return FunctionType(caller.f_code, caller.f_globals)


class _Unseen(type(torch.nn.Parameter)):  # type: ignore[misc]
    """Has a class pass for a base of all classes of tensors where torch asks that. `__torch_function__` of a program's
    class of tensors gives up where it meets one that it does not derive from; of torch.nn.Parameter it is not told."""

    def __subclasscheck__(cls, kind: type) -> bool:
        return super().__subclasscheck__(kind) or issubclass(kind, torch.Tensor)


@opaque()
class LogicalParameter(LogicalTensor, torch.nn.Parameter, metaclass=_Unseen):
    """A sharded weight as a parameter of a module. `etp` tells what it is a part of.

    Hooks of register_post_accumulate_grad_hook() are called once a backward, after the reduced gradient has been added;
    those of register_hook() get the reduced gradient of the backward before it is added.
    """

    etp: Weight
    copied_by: ClassVar[Callable[[LogicalParameter, dict[Any, Any]], LogicalParameter]]  # copying.py sets it
    grad: Any = property(_grad_of, _set_grad, _forget_grad, "The reduced gradient, a LogicalTensor.")
    _grad: Any = grad  # torch's other name of it
    _backward_hooks = property(_hooks_of, _set_hooks)

    @classmethod
    def of_weight(cls, weight: Weight, requires_grad: bool) -> LogicalParameter:
        """Make the parameter of a weight."""
        store = weight.store
        made = cls(store, (), store.rows, None if store.rows is None else store.spec, requires_grad=requires_grad)
        made.receive()
        return made

    def receive(self) -> None:
        """Have its weight take the gradients that autograd has for it. torch.utils.swap_tensors() leaves hooks where
        they are."""
        reference = weakref.ref(self.etp)

        def arrive(gradient: torch.Tensor | None) -> torch.Tensor | None:
            weight = reference()
            return gradient if gradient is None or weight is None else weight.arrive(gradient)

        with DisableTorchFunctionSubclass():
            _torchs_hooks.__set__(self, {0: arrive})  # the only hook of the leaf that autograd knows

    @classmethod
    @left_out
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.backward or func is torch.autograd.grad:
            return _differentiated(func, args, kwargs or {})
        if func in _CUTS:
            refuse_fully_shard(next(each for each in args if isinstance(each, LogicalParameter)).etp.name)
        if _tracing_state() is not None:
            refuse_tracers(next((each.etp.name for each in args if isinstance(each, LogicalParameter)), "a parameter"))
        if type(func) is FunctionType and _TORCH not in func.__code__.co_filename:
            func = _replaced_by(func)
        others = tuple(kind for kind in types if LogicalTensor not in kind.__mro__)
        if others:  # those of the other operands decide, as beside a plain parameter
            result = others[0].__torch_function__(func, others, args, kwargs or {})
            if result is not NotImplemented:
                return result
        with DisableTorchFunctionSubclass():
            if func in PARTS and isinstance(args[0], LogicalParameter) and isinstance(args[0].etp, Stack):
                found = expert_uses(args[0].etp, func, args, kwargs or {})
                if found is not None:
                    return found
            return func(*args, **(kwargs or {}))

    def detach(self) -> torch.Tensor:
        if sys._getframe(1).f_code is _makes_parameters:  # nn.Parameter(p), a new leaf over the same memory
            return LogicalParameter.of_weight(self.etp, False)
        with DisableTorchFunctionSubclass():
            return super().detach()

    def module_load(self, other: torch.Tensor, assign: bool = False) -> torch.Tensor:
        """Take a state's values where torch swaps parameters (torch.__future__): return what is swapped with this."""
        with torch.no_grad():
            self.copy_(other)
        return LogicalParameter.of_weight(self.etp, self.requires_grad)

    def _require_movable(self, device: torch.device) -> None:
        if not torch.is_grad_enabled():  # as Module.to() is, which puts the copy in the parameter's place
            raise InvalidArgumentError(
                f"{self.etp.name} is sharded in memory that ranks share, and cannot be moved to {device}: move the "
                "model before shard_module_() or after unshard_(); etp.whole(p) can be copied to any device"
            )

    def _has_memory(self) -> bool:
        return False

    def get_padded_shard(self) -> torch.Tensor:
        """Return this rank's rows and zeros, as many as every rank has: the rows themselves where nothing is padded."""
        self.etp.require_rows()
        rows, wanted = self.etp.local, self.etp.shard_rows
        *lead, count, columns = rows.shape
        if count == wanted:
            return rows
        return torch.cat([rows, rows.new_zeros(*lead, wanted - count, columns)], dim=-2)

    def requires_grad_(self, requires_grad: bool = True) -> LogicalParameter:
        if requires_grad:
            self.etp.require_trainable()
        with DisableTorchFunctionSubclass():
            super().requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
        """`hook(gradient)` is called once a backward, with the reduced gradient, before it is added to .grad."""
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        return self.etp.register_tensor_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: PostHook) -> RemovableHandle:
        """`hook(parameter)` is called once a backward, after the reduced gradient has been added to .grad."""
        if self.etp.model.inline:
            with DisableTorchFunction():
                return _register_post_hook(self, hook)
        return self.etp.hooks.register(hook)

    def register_grad_accum_hook(self, node: Any, hook: Callable[..., None]) -> RemovableHandle:
        """`hook(*unused)` is called once a backward, after the reduced gradient has been added to .grad or main_grad.
        It stands for a hook of the autograd node that accumulates. The node is kept alive."""
        return self.register_post_accumulate_grad_hook(lambda _: hook(node, None))

    def get_wgrad_tensor(self) -> torch.Tensor:
        """Return room for this rank's gradient of the whole weight, [F, K] or [E, F, K], not initialised, for a
        hand-written autograd function. It is written once, and given to reduce_wgrad() in the same backward."""
        return self.etp.lend()

    def reduce_wgrad(self, gradient: torch.Tensor) -> None:
        """Send what get_wgrad_tensor() gave to the ranks that own its rows; it must not be used afterwards. Within a
        backward."""
        self.etp.take_back(gradient)

    def __tessera_source__(self, name: str) -> RowsSource[LogicalParameter]:
        """How a batch of the tensor bus registers it."""
        return RowsSource(name, self, _own_rows)

    def __copy__(self) -> LogicalParameter:
        copied = LogicalParameter.of_weight(self.etp, self.requires_grad)
        keep_part(self, copied)
        return copied

    def __deepcopy__(self, memo: dict[Any, Any]) -> LogicalParameter:
        return memo[id(self)] if id(self) in memo else LogicalParameter.copied_by(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is a plain parameter with all of it in a file."""
        return torch.nn.Parameter(self._read(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _own_rows(parameter: LogicalParameter) -> torch.Tensor:
    parameter.etp.require_rows()
    return parameter.etp.local


def is_sharded_parameter(value: Any) -> bool:
    """Tell whether a value is a parameter of a sharded weight."""
    return isinstance(value, LogicalParameter)


def _differentiated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch.autograd.backward() or grad(). Deferred weights that a backward is wanted for are reached by their
    models' anchors, too."""
    inputs = kwargs.get("inputs") if func is torch.autograd.backward else args[1]
    listed = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs or ())
    deferred = [each.etp for each in listed if isinstance(each, LogicalParameter) and not each.etp.model.inline]
    if deferred and func is torch.autograd.grad:
        raise UnimplementedError(
            f"{deferred[0].name} is sharded, and its gradient becomes .grad at the end of a backward: "
            "torch.autograd.grad() cannot give it as a value: shard with mode='inline', or take .grad after a "
            "backward(inputs=)"
        )
    models = {id(weight.model): weight.model for weight in deferred}
    if deferred:
        kwargs = kwargs | {"inputs": (*listed, *[model.anchor for model in models.values()])}
    for model in models.values():
        model.wanted = {weight.number for weight in deferred if weight.model is model}
    try:
        # A backward may repeat forwards, in which functions of torch have to see parameters.
        return func(*[_edges(each) for each in args], **{name: _edges(each) for name, each in kwargs.items()})
    finally:
        for model in models.values():
            model.wanted = None


def _edges(value: Any) -> Any:
    """Return a value with each sharded parameter's place in the graph instead of it."""
    if isinstance(value, LogicalParameter):
        with DisableTorchFunctionSubclass():
            return torch.autograd.graph.get_gradient_edge(value)
    return tuple([_edges(each) for each in value]) if type(value) in (list, tuple) else value


def first_sharded(values: Iterable[Any]) -> LogicalTensor | None:
    """Return the first sharded tensor of some values."""
    return next((each for each in values if is_sharded(each)), None)


Weight.parameter_of = LogicalParameter.of_weight
