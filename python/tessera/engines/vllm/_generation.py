"""What differs between releases of vLLM, in one place. It is found by looking at the interface that is installed, and
never by its version: a release with another interface is refused by name, one with the same interface is taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch

from ..._errors import InvalidArgumentError, UnimplementedError

_CONSTRUCTOR = ("config", "vllm_config", "device", "model")
_OF_WORKER = {
    *("init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown"),
}
_OF_TRAINER = {"trainer_init", "send_weights"}


def worker_base() -> Any:
    """The module with the classes that ours derive from in a worker. Raises UnimplementedError if ours do not fit."""
    base = _transfer()
    _require_classes(base, "WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo")
    _require_methods(base.WeightTransferEngine, _OF_WORKER)
    given = tuple(inspect.signature(base.WeightTransferEngine.__init__).parameters)[1:]
    if given != _CONSTRUCTOR:
        _refuse(f"WeightTransferEngine is made of ({', '.join(given)})")
    return base


def worker_class() -> type | None:
    """What all workers derive from. None: such a vLLM needs --worker-extension-cls."""
    try:
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError:
        return None
    found: type = WorkerBase
    return found


def model_loaders() -> Any:
    """The module with the registry of load formats. None: there is none."""
    try:
        from vllm.model_executor import model_loader
    except ImportError:
        return None
    return model_loader if hasattr(model_loader, "register_model_loader") else None


def trainer_base() -> Any:
    """The same for a trainer."""
    base = _transfer()
    _require_classes(base, "TrainerInitInfo", "TrainerWeightTransferEngine", "WeightSource", "ModuleSource")
    _require_methods(base.TrainerWeightTransferEngine, _OF_TRAINER)
    return base


def trainer_options(base: Any, rank: int) -> dict[str, Any]:
    """What the constructor of a trainer's engine takes besides client, source and is_sender."""
    known = inspect.signature(base.TrainerWeightTransferEngine.__init__).parameters
    return {"rank": rank} if "rank" in known else {}


class Yielded(NamedTuple):
    """What a source yields on this rank.

    Attributes:
        tensor: None: it is not here.
        meta: The source's ParamMeta.
        is_local: Whether it is this rank's piece, under the layout of `meta`; if not, it is the whole tensor.
        keepers: The ranks that have it whole. None: all of them.
    """

    name: str
    tensor: torch.Tensor | None
    meta: Any
    is_local: bool
    keepers: tuple[int, ...] | None


def module_of(base: Any, source: Any) -> torch.nn.Module | None:
    """The module of vLLM's own source of one, which gathers what it yields. None: it is another source."""
    module = getattr(source, "_module", None)
    return module if type(source) is base.ModuleSource and isinstance(module, torch.nn.Module) else None


def yielded(base: Any, source: Any, rank: int) -> Iterator[Yielded]:
    """All that a source yields; collective where the source is."""
    if isinstance(inspect.getattr_static(base.WeightSource, "metadata"), property):  # 0.33
        metas = {each.name: each for each in source.metadata}
        is_local = source.implements_iter_local()
        for name, tensor in source.iter_local() if is_local else source.iter_full():
            meta = _declared(metas, name)
            yield Yielded(name, tensor, meta, is_local, meta.owners)
        return
    metas = {each.name: each for each in source.metadata()}
    held = source.held_names() if hasattr(source, "held_names") else None  # since 0.29
    for name, tensor in source:
        here = held is None or name in held
        yield Yielded(name, tensor if here else None, _declared(metas, name), False, None if held is None else (rank,))


def _declared(metas: dict[str, Any], name: str) -> Any:
    if name not in metas:
        raise InvalidArgumentError(f"the source yields {name!r}, which its metadata does not have")
    return metas[name]


class Reloading(NamedTuple):
    """How vLLM lays a loaded model out again as its loader wants it."""

    info_of: Callable[[torch.nn.Module], Any]  # of a layer: `restore_metadata` has (parameters, buffers), on meta
    restore_on_meta: Callable[[torch.nn.Module, Any], None]
    to_meta: Callable[[Any], Any]
    restore_references: Callable[[torch.Tensor, torch.nn.Module], torch.Tensor]
    original_loader: Callable[[Any], Callable[..., Any]]
    never_processed: frozenset[str]  # names of tensors that stay as they are loaded
    derives: Callable[[torch.nn.Module], bool]  # whether an attention layer processes others' weights after loading


def reloading() -> Reloading:
    """Raises UnimplementedError if this vLLM does not record it."""
    try:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.model_loader.reload import layerwise, meta

        return Reloading(
            layerwise.get_layerwise_info,
            meta.restore_layer_on_meta,
            meta.to_meta_tensor,
            meta.restore_layer_refs,
            layerwise._get_original_loader,
            frozenset(getattr(meta, "SKIP_TENSORS", ())),
            is_deferred_attention_layer,
        )
    except (ImportError, AttributeError) as error:
        _refuse(f"it does not record how its loader saw the parameters ({error})")


def _transfer() -> Any:
    try:
        from vllm.distributed.weight_transfer import base
    except ImportError as error:
        _refuse(str(error))
    return base


def _require_classes(base: Any, *names: str) -> None:
    for name in names:
        if not hasattr(base, name):
            _refuse(f"its weight transfer has no {name}")


def _require_methods(kind: type, ours: Iterable[str]) -> None:
    missing = sorted(getattr(kind, "__abstractmethods__", frozenset()) - set(ours))
    if missing:
        _refuse(f"{kind.__name__} wants {', '.join(missing)}")


def _refuse(why: str) -> NoReturn:
    import vllm

    version = getattr(vllm, "__version__", "of an unknown version")
    raise UnimplementedError(f"vLLM {version}: {why}; 0.28 to 0.33 are known: install one of them, or a newer Tessera")
