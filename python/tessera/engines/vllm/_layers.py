"""How each layer of a vLLM model takes new weights: copied into place where that is proven to be the same, else
processed beside the layer that serves, by vLLM's own method, and swapped."""

from __future__ import annotations

import copy
import enum
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from ..._errors import UnimplementedError
from .._boxes import dense_strides
from .._learn import Form, LearnedMap, Piece
from .._live import Change, Plan
from ._generation import reloading

Staged = Mapping[str, torch.Tensor]
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Layer(NamedTuple):
    """A module that has parameters of its own, and what it takes of the checkpoint."""

    module: torch.nn.Module
    prefix: str  # of its parameters' names
    pieces: Sequence[Piece]


class Shadow:
    """A module of the same class with its own parameters, as the loader wants them. What the live one has is read, and
    never written."""

    def __init__(self, layer: Layer, shared: dict[int, torch.Tensor]) -> None:
        """`shared`: by the id of a live parameter, the one that stands for it."""
        live = layer.module
        self.module = module = object.__new__(type(live))
        module.__dict__.update(live.__dict__)
        module.__dict__.update(_parameters={}, _buffers=dict(live._buffers), _modules=dict(live._modules))
        loaded = loaded_form(live)[0]
        for name, parameter in live._parameters.items():
            like = loaded.get(name, parameter)  # a bias stays as it is loaded
            if like is None:
                module._parameters[name] = None
                continue
            if id(parameter) not in shared:
                shared[id(parameter)] = empty_like_loaded(like, live)
            module._parameters[name] = shared[id(parameter)]  # type: ignore[assignment]
        for name in loaded.keys() - live._parameters.keys():
            module._parameters[name] = empty_like_loaded(loaded[name], live)  # type: ignore[assignment]

    def fill(self, layer: Layer, learned: LearnedMap, staged: Staged) -> None:
        for piece in layer.pieces:
            parameter = self.module._parameters[piece.parameter.removeprefix(layer.prefix)]
            assert parameter is not None
            piece.install(parameter.data, staged[learned.key(piece.source)])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: each.data for name, each in self.module._parameters.items() if each is not None}

    def state(self) -> dict[str, Any]:
        """What a forward may use, besides parameters."""
        own = {name: value for name, value in vars(self.module).items() if name not in (*_REGISTRIES, "quant_method")}
        for name, value in vars(getattr(self.module, "quant_method", object)).items():
            inner = value if name in _REGISTRIES else {name: value}
            own |= {f"quant_method.{each}": held for each, held in inner.items()}
        return own

    def process(self) -> None:
        """What vLLM does after it has loaded a layer."""
        method = getattr(self.module, "quant_method", None)
        if method is None or not hasattr(method, "process_weights_after_loading"):
            return
        self.module.__dict__.pop("_already_called_process_weights_after_loading", None)
        method = _apart(method)
        if "quant_method" in self.module._modules:  # where it is a module itself
            self.module._modules["quant_method"] = method
        else:
            self.module.__dict__["quant_method"] = method
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # else 0.32 takes it for a reload, and leaves out what experts on CPUs need
        method.process_weights_after_loading(self.module)
        if hasattr(self.module, "update_param_tp_status"):
            cast(Any, self.module).update_param_tp_status()


class RebuiltLayers:
    """A Change of layers that share parameters; nearly always one. They are built beside those that serve, and their
    state is swapped in."""

    def __init__(self, layers: Sequence[Layer], learned: LearnedMap) -> None:
        self._layers = layers
        self._learned = learned
        self._built: list[Shadow] = []
        self._kept: list[tuple[dict[str, Any], ...]] = []

    def build(self, staged: Staged) -> None:
        self._built = shadows(self._layers, self._learned, staged)
        for shadow in self._built:
            shadow.process()

    def swap(self) -> None:
        for (live, _, _), shadow in zip(self._layers, self._built, strict=True):
            new = shadow.module
            self._kept.append(_state(live))
            _replace(live, _state(new))

    def undo(self) -> None:
        for (live, _, _), kept in zip(self._layers, self._kept, strict=False):
            _replace(live, kept)

    def drop(self) -> None:
        self._built, self._kept = [], []


