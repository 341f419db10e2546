"""The table of rules: what each operation of torch does to a sharded tensor, below autograd.

The kind of an operation is decided once per overload, from its kernels, tags and schema (`kind_of`), and each kind
has one rule (`_RULES`). One principle decides all of them: *a result stays sharded only where nothing of a rank's own
can have gone in*. A plain tensor (an activation, a mask, a loss of no dims), a generator and a Python number may be a
rank's own. So an operation of sharded tensors that are cut alike is done on rows, and asks nobody; any other gathers
what is sharded and gives a plain tensor; and what is written into a sharded tensor is compared over the ranks first:
written by all of them, or refused on all of them by name.

| kind | which operations | what the rule does |
|---|---|---|
| DECOMPOSE | with a CompositeImplicitAutograd kernel, where autograd is off | takes them apart |
| METADATA | `Tag.inplace_view` | makes the view of that name; another size or memory is refused |
| LIST | `_foreach_*`, `_fused_*`, `_amp_foreach_*` | goes element by element |
| VIEW | a result aliases an argument, and is not written | lengthens the chain, reads nothing; keeps rows if it can |
| ROWS | `Tag.pointwise`, copies, fills, `*_like` | on rows if all tensors are cut alike; else as WHOLE |
| WHOLE | everything else, unknown operations, too | gathers, calls; what it writes is compared |
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .._errors import InvalidArgumentError
from .clipping import is_clipping, is_gradient
from .loops import joined
from .store import CopyRecipe, Recipe, Spec, Store, agree, are_same, digest_of, refuse_difference, stamp_of
from .telling import telling, told_of
from .tensor import LogicalTensor, Step, copy_of, follow, is_sharded, normal_mode

aten = torch.ops.aten


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LISTS = ("_foreach_", "_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad", "_amp_foreach_")
_ON_ROWS = frozenset(
    ["copy", "fill", "zero", "zeros_like", "ones_like", "full_like", "empty_like", "_to_copy"]
)  # besides Tag.pointwise
_UNSAFE_VIEWS = words("_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk")
_OVERWRITES = words("copy_ fill_ zero_")
_NEW = words("new_empty new_empty_strided new_full new_ones new_zeros")  # which need a dtype and a device only
_PRODUCTS = words(
    "mm bmm addmm addmm_ baddbmm baddbmm_ addbmm mv addmv dot linear matmul convolution _convolution "
    "convolution_backward "
    "convolution_overrideable embedding _embedding_bag _embedding_bag_forward_only _scaled_dot_product_attention_math "
    "_scaled_dot_product_flash_attention_for_cpu _native_multi_head_attention _transformer_encoder_layer_fwd "
    "mkldnn_rnn_layer _trilinear linear_backward"
)


class Kind(enum.Enum):
    """How an operation treats a sharded tensor: a row of the table."""

    DECOMPOSE = enum.auto()
    METADATA = enum.auto()
    LIST = enum.auto()
    VIEW = enum.auto()
    ROWS = enum.auto()
    WHOLE = enum.auto()


@functools.cache
def _name_of(func: Any) -> str:
    return func._schema.name.split("::")[1]  # type: ignore[no-any-return]


def _single_name(func: Any) -> str:
    """Return the name of the operation on one tensor, out of place."""
    name = _name_of(func)
    for prefix in _LISTS:
        if name.startswith(prefix):
            name = "fused" if prefix.startswith("_fused") else name[len(prefix) :]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@functools.cache
def is_elementwise(func: Any) -> bool:
    """Tell whether an element of each result depends only on the operands' elements at its place.

    Tags are per overload: `max.other` is pointwise and `max` a reduction. Overloads in place often have none of their
    own: their counterpart's counts."""
    single, name = _single_name(func), _name_of(func)
    if single in _ON_ROWS or single == "fused":
        return True
    packet = getattr(aten, single, None) if func.namespace == "aten" else None
    overloads = [] if packet is None else [each for each in packet.overloads() if _takes_tensors(getattr(packet, each))]
    if name.startswith(_LISTS):
        counterparts = ["default"] if "default" in overloads else overloads
    elif name.endswith("_") and func._overloadname in overloads:
        counterparts = [func._overloadname]
    else:
        counterparts = []
    known = [func, *(getattr(packet, overload) for overload in counterparts)]
    if not any(torch.Tag.pointwise in one.tags for one in known):
        return False
    if any(torch.Tag.nondeterministic_seeded in one.tags for one in known):  # rrelu
        return False
    return all(
        str(result.type) in ("Tensor", "List[Tensor]") for result in func._schema.returns
    )  # `equal` gives a bool


