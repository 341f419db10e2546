"""Parameters that vLLM's loader computes instead of copying, such as A = -exp(A_log) of Mamba: that loader does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from .._learn import LearnedMap
from ._generation import reloading
from ._layers import empty_like_loaded, loaded_form


class Computed:
    """Runs the loader for the computed parameters of a version, beside the model that serves."""

    def __init__(self, model: torch.nn.Module, learned: LearnedMap, checkpoint: Mapping[str, Any]) -> None:
        """`checkpoint`: as for learn_map()."""
        self.needed = bool(learned.computed)
        self.learned = learned.with_loader(checkpoint) if self.needed else learned
        self._model = model

    def run(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Fills the memory of learned.results from what was received. No parameter of the live model is touched."""
        learned = self.learned
        wanted: dict[str, torch.Tensor] = {}
        model = _stand_in(self._model, "", frozenset(learned.computed), wanted, {})
        of = {each.tensor: learned.key(each) for each in learned.slices if each.is_whole}
        with torch.no_grad():
            cast(Any, model).load_weights((name, staged[of[name]]) for name in learned.by_loader)
            for result in learned.results:
                staged[learned.key(result)].copy_(wanted[result.tensor])


def _stand_in(
    module: torch.nn.Module,
    prefix: str,
    names: frozenset[str],
    wanted: dict[str, torch.Tensor],
    made: dict[int, torch.nn.Module],
) -> torch.nn.Module:
    """A module that shares all but parameters and buffers with `module`: those of `names` have memory of their own,
    which `wanted` gets, and all others have none."""
    if id(module) in made:
        return made[id(module)]
    reload = reloading()
    stand = made[id(module)] = object.__new__(type(module))
    stand.__dict__.update(module.__dict__)
    tensors: dict[str, dict[str, torch.Tensor | None]] = {"_parameters": {}, "_buffers": {}}
    for kind, loaded in zip(tensors, loaded_form(module), strict=True):
        for name in dict.fromkeys((*module.__dict__[kind], *loaded)):
            like = loaded.get(name, module.__dict__[kind].get(name))
            if like is None:
                tensors[kind][name] = None
            elif prefix + name in names:
                tensors[kind][name] = wanted[prefix + name] = _with_loader(empty_like_loaded(like, module))
            else:
                tensors[kind][name] = _with_loader(reload.restore_references(reload.to_meta(like), module))
    stand.__dict__.update(tensors)
    stand.__dict__["_modules"] = {
        name: None if each is None else _stand_in(each, f"{prefix}{name}.", names, wanted, made)
        for name, each in module._modules.items()
    }
    return stand


def _with_loader(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "weight_loader"):
        cast(Any, tensor).weight_loader = reloading().original_loader(tensor)
    return tensor