class ReplacedBuffer:
    """A Change of a buffer that has the elements of a parameter, in their order."""

    def __init__(self, module: torch.nn.Module, name: str, pieces: Sequence[Piece], learned: LearnedMap) -> None:
        self._module = module
        self._name = name
        self._pieces = pieces
        self._learned = learned
        self._built: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None

    def build(self, staged: Staged) -> None:
        form = self._learned.forms[self._pieces[0].parameter]
        whole = torch.zeros(form.shape, dtype=form.dtype)
        for piece in self._pieces:
            piece.install(whole, staged[self._learned.key(piece.source)])
        self._built = whole.view(cast(torch.Tensor, self._module._buffers[self._name]).shape)

    def swap(self) -> None:
        self._kept = self._module._buffers[self._name]
        self._module._buffers[self._name] = self._built

    def undo(self) -> None:
        if self._kept is not None:
            self._module._buffers[self._name] = self._kept

    def drop(self) -> None:
        self._built = self._kept = None


def shadows(layers: Sequence[Layer], learned: LearnedMap, staged: Staged) -> list[Shadow]:
    """Of layers that share parameters, filled with staged weights and not yet processed."""
    shared: dict[int, torch.Tensor] = {}
    made = [Shadow(layer, shared) for layer in layers]
    for shadow, layer in zip(made, layers, strict=True):
        shadow.fill(layer, learned, staged)
    return made


