"""Modules whose weight is sharded: the classes that shard_module_() gives to modules of a model, in place."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch._C import DisableTorchFunctionSubclass
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .._errors import InvalidArgumentError
from .compile import left_out
from .fast import apply_embedding_function, apply_linear_function, multiply
from .inline import Whole
from .parameter import LogicalParameter
from .tracers import refuse_transforms
from .weight import Weight

if TYPE_CHECKING:
    from .model import ShardedModel


_Class = TypeVar("_Class", bound=type)


class InPlaceOf(type):
    """The class of classes that modules get in the place of their own. Such a class compares equal to the one that it
    stands for, and has its name: programs ask `type(module) == nn.Linear`, or look classes up."""

    def __eq__(cls, other: object) -> bool:
        return unsharded_class(cls) is unsharded_class(other)

    def __hash__(cls) -> int:
        return type.__hash__(unsharded_class(cls))

    def __instancecheck__(cls, instance: Any) -> bool:
        own = unsharded_class(cls)
        return super().__instancecheck__(instance) if own is cls else isinstance(instance, own)

    def __subclasscheck__(cls, kind: type) -> bool:
        own = unsharded_class(cls)
        return super().__subclasscheck__(kind) if own is cls else issubclass(kind, own)


def _itself(kind: type) -> type:
    return kind


def _reduce(kind: InPlaceOf) -> Any:
    """Be the own class in a file."""
    own = unsharded_class(kind)
    return kind.__qualname__ if own is kind else (_itself, (own,))


copyreg.pickle(InPlaceOf, _reduce)


def unsharded_class(kind: Any) -> Any:
    """Return what shard_module_() made the class from; the class itself of modules that it leaves as they are."""
    return kind.__dict__.get("unsharded", kind) if isinstance(kind, InPlaceOf) else kind


def in_place_of(kind: type) -> Callable[[_Class], _Class]:
    """Have a class stand for another one."""

    def made(cls: _Class) -> _Class:
        cls.unsharded = kind  # type: ignore[attr-defined]
        cls.__name__, cls.__qualname__, cls.__module__ = kind.__name__, kind.__qualname__, kind.__module__
        return cls

    return made


class Sharded(torch.nn.Module, metaclass=InPlaceOf):
    """What they have in common. Their `weight` is a LogicalParameter."""


class Constructed(Sharded):
    """A layer that was made sharded, over a group of its own choice. shard_module_() leaves it as it is; without a
    group it is a plain module, which is sharded with the others."""

    @property
    def has_group(self) -> bool:
        raise NotImplementedError

    @property
    def replicas(self) -> int:
        """How many ranks have the same rows, by data parallelism."""
        raise NotImplementedError

    @property
    def listed(self) -> Sequence[str]:
        """Weights that are used as a list, by their names in this layer."""
        return ()

    def list_experts(self, model: ShardedModel) -> None:
        """Weights that are used as a list become one, if all of them are sharded with that model. Before it starts."""

    def reset_parameters(self) -> None:
        """Initialises all of them, on the same rows as an unsharded layer's. Collective."""
        raise NotImplementedError


def has_group(module: torch.nn.Module) -> bool:
    """Whether it was constructed sharded."""
    return isinstance(module, Constructed) and module.has_group


# --- what else may take part in a product: a function that a program has replaced, a mode, a class of tensors


def _torchs(function: Any) -> Any:
    """Return a function of torch; None: it has been replaced already."""
    return function if "torch/nn/" in getattr(function, "__code__", _torchs.__code__).co_filename else None


_forward_of_linear, _forward_of_embedding = _torchs(torch.nn.Linear.forward), _torchs(torch.nn.Embedding.forward)
_embedding = _torchs(F.embedding)


def is_torchs_linear() -> bool:
    """Tell whether what nn.Linear calls is torch's own."""
    return F.linear is torch._C._nn.linear and torch.nn.Linear.forward is _forward_of_linear


def is_torchs_embedding() -> bool:
    """Tell whether what nn.Embedding calls is torch's own."""
    return F.embedding is _embedding and torch.nn.Embedding.forward is _forward_of_embedding


def is_seen_by_nobody(input: Any) -> bool:
    """Tell whether no mode and no class of tensors is to see the functions that a module calls."""
    if type(input) is not torch.Tensor:
        return False
    return torch._C._len_torch_function_stack() == 0 or all(
        type(mode) is DeviceContext
        for mode in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    )


@in_place_of(torch.nn.Linear)
class ShardedLinear(Sharded, torch.nn.Linear):
    """nn.Linear of a sharded weight."""

    @left_out
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters.get("weight")
        if not (isinstance(parameter, LogicalParameter) and is_torchs_linear() and is_seen_by_nobody(input)):
            return super().forward(input)
        return apply_linear(input, parameter, self.bias, False)


@in_place_of(torch.nn.Embedding)
class ShardedEmbedding(Sharded, torch.nn.Embedding):
    """nn.Embedding of a sharded weight."""

    @left_out
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters.get("weight")
        if not (isinstance(parameter, LogicalParameter) and is_torchs_embedding() and is_seen_by_nobody(input)):
            return super().forward(input)
        return apply_embedding(input, parameter, self.padding_idx, self.scale_grad_by_freq)


