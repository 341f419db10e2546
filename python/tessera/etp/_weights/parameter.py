"""The parameter that a user sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_function_impl
from torch.utils.hooks import RemovableHandle

from ..._errors import InvalidArgumentError, UnimplementedError
from .._autograd.anchors import TOLD_OF_INPUTS
from .._autograd.generic import Call
from .._autograd.routes import ATTRIBUTES, CONVERSIONS, MOVES, Route, makes_new, route_of
from .._compile import left_out, opaque
from .._refusals import refuse_fully_shard
from .post_hooks import PostHook
from .registered import RowsSource
from .weight import Weight, torchs_grad

_torchs_hooks: Any = torch.Tensor._backward_hooks


@left_out
def _grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """torch would call __torch_function__ for it, which takes five times as long."""
    with DisableTorchFunctionSubclass():
        return torchs_grad.__get__(parameter)  # type: ignore[no-any-return]


@left_out
def _set_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    with DisableTorchFunctionSubclass():
        torchs_grad.__set__(parameter, gradient)


@left_out
def _forget_grad(parameter: torch.Tensor) -> None:
    _set_grad(parameter, None)


def _hooks_of(parameter: ShardedParameter) -> Any:
    """Of register_hook(). Autograd calls those of inline weights."""
    weight = parameter.etp
    return _torchs_hooks.__get__(parameter) if weight.model.inline else weight.tensor_hooks


def _set_hooks(parameter: ShardedParameter, hooks: Any) -> None:
    weight = parameter.etp
    if weight.model.inline:
        _torchs_hooks.__set__(parameter, hooks)
    else:
        weight.tensor_hooks = hooks


@opaque(ATTRIBUTES)
class ShardedParameter(torch.nn.Parameter):
    """This rank's rows of a weight, [rows, K], or of each expert of a stack, [E, rows, K]: a view of shared memory. Any
    elementwise optimiser of torch takes it. Operations that use it as a weight get it whole, and are differentiable;
    those that use one expert of a stack, as p[e], that one.

    `etp` tells what it is a part of. Hooks of register_post_accumulate_grad_hook() are called once a backward, after
    the reduced gradient has been added; those of register_hook() see the reduced rows before.
    """

    etp: Weight
    grad: Any = property(_grad_of, _set_grad, _forget_grad, "This rank's rows of the reduced gradient.")
    if not TOLD_OF_INPUTS:  # the graph leads to it, and autograd would call its hooks without a gradient
        _backward_hooks = property(_hooks_of, _set_hooks)

    def __new__(cls, rows: torch.Tensor, weight: Weight, requires_grad: bool) -> ShardedParameter:
        parameter: ShardedParameter = torch.Tensor._make_subclass(cls, rows, requires_grad)
        parameter.etp = weight
        return parameter

    @classmethod
    @left_out
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        route = route_of(func)
        if route is Route.FACT:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _routed(route, func, args, kwargs or {})

    def get_padded_shard(self) -> torch.Tensor:
        """This rank's rows and zeros, as many as every rank has: itself where nothing is padded."""
        self.etp.require_rows()
        rows, wanted = self.etp.local, self.etp.shard_rows
        *lead, count, columns = rows.shape
        if count == wanted:
            return self
        return torch.cat([rows, rows.new_zeros(*lead, wanted - count, columns)], dim=-2)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        if requires_grad:
            self.etp.require_trainable()
        super().requires_grad_(requires_grad)
        return self

    def register_post_accumulate_grad_hook(self, hook: PostHook) -> RemovableHandle:
        """`hook(parameter)` is called once a backward, after the reduced gradient has been added to .grad."""
        if self.etp.model.inline:
            return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]
        return self.etp.hooks.register(hook)

    def register_grad_accum_hook(self, node: Any, hook: Callable[..., None]) -> RemovableHandle:
        """`hook(*unused)` is called once a backward, after the reduced gradient has been added to .grad or main_grad.
        It stands for a hook of the autograd node that accumulates, which a sharded parameter's gradient does not pass.
        The node is kept alive."""
        return self.etp.hooks.register(lambda _: hook(node, None))

    def get_wgrad_tensor(self) -> torch.Tensor:
        """Room for this rank's gradient of the whole weight, [F, K] or [E, F, K], not initialised, for a hand-written
        autograd function. It is written once, and given to reduce_wgrad() in the same backward."""
        return self.etp.lend()

    def reduce_wgrad(self, gradient: torch.Tensor) -> None:
        """Sends what get_wgrad_tensor() gave to the ranks that own its rows; it must not be used afterwards. Within a
        backward."""
        self.etp.take_back(gradient)

    def __tessera_source__(self, name: str) -> RowsSource[ShardedParameter]:
        """How a batch of the tensor bus registers it."""
        return RowsSource(name, self, _own_rows)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"{self.etp.name} is sharded and cannot be copied: copy the model within etp.summon(model)"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"{self.etp.name} is sharded and cannot be pickled: save the model within etp.summon(model)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        weight = self.etp
        begin, end = weight.rows
        rows = repr(weight.local) if weight.has_rows else f"kept as {weight.format} only"
        return f"ShardedParameter({weight.name!r}, rows {begin} to {end} of {tuple(weight.shape)})\n{rows}"


