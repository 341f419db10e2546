"""A model of vLLM as its loader wants it, without data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from ..._errors import UnimplementedError


@contextlib.contextmanager
def on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Parameters and buffers without data, in the form that vLLM recorded before it processed them; the live ones come
    back whatever happens. Raises UnimplementedError if this vLLM does not record it."""
    try:
        from vllm.model_executor.model_loader.reload import layerwise, meta

        restore, info_of, original = (
            meta.restore_layer_on_meta,
            layerwise.get_layerwise_info,
            layerwise._get_original_loader,
        )
    except (ImportError, AttributeError) as error:
        raise UnimplementedError(
            f"this vLLM does not record how its loader saw the parameters ({error}): 0.32 and 0.33 are known"
        ) from error
    kept: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any], set[str]]] = []
    try:
        for layer in model.modules():
            kept.append((layer, dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set)))
            restore(layer, info_of(layer))
            for tensors in (layer._parameters, layer._buffers):
                for name, tensor in list(tensors.items()):
                    if tensor is not None and not tensor.is_meta:  # a bias, which is never put on meta
                        tensors[name] = meta.to_meta_tensor(tensor)
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                if getattr(getattr(tensor, "weight_loader", None), "__name__", "") == "online_process_loader":
                    # left by an earlier reload: it would load nothing
                    cast(Any, tensor).weight_loader = original(tensor)
        yield
    finally:
        for layer, parameters, buffers, not_kept in kept:
            for now, before in ((layer._parameters, parameters), (layer._buffers, buffers)):
                now.clear()
                now.update(before)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(not_kept)
