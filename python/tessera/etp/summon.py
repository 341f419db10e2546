"""Whole, plain weights in a sharded model for a while, for programs that must see plain parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .._errors import InvalidArgumentError
from .digests import comparable_digest, same_bits
from .model import ShardedModel
from .modules import has_group, put, unsharded_class
from .parameter import LogicalParameter
from .structure import Structure, can_swap, swap
from .telling import answers_of, families_in, json_of, known, telling, told_of
from .views import models_of, places_of, whole
from .weight import Weight, keep_part

_WHAT = "what was written within summon()"
Held = tuple[torch.nn.Module, str, LogicalParameter]


@contextmanager
def summon(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Within it, the model has whole weights as plain parameters: state_dict(), save_pretrained(), a copy, programs
    that resize, merge or replace weights. Collective.

    What is written into them, and what takes their place, is carried back when it is left, if it is the same on all
    ranks; else it is refused by name on all of them. Nothing can be trained within it. It needs memory for the whole
    model.
    """
    with telling("etp.summon()", families_in([model])):
        yield from _summoned(model)


def _summoned(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    models = models_of(model)
    for each in models:
        each.watch.look(thorough=True)
    held = places_of(model)
    full: dict[Weight, torch.nn.Parameter] = {}
    for _, _, parameter in held:
        if parameter.etp not in full:
            full[parameter.etp] = torch.nn.Parameter(whole(parameter).detach(), requires_grad=parameter.requires_grad)
            keep_part(parameter, full[parameter.etp])
    kinds = [type(module) for module, _, _ in held]
    structures: list[tuple[ShardedModel, Structure | None]] = [(each, each.watch.structure) for each in models]
    with ExitStack() as unwatched:
        for each in models:
            unwatched.enter_context(each.watch.paused())
        for module, name, parameter in held:
            put(module, name, full[parameter.etp])
            module.__class__ = unsharded_class(type(module))
        try:
            yield model
        except BaseException:
            _put_back(held, kinds, held)
            raise
        replaced = _settle(models, held, kinds, full)
    for each, structure in structures:
        if structure is not None:
            structure.forget(replaced)
            each.watch.structure = structure
            each.watch.look(thorough=True)


def _put_back(held: list[Held], kinds: list[type], places: list[Held]) -> None:
    for place, kind in zip(held, kinds, strict=True):
        module, name, parameter = place
        if type(module) is unsharded_class(kind):
            module.__class__ = kind
        if place in places:
            put(module, name, parameter)


def _settle(
    models: list[ShardedModel], held: list[Held], kinds: list[type], full: dict[Weight, torch.nn.Parameter]
) -> list[torch.Tensor]:
    """Write what was written, and leave what has taken the place of weights. Returns parameters that are plain now,
    for their ranks to adopt."""
    kept = []
    for place in held:
        module, name, parameter = place
        given, now = full[parameter.etp], module._parameters.get(name)
        if now is given and given.shape == parameter.shape and given.dtype == parameter.dtype:
            kept.append(place)
    untouched = {id(place[2]) for place in kept}
    _put_back(held, kinds, kept)
    written = {
        weight: given
        for weight, given in full.items()
        if id(weight.parameter) in untouched and not same_bits(given.detach(), whole(weight.parameter).detach())
    }
    replaced = [place for place in held if place not in kept]
    try:
        for each in models:
            _agree(each, held, full, written, replaced)
    except BaseException:
        _put_back(held, kinds, held)
        raise
    for each in models:
        weights = [weight for weight in written if weight.model is each]
        if not weights:
            continue
        with torch.no_grad(), each.writing(weights, "what was written within summon()", b"", True):
            for weight in weights:
                weight.store.take(written[weight].detach())
                weight.store.written(0)
    for weight, given in full.items():
        parameter = weight.parameter
        if id(parameter) in untouched and parameter.requires_grad != given.requires_grad:
            parameter.requires_grad_(given.requires_grad)
    return _resized(held, full, untouched)


def _resized(held: list[Held], full: dict[Weight, torch.nn.Parameter], untouched: set[int]) -> list[torch.Tensor]:
    """Have parameters that got another shape by `p.data =` be plain ones of that shape, as optimisers hold them."""
    found: list[torch.Tensor] = []
    for module, name, parameter in held:
        weight = parameter.etp if isinstance(parameter, LogicalParameter) else None
        if weight is None:  # became plain at another place
            put(module, name, parameter)
        elif id(parameter) not in untouched and module._parameters.get(name) is full[weight] and can_swap(parameter):
            given = full[weight]
            swap(parameter, given)
            weight.parameter = given
            weight.model.depart(weight)
            put(module, name, parameter)
            found.append(parameter)
    return found


def _described(parameter: torch.Tensor | None) -> str:
    """Say what has taken a weight's place, alike on ranks where it is the same."""
    if parameter is None:
        return "nothing"
    facts = f"{type(parameter).__name__} {parameter.requires_grad}"
    return f"{facts} on meta" if parameter.is_meta else f"{facts} {comparable_digest(parameter)}"


def _agree(
    model: ShardedModel,
    held: list[Held],
    full: dict[Weight, torch.nn.Parameter],
    written: dict[Weight, torch.nn.Parameter],
    replaced: list[Held],
) -> None:
    """Throw, on all ranks, where they have written or replaced different things. Collective."""
    told: dict[str, Any] = {}
    error = None
    for module, key, parameter in replaced:
        weight = parameter.etp
        if weight.model is model and (model.of_layers or has_group(module)):
            error = (
                f"{weight.name} belongs to a layer that was constructed sharded, and cannot be replaced within "
                "summon(): replace the layer"
            )
        told[weight.name] = f"{told.get(weight.name, '')} {_described(module._parameters.get(key))}"
    for weight, given in full.items():
        if weight.model is model and given.grad is not None:
            error = (
                f"{weight.name} has got a gradient within summon(), of this rank's own: compute gradients outside of it"
            )
    for weight, given in written.items():
        if weight.model is model:
            told[weight.name] = comparable_digest(given)
    for replicated in model.replicated:
        told[replicated.name] = comparable_digest(replicated.parameter)
    refusal = None if error is None else InvalidArgumentError(error)
    blob = told_of(_WHAT, json.dumps(told).encode(), refusal)
    answers = answers_of(model.core.exchange(_WHAT, blob), refusal)
    written_by = json_of(answers, "summoned parameters", lambda told: isinstance(told, dict))
    first = written_by[0]
    for rank, other in enumerate(written_by):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise known(
                    InvalidArgumentError(
                        f"{name} was written or replaced within summon(), and not alike on ranks 0 and {rank}: do the "
                        "same on all ranks; sharded weights are as before"
                    )
                )