class ShardedConv1D(Sharded):
    """The forward of transformers' Conv1D, whose weight is [inputs, outputs]."""

    @left_out
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters.get("weight")
        if not (isinstance(parameter, LogicalParameter) and is_seen_by_nobody(x)):
            return super().forward(x)  # type: ignore[no-any-return]
        return apply_linear(x, parameter, cast(Any, self.bias), True)


_kinds: dict[type, type] = {torch.nn.Linear: ShardedLinear, torch.nn.Embedding: ShardedEmbedding}


def sharded_class(module: torch.nn.Module) -> type | None:
    """For modules of exactly the classes whose forward is known; a subclass may use its weight in another way."""
    kind = type(module)
    if kind not in _kinds and (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        _kinds[kind] = in_place_of(kind)(InPlaceOf("ShardedConv1D", (ShardedConv1D, kind), {}))
    return _kinds.get(kind)


def only_reads(module: torch.nn.Module, name: str) -> bool:
    """Whether uses of that weight by the module, once it is sharded, are those of this package, which write nothing."""
    return isinstance(module, Constructed) or (name == "weight" and sharded_class(module) is not None)


def put(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """In the place of another parameter. Recurrent modules keep lists of theirs, which follow assignments."""
    if isinstance(module, torch.nn.RNNBase):
        setattr(module, name, parameter)
    else:
        module._parameters[name] = parameter


def apply_linear(
    x: torch.Tensor, parameter: LogicalParameter, bias: torch.Tensor | None, as_stored: bool
) -> torch.Tensor:
    """x @ W.T + bias, or x @ W + bias if `as_stored`; differentiable. Of a weight of an inline model, it is an ordinary
    operation of autograd."""
    weight = parameter.etp
    refuse_transforms(weight.name)
    if weight.model.inline or x.is_nested or is_in_forward_mode():
        return _linear_by_torch(x, parameter, bias, as_stored)
    given, dtype = dtypes_of(x, weight)
    if x.dtype != dtype:
        x = x.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    with DisableTorchFunctionSubclass():
        trains = parameter.requires_grad
    if torch.is_grad_enabled() and (trains or x.requires_grad or (bias is not None and bias.requires_grad)):
        anchor = weight.anchor() if trains else None
        out = apply_linear_function(x, bias, anchor, weight, dtype, as_stored)
    else:
        full, _ = weight.gather(weight.model.phase())
        out = multiply(x, full if full.dtype is dtype else full.to(dtype), bias, as_stored)
    return out if out.dtype == given else out.to(given)  # type: ignore[no-any-return]


def _linear_by_torch(
    x: torch.Tensor, parameter: LogicalParameter, bias: torch.Tensor | None, as_stored: bool
) -> torch.Tensor:
    given, dtype = dtypes_of(x, parameter.etp)
    cast = None if bias is None else bias.to(dtype)
    matrix: torch.Tensor = parameter
    if x.is_nested and x.layout is torch.strided:  # torch has no operation of one with a subclass of Tensor
        matrix = Whole.apply(parameter, True)  # type: ignore[no-untyped-call]
    matrix = matrix.to(dtype)
    return F.linear(x.to(dtype), matrix.t() if as_stored else matrix, cast).to(given)


def is_in_forward_mode() -> bool:
    """Tell whether derivatives are computed forwards (torch.autograd.forward_ad), for which our functions have none."""
    return torch.autograd.forward_ad._current_level >= 0


def dtypes_of(x: torch.Tensor, weight: Weight) -> tuple[torch.dtype, torch.dtype]:
    """Of a product's result, and of its computation."""
    kind = x.device.type
    given = x.dtype
    if not given.is_floating_point:
        raise InvalidArgumentError(f"{weight.name}: an input of {given}: give floating-point numbers")
    if torch.is_autocast_enabled(kind) and given != torch.float64:
        given = torch.get_autocast_dtype(kind)
        return given, given
    if given != weight.dtype and not weight.format:
        raise InvalidArgumentError(
            f"{weight.name}: an input of {given} and a weight of {weight.dtype}: convert one of them, or compute under "
            "torch.autocast"
        )
    return given, weight.compute if weight.compute != weight.dtype else given


def apply_embedding(
    indices: torch.Tensor, parameter: LogicalParameter, padding: int | None, by_frequency: bool
) -> torch.Tensor:
    """Rows of W; differentiable."""
    weight: Weight = parameter.etp
    refuse_transforms(weight.name)
    if weight.model.inline:
        return F.embedding(indices, parameter, padding, None, 2.0, by_frequency)
    padding = -1 if padding is None else padding
    if torch.is_grad_enabled() and parameter.requires_grad:
        anchor = weight.anchor()
        out = apply_embedding_function(indices, anchor, weight, padding, by_frequency)
    else:
        full, _ = weight.gather(weight.model.phase())
        out = torch.embedding(full, indices, padding, by_frequency, False)
    return out if out.dtype == weight.dtype else out.to(weight.dtype)  # type: ignore[no-any-return]
