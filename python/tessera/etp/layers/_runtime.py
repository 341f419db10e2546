"""The runtime that constructed layers of a group share: they are prefetched along the order of their uses, and their
gradients meet at the end of a backward, as those of one model."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ..compile import leave_out_of_graphs
from ..gradient_hooks import watch_gradient_hooks
from ..group import Group
from ..making import make_runtime
from ..model import ShardedModel
from ..module_states import watch_ties
from ..module_watch import ModuleWatch
from ..optim import watch_optimizers
from ..plain_tensors import watch_plain_tensors
from ..replicated import Replicated
from ..state_loading import watch_loads
from ..weight import Weight
from ..wrappers import watch_wrappers


@dataclasses.dataclass(frozen=True)
class Policy:
    """What layers of one runtime have in common, beside their group: arguments of theirs."""

    publish: str
    reduction: str
    inline: bool
    dp: Group | None

    @property
    def replicas(self) -> int:
        return 1 if self.dp is None else self.dp.size


class _LayersWatch(ModuleWatch):
    """Follows the states of layers; each layer sees to its own forwards."""

    def __init__(self, model: ShardedModel) -> None:
        super().__init__(model)
        self._layers: list[weakref.ref[torch.nn.Module]] = []

    @property
    def is_needed(self) -> bool:
        return any(layer() is not None for layer in self._layers)

    def add_tied(self, module: torch.nn.Module) -> None:
        self._layers.append(weakref.ref(module))
        super().add_tied(module)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.end()
        try:
            yield
        finally:
            for each in self._layers:
                layer = each()
                if layer is not None:
                    super().add_tied(layer)
            for replicated in self.model.replicated:
                replicated.attach()


class LayersModel(ShardedModel):
    """Layers that were constructed one after another. It takes further ones until the first update of one of them,
    which is collective, so that ranks agree; models of later layers are freed apart from it."""

    of_layers = True
    _whole: weakref.WeakKeyDictionary[torch.nn.Module, list[Replicated]]
    _policy: Policy

    @classmethod
    def of(cls, group: Group, policy: Policy) -> LayersModel:
        """Collective, where there is none yet."""
        found = group.layers.get(policy)
        if isinstance(found, cls):
            return found
        member = group.of_model() if policy.dp is None or policy.dp.size == 1 else group.with_replicas(policy.dp)
        core = member.core
        runtime = make_runtime(core, policy.reduction, policy.publish, replicas=policy.replicas)
        made = cls(group, member, runtime, policy.inline, 1.0 if policy.reduction == "sum" else 1 / core.size)
        made.watch = _LayersWatch(made)
        made._whole = weakref.WeakKeyDictionary()
        made._policy = policy
        group.layers[policy] = made
        group.finish(member)
        watch_optimizers()
        watch_plain_tensors()
        watch_gradient_hooks()
        watch_loads()
        watch_ties()
        watch_wrappers()
        leave_out_of_graphs()
        return made

    def add_replicated(self, layer: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        """A parameter of the layer that every rank has whole; there are several ranks."""
        replicated = Replicated(self, name, parameter)
        self.replicated.append(replicated)
        self._whole.setdefault(layer, []).append(replicated)
        replicated.attach()

    def start(self, layer: torch.nn.Module) -> None:
        """Once its parameters have been added. Collective."""
        self.runtime.start()
        self.drop_rows()
        self.show_masters()
        self.watch.add_tied(layer)

    def take_no_more(self) -> None:
        if self.group.layers.get(self._policy) is self:
            del self.group.layers[self._policy]

    def follow(self, layer: torch.nn.Module, weights: Iterable[Weight]) -> None:
        """What of a layer has been frozen or released."""
        leave_out_of_graphs()
        if self.idle:
            with torch._C.DisableTorchFunctionSubclass():
                for weight in weights:
                    weight.follow_frozen()
            for replicated in self._whole.get(layer, ()):
                replicated.follow()

    def begin_update(self, weights: Iterable[Weight], what: str = "an update", timeout: float | None = None) -> None:
        self.take_no_more()
        super().begin_update(weights, what, timeout)