def _takes_tensors(func: Any) -> bool:
    """Tell whether an overload is not TorchScript's on numbers."""
    return any(str(argument.type) == "Tensor" for argument in func._schema.arguments)


@functools.cache
def kind_of(func: Any) -> Kind:
    """Decide the kind of an operation."""
    name = _name_of(func)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    if composite and name != "lift_fresh":
        return Kind.DECOMPOSE
    if torch.Tag.inplace_view in func.tags:
        return Kind.METADATA
    if name.startswith(_LISTS):
        return Kind.LIST
    aliases = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
    if aliases or name in _UNSAFE_VIEWS:
        return Kind.VIEW
    return Kind.ROWS if is_elementwise(func) else Kind.WHOLE


# torch has excluded the keys that see to conj and neg bits here: what kernels make of plain tensors would be wrong.
_LAZY = functools.reduce(
    lambda keys, key: keys | torch._C.DispatchKeySet(key),
    (torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor),
    torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate),
)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the rule of an operation's kind."""
    if joined and func._schema.is_mutable:
        written = _written(func, args, kwargs)
        for loop in joined:
            loop.tell_write(func, args, kwargs, written)
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _LAZY):
        special = SPECIAL.get(func)
        if special is not None:
            result = special(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _RULES[kind_of(func)](func, args, kwargs)


# --- arguments


def _flat(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield arguments, and what lists among them hold."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from _flat(value, {})
        else:
            yield value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with `function` applied to what is in it."""
    if isinstance(value, (list, tuple)):
        parts = [_mapped(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value)


def _call(func: Any, function: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation with `function` applied to each argument."""
    return func(*[_mapped(function, each) for each in args], **{k: _mapped(function, v) for k, v in kwargs.items()})


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes."""
    found = []
    for place, argument in _written_places(func):
        value = args[place] if place < len(args) else kwargs.get(argument)
        found += [each for each in _flat((value,), {}) if isinstance(each, torch.Tensor)]
    return found


@functools.cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    if func.namespace == "c10d" and _name_of(func) != "send":  # whose schemas do not say so
        return [(0, func._schema.arguments[0].name)]
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@functools.cache
def _is_out(func: Any) -> bool:
    """Tell whether its results are put into `out=`."""
    return bool(func._schema.arguments[-1].is_out)


def _numbers(flat: Iterable[Any]) -> list[Any]:
    """Return what is no tensor, as text that is equal in all processes."""
    return [repr(each) for each in flat if not isinstance(each, (torch.Tensor, torch.Generator))]


# --- rules


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func.decompose(*args, **kwargs)


_VIEWS_IN_PLACE = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
}


def _metadata(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, name = args[0], _name_of(func)
    if name == "detach_":
        return tensor
    if not isinstance(tensor, LogicalTensor):
        return _whole(func, args, kwargs)
    if func is aten.set_.source_Tensor:
        tensor._set_data(args[1])
        return tensor
    if func in (aten.resize_.default, aten.resize_as_.default):
        size = args[1] if func is aten.resize_.default else args[1].shape
        if tuple(tensor.shape) == tuple(size) and tensor.is_contiguous():
            return tensor
    view = _VIEWS_IN_PLACE.get(func)
    if view is None:
        raise InvalidArgumentError(
            f"{name}() of {tensor.store}: it cannot get another size or other memory, which ranks share: make a new "
            "tensor of etp.whole(t)"
        )
    made = _view(view, args, kwargs)
    with torch._C._DisableTorchDispatch():
        func(tensor, *args[1:], **kwargs)
    tensor.become(made)
    return tensor


_SAME = frozenset((aten.detach.default, aten.alias.default, aten.lift_fresh.default))


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a view: the same store, a longer chain."""
    tensor, rest = args[0], args[1:]
    if not isinstance(tensor, LogicalTensor):
        return _whole(func, args, kwargs)
    with normal_mode(tensor):
        if func in _SAME:
            same = LogicalTensor(tensor.store, tensor.chain, tensor.rows, tensor.spec, tensor.known_outline)
            torch._functionalize_unsafe_set(same, tensor)
            if tensor.store.weight is not None:
                tensor.store.note_alias(same)
            return same
        outlines = func(tensor.outline(), *rest, **kwargs)
        many = isinstance(outlines, (list, tuple))
        made = []
        for number, outline in enumerate(outlines if many else [outlines]):
            chain = (*tensor.chain, Step(func, rest, kwargs, number if many else None))
            rows, spec = _rows_of_view(func, tensor, rest, kwargs, outline, number)
            made.append(LogicalTensor(tensor.store, chain, rows, spec, outline))
            torch._functionalize_unsafe_set(made[-1], tensor)  # is_alias_of() of C++ compares storages
            if tensor.store.weight is not None:
                tensor.store.note_alias(made[-1])
    return made if many else made[0]


def _rows_of_view(
    func: Any, tensor: LogicalTensor, rest: tuple[Any, ...], kwargs: dict[str, Any], outline: torch.Tensor, number: int
) -> tuple[torch.Tensor | None, Spec | None]:
    """Return rows, and which these are, of a view that has all rows."""
    rows, spec = tensor.rows, tensor.spec
    if rows is None or spec is None or spec.dim is None or kwargs:
        return None, None
    dim, dims = spec.dim, tensor.dim()
    order = list(range(dims))
    if func is aten.t.default:
        order.reverse()
    elif func is aten.transpose.int:
        first, second = rest
        order[first], order[second] = order[second], order[first]
    elif func is aten.permute.default:
        order = [each % dims for each in rest[0]]
    elif func is aten.unsqueeze.default:
        at = rest[0] % (dims + 1)
        return rows.unsqueeze(at), spec.of_view(outline.shape, dim + (at <= dim))
    elif func is aten.slice.Tensor and len(rest) > 0 and rest[0] % dims != dim:
        return func(rows, *rest), spec.of_view(outline.shape, dim)
    elif func in (aten.split.Tensor, aten.split_with_sizes.default) and len(rest) > 1 and rest[1] % dims != dim:
        return func(rows, *rest)[number], spec.of_view(outline.shape, dim)
    elif func is aten.view.default and outline.shape[: dim + 1] == tensor.shape[: dim + 1] and tensor.numel() > 0:
        try:
            return rows.view(*rows.shape[: dim + 1], *outline.shape[dim + 1 :]), spec.of_view(outline.shape, dim)
        except RuntimeError:  # rows lie otherwise
            return None, None
    else:
        return None, None
    return rows.permute(order), spec.of_view(outline.shape, order.index(dim))


def _list(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation on lists for each place of the lists by itself, in one batch of writes."""
    schema = func._schema.arguments
    bound = dict(zip((each.name for each in schema), args, strict=False)) | kwargs
    count = next(
        len(v) for v in bound.values() if isinstance(v, (list, tuple)) and any(isinstance(t, torch.Tensor) for t in v)
    )

    def at(place: int, value: Any, name: str) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == count:
            return [value[place]]
        if name == "scalars" and isinstance(value, torch.Tensor):
            return value[place : place + 1]
        return value

    results = []
    with _one_write(func, args, kwargs):
        for place in range(count):
            own = tuple([at(place, value, argument.name) for value, argument in zip(args, schema, strict=False)])
            named = {name: at(place, value, name) for name, value in kwargs.items()}
            if not any(isinstance(each, LogicalTensor) for each in _flat(own, named)):
                results.append(func(*own, **named))
            elif is_elementwise(func):
                results.append(_rows(func, own, named))
            else:
                results.append(_whole(func, own, named))
    if not func._schema.returns:
        return None
    if isinstance(results[0], tuple):
        return tuple([part for parts in column for part in parts] for column in zip(*results, strict=True))
    return [part for parts in results for part in parts]


@contextlib.contextmanager
def _one_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Have all ranks come once to an operation that writes a list of gradients or states, which one rank may read."""
    stores = [each.store for each in _written(func, args, kwargs) if is_sharded(each)]
    model = stores[0].model if stores else None
    if (
        model is None
        or model.updating
        or model.batch is not None
        or any(store.model is not model or store.weight is not None or not _is_read_alone(store) for store in stores)
    ):
        yield
        return
    _require_writable(stores)
    flat = list(_flat(args, kwargs))
    plain = [each for each in flat if isinstance(each, torch.Tensor) and not is_sharded(each) and each.dim() == 0]
    numbers = [*_numbers(flat), *[repr(each.item()) for each in plain]]
    told = stamp_of(func.name(), numbers, [each.store.stamp for each in flat if is_sharded(each)])
    what = f"{_name_of(func)} of {stores[0]}{' and others' if len(stores) > 1 else ''}"
    with (
        telling(what, [model.member.family]),
        model.writing([], what, told_of(what, repr(told).encode()), True) as said,
    ):
        if not are_same(said):
            raise refuse_difference(what)
        yield


def _is_read_alone(store: Store) -> bool:
    """Tell whether other ranks may read a gradient or state now, so that all must come before it is written."""
    return store.shared is not None and not store.model.writes_states


def _rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an elementwise operation on rows, where nothing of a rank's own can go in."""
    flat = list(_flat(args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    sharded = [each for each in tensors if is_sharded(each)]
    written = [each for each in _written(func, args, kwargs) if is_sharded(each)]
    first = next(iter(written or sharded), None)
    spec = None if first is None else first.spec
    if first is None or spec is None or any(not spec.is_like(each.spec) for each in written):
        return _whole(func, args, kwargs)
    others = [each for each in tensors if not is_sharded(each) or not spec.is_like(each.spec)]
    if not written:
        if others or not _stays_sharded(first.store, sharded, kwargs):
            return _whole(func, args, kwargs)
        return _new_rows(func, args, kwargs, flat, sharded, first)
    if len(_written(func, args, kwargs)) > len(written) and not _name_of(func).startswith(("_fused", "_amp")):
        return _whole(func, args, kwargs)
    if not first.store.kept:
        return _written_rows(func, args, kwargs, flat, sharded, written, others)
    with telling(f"{_name_of(func)} of {first.store}", [first.store.model.member.family]):
        return _written_rows(func, args, kwargs, flat, sharded, written, others)


def _stays_sharded(store: Store, sharded: list[LogicalTensor], kwargs: dict[str, Any]) -> bool:
    """Tell whether a new result may be rows: it is read by a gather of all ranks, which is for programs between
    forwards and backwards, where all ranks do the same."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in sharded):
        return False
    if store.model.in_forward() or store.model.in_backward():
        return False
    if kwargs.get("memory_format") not in (None, torch.preserve_format) and sharded[0].spec.dim is None:  # type: ignore[union-attr]
        return False  # rows of it have other dims
    device, layout = kwargs.get("device"), kwargs.get("layout")
    return (device is None or torch.device(device).type == "cpu") and layout in (None, torch.strided)


_CONSTANTS = frozenset(("full_like", "ones_like", "zeros_like"))  # whose values no operand's decide


def _like(value: Any) -> Any:
    """Return memory of a tensor's shape."""
    if not isinstance(value, LogicalTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _new_rows(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flat: list[Any],
    sharded: list[LogicalTensor],
    first: LogicalTensor,
) -> Any:
    stamp = stamp_of(func.name(), _numbers(flat), [each.store.stamp for each in sharded])
    stride = None
    if kwargs.get("memory_format") is not None or not all(each.is_contiguous() for each in sharded):
        facts = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        outline = _call(func, lambda t: t.outline() if isinstance(t, LogicalTensor) else t, args, facts)
        stride = next(iter(_flat((outline,), {}))).stride()
    made = _call(func, lambda t: t.rows if isinstance(t, LogicalTensor) else t, args, kwargs)
    store, spec, name = first.store, first.spec, _name_of(func)
    assert spec is not None
    single = isinstance(made, torch.Tensor)

    is_constant = name in _CONSTANTS
    operands = _like if is_constant else _plain_of

    def again() -> torch.Tensor:
        with torch.no_grad():
            return _call(func, operands, args, kwargs)  # type: ignore[no-any-return]

    held = store.held if not first.chain and len(sharded) == 1 else None

    def wrap(rows: Any) -> Any:
        if not isinstance(rows, torch.Tensor):
            return rows
        made = Store(store.model, spec, rows, rows.dtype, stride, stamp, held=held)
        made.blank = name == "empty_like"
        recipe = Recipe(again, () if is_constant else sharded)
        made.recipe = recipe if single and recipe.depth <= Recipe.MOST else None
        return LogicalTensor.of(made)

    return _mapped(wrap, made)


def _written_rows(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flat: list[Any],
    sharded: list[LogicalTensor],
    written: list[LogicalTensor],
    others: list[torch.Tensor],
) -> Any:
    first, spec = written[0], written[0].spec
    assert spec is not None
    name = _name_of(func)
    if others and _is_out(func):  # it may be given another size
        return _whole(func, args, kwargs)
    forgets = name in _OVERWRITES and not first.chain
    stamps = [each.store.stamp for each in sharded if not (forgets and each is first)]
    numbers = _numbers(flat)
    plain = [each for each in others if not is_sharded(each)]
    what = f"{name} of {first.store}"
    is_weight = any(each.store.weight is not None for each in written)
    if first.store.kept and all(each.dim() == 0 for each in plain):
        numbers += [repr(each.item()) for each in plain]
        plain = []
    stamp = stamp_of(func.name(), numbers, stamps)
    stores = [each.store for each in written]
    write = functools.partial(_write_rows, func, args, kwargs, written, _wholes_of(others))

    def goes_on_rows() -> bool:
        return all(spec.fits(each) and not (is_sharded(each) and each.store in stores) for each in others)

    model = first.store.model
    is_shared = any(map(_is_read_alone, stores)) and not model.updating
    if is_shared and not plain and is_clipping() and all(map(is_gradient, written)) and goes_on_rows():
        with model.writing_states():  # ranks have met for the norms
            return write(stamp)
    if not plain and (model.batch is not None or not (is_weight or is_shared)):  # a batch compares stamps at its end
        _require_writable(stores)
        _begin_batch(stores)
        return write(stamp) if goes_on_rows() else _whole(func, args, kwargs)
    told = digest_of(map(_plain_of, plain))
    with _alike(stores, what, told + repr(stamp).encode()) as same:
        if same:
            stamp = stamp_of(func.name(), numbers, [*stamps, int.from_bytes(told[:7], "little")])
            return write(stamp) if goes_on_rows() else _whole(func, args, kwargs)
    if not others:
        raise refuse_difference(what)
    return _whole(func, args, kwargs)


def _write_rows(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: list[LogicalTensor],
    wholes: dict[int, torch.Tensor],
    stamp: int,
) -> Any:
    """Do an operation in place on rows, with what goes along with them of other operands, of which `wholes` has those
    that were gathered."""
    spec = written[0].spec
    assert spec is not None

    def rows_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if is_sharded(value) and spec.is_like(value.spec):
            return value.rows
        plain = wholes.get(id(value), value)
        return spec.cut_operand(plain.to_dense() if plain.layout is not torch.strided else plain)

    result = _call(func, rows_of, args, kwargs)
    for each in written:
        each.store.written(stamp)
    back = {id(each.rows): each for each in written}
    return _mapped(lambda value: back.get(id(value), value), result)


def _wholes_of(tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    return {id(each): each.whole() for each in tensors if isinstance(each, LogicalTensor)}


def _plain_of(value: Any) -> Any:
    return value.whole() if isinstance(value, LogicalTensor) else value


def _require_writable(stores: list[Store]) -> None:
    """Throw where ranks are not at one place of their programs."""
    model = stores[0].model
    if model.inline:  # ranks run one backward, node by node
        return
    shared = [store for store in stores if store.kept]
    if model.in_backward() and shared:
        store = shared[0]
        raise InvalidArgumentError(
            f"{store} would be written within a backward, whose nodes other ranks pass at another time: write it "
            "before the backward, or after it (a post-accumulate hook is after it)"
        )


def _begin_batch(stores: list[Store]) -> None:
    """Let a step that is under way begin its writes of what other ranks read alone."""
    batch = stores[0].model.batch
    weights = [store.weight for store in stores if store.weight is not None]
    if batch is not None and (weights or any(store.shared is not None for store in stores)):
        batch.begin(weights)


@contextlib.contextmanager
def _alike(stores: list[Store], what: str, digest: bytes, error: BaseException | None = None) -> Iterator[bool]:
    """Tell whether all ranks would write the same, by one exchange. If so, no rank reads the weights and states among
    the stores, their rows may be written, and they are published at the end."""
    if error is None:
        _require_writable(stores)
    model = stores[0].model
    weights = [store.weight for store in stores if store.weight is not None]
    if any(store.weight is not None and store.model is not model for store in stores):
        raise InvalidArgumentError(f"{what}: weights of several sharded models are written by one operation")
    if model.batch is not None or model.updating or not (weights or any(map(_is_read_alone, stores))):
        same = agree(stores[0], what, digest, error)
        if same:
            _begin_batch(stores)
        yield same
        return
    with model.writing(weights, what, told_of(what, digest, error), error is None) as answers:
        yield are_same(answers, error)


def _whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do any operation on gathered tensors. What it writes into sharded ones is compared over the ranks, and each rank
    keeps its rows of it."""
    name = _name_of(func)
    product = name in _PRODUCTS
    facts_only = (name.endswith("_like") and name != "resize_as_like") or name in _NEW
    written = [each for each in _written(func, args, kwargs) if is_sharded(each)]
    stores = list(dict.fromkeys(each.store for each in written))
    wholes: dict[Store, torch.Tensor] = {}
    made: dict[int, tuple[torch.Tensor, LogicalTensor]] = {}

    def gather(value: Any) -> Any:
        if not isinstance(value, LogicalTensor):
            return value
        if facts_only:
            return _like(value)
        if id(value) not in made:
            store = value.store
            expert = None if store in stores else value.expert()
            if expert is not None:
                found = expert.pull(product)
                found = _copied(found) if func.namespace != "aten" else found
                made[id(value)] = (follow(aten.alias(found), value.chain[1:]), value)
                return made[id(value)][0]
            if store not in wholes:
                found = store.whole(product)
                wholes[store] = _copied(found) if store in stores or func.namespace != "aten" else found
            made[id(value)] = (follow(aten.alias(wholes[store]), value.chain), value)
        return made[id(value)][0]

    if not written:
        result = _call(func, gather, args, kwargs)
    else:
        told = [stores[0].model.member.family] if any(store.kept for store in stores) else []
        with telling(f"{name} of {stores[0]}", told):
            result = _compared(func, args, kwargs, gather, stores, wholes, made, written)
    back = {id(plain): tensor for plain, tensor in made.values()}
    return _mapped(lambda value: back.get(id(value), value), result)


def _compared(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gather: Callable[[Any], Any],
    stores: list[Store],
    wholes: dict[Store, torch.Tensor],
    made: dict[int, tuple[torch.Tensor, LogicalTensor]],
    written: list[LogicalTensor],
) -> Any:
    """Call an operation that writes sharded tensors, and take what all ranks have written alike."""
    what = f"{_name_of(func)} of {', '.join(map(str, stores))}"
    result, error = None, None
    try:
        result = _call(func, gather, args, kwargs)
        if func.namespace == "c10d":  # of torch.distributed, which goes on in the background
            for work in _flat((result,), {}):
                if isinstance(work, torch.ScriptObject):
                    work.wait()  # type: ignore[attr-defined]
        for tensor in written:
            if made[id(tensor)][0].shape != tensor.shape:
                raise InvalidArgumentError(f"{what}: it cannot become {tuple(made[id(tensor)][0].shape)}")
    except Exception as raised:
        error = raised
    if error is None and all(store.blank and not store.kept for store in stores):  # a mask that a rank draws
        for store in stores:
            store.become_own(wholes[store])
        return result
    digest = b"" if error is not None else digest_of(wholes[store] for store in stores)
    changed = [] if error is not None else [store for store in stores if not store.has(wholes[store])]
    with _alike(changed or stores[:1], what, digest, error) as same:
        if same:
            for store in changed:
                store.take(wholes[store])
                store.written(0)
            return result
    if any(store.kept for store in stores):
        raise refuse_difference(what)
    for store in stores:
        store.become_own(wholes[store])
    return result


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copied = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return copied.copy_(tensor)


def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep what a copy of a kept tensor goes along with, so that states can be staged."""
    tensor = args[0]
    plain = not kwargs or kwargs.get("memory_format") in (None, torch.preserve_format)
    if len(args) != 1 or not plain or not is_sharded(tensor) or tensor.chain or tensor.rows is None:
        return NotImplemented
    store = tensor.store
    if _stays_sharded(store, [tensor], {}):
        copied = copy_of(tensor)
        copied.store.recipe = CopyRecipe(store)
        return copied
    return NotImplemented


_RULES = {
    Kind.DECOMPOSE: _decompose,
    Kind.METADATA: _metadata,
    Kind.LIST: _list,
    Kind.VIEW: _view,
    Kind.ROWS: _rows,
    Kind.WHOLE: _whole,
}
SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {aten.clone.default: _clone}
LogicalTensor.dispatch = staticmethod(dispatch)
