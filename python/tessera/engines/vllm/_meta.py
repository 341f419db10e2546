"""A model of vLLM as its loader wants it, without data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from ._generation import reloading


@contextlib.contextmanager
def on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Parameters and buffers without data, in the form that vLLM recorded before it processed them; the live ones come
    back whatever happens. Raises UnimplementedError if this vLLM does not record it."""
    reload = reloading()
    kept: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any], set[str]]] = []
    try:
        for layer in model.modules():
            kept.append((layer, dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set)))
            reload.restore_on_meta(layer, reload.info_of(layer))
            # A bias, which vLLM never puts on meta, but not integers, such as the map of experts: loaders look at them.
            for tensors, floats_only in ((layer._parameters, False), (layer._buffers, True)):
                for name, tensor in list(tensors.items()):
                    if tensor is not None and not tensor.is_meta and (tensor.is_floating_point() or not floats_only):
                        tensors[name] = reload.to_meta(tensor)
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                if getattr(getattr(tensor, "weight_loader", None), "__name__", "") == "online_process_loader":
                    # left by an earlier reload: it would load nothing
                    cast(Any, tensor).weight_loader = reload.original_loader(tensor)
        yield
    finally:
        for layer, parameters, buffers, not_kept in kept:
            for now, before in ((layer._parameters, parameters), (layer._buffers, buffers)):
                now.clear()
                now.update(before)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(not_kept)