@opaque()
class Rows(ShardedParameter):
    """What a sharded parameter is within an update: rows and nothing else, for every operation."""

    grad: Any = torchs_grad
    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]


@opaque()
class Detached(ShardedParameter):
    """What detach() gives of a parameter whose rows are not in memory: it has shape and type, and no values."""

    @classmethod
    @left_out
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        parameter = _first((*args, *(kwargs or {}).values()))
        if parameter is None or route_of(func) in (Route.FACT, Route.SHAPE):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _without_rows(func, args, kwargs or {}, parameter)


Call.parameter_class = ShardedParameter
Weight.parameter_classes = (ShardedParameter, Rows)


def _own_rows(parameter: ShardedParameter) -> torch.Tensor:
    parameter.etp.require_rows()
    return parameter.etp.local


def _routed(route: Route, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if route is Route.GRAPH:  # which may repeat forwards, so that routes must stay open
        return _differentiated(func, args, kwargs)
    parameter = _first((*args, *kwargs.values()))
    if parameter is None:  # in an argument that is none of torch's containers
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    weight = parameter.etp
    forward = weight.model.in_forward()
    if route is Route.SHAPE and forward:
        return func(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), *args[1:], **kwargs)
    if func is torch.chunk:
        refuse_fully_shard(weight.name)
    if route is Route.DATA:
        weight.require_same_memory(args[1])
    if route is Route.WRITE and forward and args[0] is parameter:
        raise InvalidArgumentError(
            f"{weight.name} is sharded, and {func.__name__}() would write it while ranks use it: write this rank's "
            "rows within etp.update(model)"
        )
    if (
        route is Route.PRODUCT
        or (forward and route not in (Route.SHAPE, Route.DATA))
        or (route is Route.OTHER and torch.is_grad_enabled())
    ):
        part = weight.part(func, args, kwargs)
        return Call().run(func, args, kwargs) if part is None else part
    if not weight.has_rows and route not in (Route.SHAPE, Route.DATA):
        found = _without_rows(func, args, kwargs, parameter)
    else:
        with DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
    if func.__name__ in MOVES and args[0] is parameter and found.device != weight.local.device:
        raise InvalidArgumentError(
            f"{weight.name} is sharded in memory that ranks share, and cannot be moved to {found.device}: move the "
            "model before shard_module_() or after unshard_(); etp.local(p) gives rows that can be copied"
        )
    return found


def _without_rows(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parameter: ShardedParameter
) -> Any:
    """What needs no values of a weight whose rows are not in memory; anything else is refused."""
    weight = parameter.etp
    if func.__name__ == "detach":
        return Detached(weight.local, weight, False)
    if not makes_new(func) and func.__name__ not in CONVERSIONS:
        weight.require_rows()
    with DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
    if found is not parameter and not makes_new(func):  # a conversion to what it is not
        weight.require_rows()
    return found


def _differentiated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.backward() or grad(). Deferred weights that a backward is wanted for are reached by their
    models' anchors."""
    inputs = kwargs.get("inputs") if func is torch.autograd.backward else args[1]
    deferred = [each.etp for each in inputs or () if isinstance(each, ShardedParameter) and not each.etp.model.inline]
    if deferred and func is torch.autograd.grad:
        raise UnimplementedError(
            f"{deferred[0].name} is sharded, and its gradient becomes .grad at the end of a backward: "
            "torch.autograd.grad() cannot give it as a value: shard with mode='inline', or take .grad after a "
            "backward(inputs=)"
        )
    models = {id(weight.model): weight.model for weight in deferred}
    if deferred:
        others = [each for each in inputs or () if not any(weight.parameter is each for weight in deferred)]
        kwargs = kwargs | {"inputs": (*others, *[model.anchor for model in models.values()])}
    for model in models.values():
        model.wanted = {weight.number for weight in deferred if weight.model is model}
    try:
        return func(*[_edges(each) for each in args], **{name: _edges(each) for name, each in kwargs.items()})
    finally:
        for model in models.values():
            model.wanted = None


def _edges(value: Any) -> Any:
    if isinstance(value, ShardedParameter):
        with DisableTorchFunctionSubclass():
            return torch.autograd.graph.get_gradient_edge(value)
    return tuple([_edges(each) for each in value]) if type(value) in (list, tuple) else value


def _first(values: Iterable[Any]) -> ShardedParameter | None:
    for value in values:
        found = _first(value) if isinstance(value, (list, tuple)) else value
        if isinstance(found, ShardedParameter):
            return found
    return None
