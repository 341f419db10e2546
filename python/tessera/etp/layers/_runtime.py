"""The runtime that constructed layers of a group share: they are prefetched along the order of their uses, and their
gradients meet at the end of a backward, as those of one model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ..._errors import InvalidArgumentError
from .._compile import leave_out_of_graphs
from .._config import config
from .._group import Group
from .._making import make_runtime
from .._model import ShardedModel
from .._optim.optimizers import watch_optimizers
from .._states.logical import watch_states
from .._weights.matrix import Listed
from .._weights.replicated import Replicated
from .._weights.weight import Weight, dtype_name


class LayersModel(ShardedModel):
    """Layers that were constructed one after another. It takes further ones until the first update of one of them,
    which is collective, so that ranks agree; models of later layers are freed apart from it."""

    _layers: list[weakref.ref[torch.nn.Module]]
    _whole: weakref.WeakKeyDictionary[torch.nn.Module, list[Replicated]]
    _key: tuple[str, str]

    @classmethod
    def of(cls, group: Group, publish: str, reduction: str) -> LayersModel:
        """Collective, where there is none yet."""
        if not config.async_reduction:
            raise InvalidArgumentError(
                "async_reduction=False is mode='inline', and layers that are constructed sharded reduce gradients "
                "beside the backward: update_config(async_reduction=True) before they are made, or shard plain layers "
                "with shard_module_(mode='inline')"
            )
        key = (publish, reduction)
        found = group.layers.get(key)
        if isinstance(found, cls):
            return found
        core = group.of_model()
        runtime = make_runtime(core, reduction, publish)
        made = cls(group, core, runtime, False, 1.0 if reduction == "sum" else 1 / group.size)
        made._layers = []
        made._whole = weakref.WeakKeyDictionary()
        made._key = key
        group.layers[key] = made
        watch_optimizers()
        leave_out_of_graphs()
        return made

    def add_replicated(self, layer: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        """A parameter of the layer that every rank has whole; the group has several ranks."""
        number = self.runtime.add_replicated(name, parameter.numel(), dtype_name(parameter.dtype))
        replicated = Replicated(self, number, name, parameter)
        self.replicated.append(replicated)
        self._whole.setdefault(layer, []).append(replicated)
        replicated.attach()

    def start(self, layer: torch.nn.Module) -> None:
        """Once its parameters have been added. Collective."""
        self.runtime.start()
        self._layers.append(weakref.ref(layer))
        self._handles += watch_states(layer, self)

    def take_no_more(self) -> None:
        if self.group.layers.get(self._key) is self:
            del self.group.layers[self._key]

    def follow(self, layer: torch.nn.Module, weights: Iterable[Weight]) -> None:
        """What of a layer has been frozen or released."""
        if self.idle:
            with torch._C.DisableTorchFunctionSubclass():
                for weight in weights:
                    weight.follow_frozen()
            for replicated in self._whole.get(layer, ()):
                replicated.follow()

    def begin_update(self, weights: Iterable[Listed]) -> None:
        self.take_no_more()
        super().begin_update(weights)

    @property
    def alive(self) -> bool:
        return any(layer() is not None for layer in self._layers)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        self.unwatch()
        try:
            yield
        finally:
            for each in self._layers:
                layer = each()
                if layer is not None:
                    self._handles += watch_states(layer, self)
            for replicated in self.replicated:
                replicated.attach()
