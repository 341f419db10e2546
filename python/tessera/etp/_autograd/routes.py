"""What an operation of torch gets of a sharded parameter: this rank's rows, or the whole weight.

In the model's forward, and when a part of it is repeated in a backward, it looks whole. Elsewhere, what is
differentiable (a penalty) or multiplies (a tied head) gets the whole weight, and all else the rows: optimisers, moving
averages, conversions, what asks for its shape.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch


class Route(enum.Enum):
    """What a function takes, by whether the model's forward is under way."""

    FACT = enum.auto()  # of the parameter itself: rows
    SHAPE = enum.auto()  # that of the whole in a forward
    DATA = enum.auto()  # assigns .data
    WRITE = enum.auto()  # into its first argument: rows, not in a forward
    READ = enum.auto()  # without a graph: the whole in a forward, else rows
    PRODUCT = enum.auto()  # the whole
    GRAPH = enum.auto()  # runs a backward: the parameter's place in the graph
    OTHER = enum.auto()  # the whole in a forward or where a graph is recorded, else rows


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHAPE = words("shape ndim nbytes size numel nelement dim ndimension stride __len__")
VIEWS = words("T mT H mH real imag")
_FACTS = words(
    "register_hook register_post_accumulate_grad_hook backward requires_grad_ retain_grad data_ptr element_size "
    "untyped_storage storage _typed_storage storage_offset get_device is_floating_point is_complex is_signed is_shared "
    "is_pinned is_inference is_conj is_neg has_names is_contiguous share_memory_ is_set_to __dlpack_device__ "
    "_has_compatible_shallow_copy_type result_type can_cast dense_dim sparse_dim"
)
_READS = words(
    "detach zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty "
    "new_full new_tensor equal allclose isclose eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isnan "
    "isinf isfinite count_nonzero tolist numpy is_nonzero"
)
_PRODUCTS = words(
    "linear matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm mv addmv einsum embedding embedding_bag bilinear conv1d "
    "conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d multi_head_attention_forward tensordot "
    "chain_matmul inner lstm gru rnn_tanh rnn_relu"
)
MOVES = words("to cuda xpu ipu hpu mtia")  # to another device
CONVERSIONS = MOVES | words("cpu float double half bfloat16 type type_as contiguous")
# What a parameter tells of itself by attributes, and not the same everywhere.
ATTRIBUTES = ("shape", "ndim", "nbytes", "data", *VIEWS)
_known: dict[Callable[..., Any], Route] = {}


def route_of(func: Callable[..., Any]) -> Route:
    found = _known.get(func)
    if found is None:
        found = _known[func] = _route(func)
    return found


def _route(func: Callable[..., Any]) -> Route:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        field = getattr(getattr(func, "__self__", None), "__name__", "")
        if field == "data":
            return Route.READ if name == "__get__" else Route.DATA
        if field in VIEWS:
            return Route.OTHER
        return Route.SHAPE if field in _SHAPE else Route.FACT
    if name in _SHAPE:
        return Route.SHAPE
    if func is torch.autograd.grad or func is torch.autograd.backward:
        return Route.GRAPH
    if name in _FACTS:
        return Route.FACT
    if name in _READS:
        return Route.READ
    if name in _PRODUCTS:
        return Route.PRODUCT
    return Route.WRITE if name and writes(func) else Route.OTHER


def makes_new(func: Callable[..., Any]) -> bool:
    """Whether it takes shape and type of its argument, and no values."""
    return func.__name__.endswith("_like") or func.__name__.startswith("new_")


def writes(func: Callable[..., Any]) -> bool:
    """Whether it changes its first argument."""
    name = func.__name__
    if name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_") and name not in ("requires_grad_", "share_memory_")