def _state(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    return tuple(dict(each) for each in (module.__dict__, *(module.__dict__[name] for name in _REGISTRIES)))


def _replace(live: torch.nn.Module, state: Sequence[Mapping[str, Any]]) -> None:
    registries = {name: live.__dict__[name] for name in _REGISTRIES}
    for now, new in zip(registries.values(), state[1:], strict=True):
        now.clear()
        now.update(new)
    for name in [name for name in live.__dict__ if name not in state[0]]:
        del live.__dict__[name]
    live.__dict__.update({**state[0], **registries})


def _apart(what: Any) -> Any:
    """A copy, of which attributes can be set without setting those of `what`."""
    made = copy.copy(what)
    for name in _REGISTRIES:
        if name in made.__dict__:
            made.__dict__[name] = dict(made.__dict__[name])
    return made


def loaded_form(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Its own parameters and buffers as the loader wants them, without data; what is never processed is left out."""
    parameters, buffers = reloading().info_of(module).restore_metadata
    return dict(parameters), dict(buffers)


def empty_like_loaded(like: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Memory for a parameter of `module`, zeroed as loaders fill padding with zeros."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
    made.__class__ = like.__class__
    made.__dict__.update(like.__dict__)
    return reloading().restore_references(made, module)


def plan_of(model: torch.nn.Module, learned: LearnedMap, staged: Staged, dtype: torch.dtype) -> Plan:
    """How each layer is installed, proven with a first version: a layer's pieces are copied into place if vLLM's own
    processing of a copy leaves each parameter where and as it was, and adds nothing."""
    in_place: list[Piece] = []
    changes: list[Change] = []
    rebuilt: list[Piece] = []
    for layers in groups(model, learned.pieces):
        if is_proven(layers, learned, staged):
            in_place.extend(piece for layer in layers for piece in layer.pieces)
        else:
            changes.append(RebuiltLayers(layers, learned))
            rebuilt.extend(piece for layer in layers for piece in layer.pieces)
    changes.extend(_aliases(model, learned, rebuilt))
    return Plan(in_place, changes, _derived(model, learned.pieces, dtype))


def groups(model: torch.nn.Module, pieces: Iterable[Piece]) -> list[list[Layer]]:
    """The layers that have pieces, each with those that share a parameter with it."""
    by_path: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_path.setdefault(piece.parameter.rpartition(".")[0], []).append(piece)
    sharing: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                sharing.setdefault(id(parameter), []).append(path)
    found: list[list[Layer]] = []
    seen: set[str] = set()
    for path in by_path:
        if path in seen:
            continue
        together = [path]
        for each in together:  # which grows
            for parameter in model.get_submodule(each)._parameters.values():
                together += [other for other in sharing.get(id(parameter), []) if other not in together]
        seen.update(together)
        found.append(
            [Layer(model.get_submodule(each), f"{each}." if each else "", by_path.get(each, [])) for each in together]
        )
    return found


def is_proven(layers: Sequence[Layer], learned: LearnedMap, staged: Staged) -> bool:
    """Whether weights that are copied into place are all that vLLM would leave."""
    for live, prefix, pieces in layers:
        tensors = {**live._parameters, **live._buffers}
        for piece in pieces:
            tensor = tensors.get(piece.parameter.removeprefix(prefix))
            if tensor is None or Form.of(tensor) != learned.forms[piece.parameter]:
                return False
            if piece.parameter.removeprefix(prefix) in live._buffers and hasattr(live, "quant_method"):
                return False
    if all(live._parameters == {} for live, _, _ in layers):
        return True  # buffers of a module that processes nothing
    return all(_leaves_all(shadow) for shadow in shadows(layers, learned, staged))


def _leaves_all(shadow: Shadow) -> bool:
    before, state = {name: each.clone() for name, each in shadow.tensors().items()}, shadow.state()
    shadow.process()
    after = shadow.tensors()
    if after.keys() != before.keys():
        return False
    for name, each in after.items():
        if Form.of(each) != Form.of(before[name]) or not _same(each, before[name]):
            return False
    found = _Search(shadow.module, after.values())
    return not any(found.others(value) for name, value in shadow.state().items() if value is not state.get(name))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not a.numel() or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class _Search:
    """Looks for memory other than a layer's own parameters, in what processing has left."""

    _PLAIN = (bool, int, float, str, bytes, type, enum.Enum, torch.dtype, torch.Size, torch.device, types.ModuleType)

    def __init__(self, module: torch.nn.Module, own: Iterable[torch.Tensor]) -> None:
        self._seen = {id(module)}
        self._own = {each.untyped_storage().data_ptr() for each in own}

    def others(self, value: Any) -> bool:
        """Whether there may be any in `value`: a tensor elsewhere, or something that cannot be looked into."""
        if value is None or isinstance(value, self._PLAIN) or id(value) in self._seen:
            return False
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            return value.numel() > 0 and value.untyped_storage().data_ptr() not in self._own
        inner = self._inner(value)
        return inner is None or any(map(self.others, inner))

    @staticmethod
    def _inner(value: Any) -> Iterable[Any] | None:
        """What it refers to. None: nobody knows."""
        if isinstance(value, types.FunctionType):
            cells = [each.cell_contents for each in value.__closure__ or ()]
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if isinstance(value, types.BuiltinFunctionType | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return []
        if isinstance(value, Mapping):
            return [*value.keys(), *value.values()]
        if isinstance(value, list | tuple | set | frozenset):
            return value
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        return list(vars(value).values()) if hasattr(value, "__dict__") else None


def _aliases(model: torch.nn.Module, learned: LearnedMap, rebuilt: Iterable[Piece]) -> Iterable[Change]:
    """Buffers that were views of parameters when vLLM made the model, such as Mamba's conv_weights: of those that are
    rebuilt elsewhere."""
    never_processed = reloading().never_processed
    by_parameter: dict[str, list[Piece]] = {}
    for piece in rebuilt:
        by_parameter.setdefault(piece.parameter, []).append(piece)
    for path, module in model.named_modules():
        names = module._non_persistent_buffers_set - loaded_form(module)[1].keys() - never_processed
        inside = f"{path}." if path else ""
        for name in sorted(names):
            buffer = module._buffers.get(name)
            if buffer is None or not buffer.numel() or _is_view_of_any(buffer, module):
                continue
            found = [
                parameter
                for parameter in by_parameter
                if parameter.startswith(inside) and _may_be_view(buffer, learned.forms[parameter])
            ]
            if len(found) != 1:
                raise UnimplementedError(
                    f"{inside}{name} was a view of a parameter that vLLM has replaced, and "
                    f"{' or '.join(found) or 'none'} may be it: its new values are not known"
                )
            yield ReplacedBuffer(module, name, by_parameter[found[0]], learned)


def _is_view_of_any(buffer: torch.Tensor, module: torch.nn.Module) -> bool:
    memory = buffer.untyped_storage().data_ptr()
    return any(each.untyped_storage().data_ptr() == memory for each in module.parameters())


def _may_be_view(buffer: torch.Tensor, form: Form) -> bool:
    """With its elements in the same order."""
    dense = form.strides == dense_strides(form.shape) and buffer.is_contiguous()
    return dense and buffer.dtype == form.dtype and buffer.numel() == math.prod(form.shape)


def _derived(model: torch.nn.Module, pieces: Iterable[Piece], dtype: torch.dtype) -> list[Callable[[], None]]:
    """Attention layers that derive tensors from other layers' weights, as MLA does from kv_b_proj."""
    derives = reloading().derives
    changed = {id(model.get_submodule(piece.parameter.rpartition(".")[0])) for piece in pieces}
    found: list[Callable[[], None]] = []
    for module in model.modules():
        if not derives(module):
            continue
        held = [*module.__dict__.values(), *module._modules.values(), *vars(getattr(module, "impl", object)).values()]
        if any(id(each) in changed for each in held if isinstance(each, torch.nn.Module)):
            found.append(lambda module=module: module.process_weights_after_loading(dtype))  # type: ignore[misc]
    return found
