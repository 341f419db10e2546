"""What ranks do together once a sharded model has other parameters than before.

New parameters are compared over the ranks and adopted: those that shard_module_() would have chosen are cut, in place,
so that optimisers that hold them already hold sharded ones; all others stay whole, and their gradients are added over
the ranks from the next backward on. Nobody waits for rows of weights that have left the model, and their memory is
freed once no rank has them (`departed.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from .._errors import InvalidArgumentError, MismatchError
from .buffers import difference
from .choice import Chosen
from .digests import comparable_digest
from .interrupts import together
from .making import can_reduce
from .model import ShardedModel
from .module_states import watch_states
from .overlap import sharing_memory
from .parameter import LogicalParameter
from .refusals import kind_refused
from .replicated import Replicated
from .structure import (
    Place,
    Structure,
    become_parameters,
    can_swap,
    is_script,
    leave_hooks,
    places_in,
    swap,
)
from .telling import answers_of, json_of, known, told_of
from .weight import Weight

_WHAT = "a change of the model's parameters"
Cut = Callable[[ShardedModel, str, torch.nn.Parameter, Chosen, list[tuple[torch.nn.Module, str]]], Weight]


@dataclasses.dataclass
class Adopter:
    """How a model takes parameters that it gets after it was sharded.

    Attributes:
        choose: Returns how shard_module_() would cut a parameter; None: not at all.
        cut: Makes a weight of a parameter, and puts it into its places.
    """

    model: ShardedModel
    choose: Callable[[str, torch.nn.Parameter], Chosen | None]
    cut: Cut
    _sharing: set[int] = dataclasses.field(default_factory=set)  # of the look that is under way

    def __call__(self, root: torch.nn.Module) -> None:
        """Adopt what has changed. Collective if parameters or buffers have come or gone."""
        model = self.model
        structure = model.watch.structure
        assert structure is not None
        become_parameters(root)
        found: dict[int, list[Place]] = {}
        for place in places_in(root):
            found.setdefault(id(place.parameter), []).append(place)
        swapped = structure.swapped()
        unknown = {id(place.parameter) for place in swapped}
        new = [places for key, places in found.items() if key not in structure.known or key in unknown]
        for place in swapped:
            leave_hooks(place.parameter)
        left = {id(place.parameter) for place in swapped if not isinstance(place.parameter, LogicalParameter)}
        lost = [place for key, place in structure.known.items() if key not in found or key in left]
        others = [places for places in new if _is_of_another(places[0].parameter, model)]
        own = [places for places in new if places not in others]
        buffers = model.buffers.new_in(root) if model.buffers is not None else {}
        moved = {place[:3] for place in structure.places} ^ {place[:3] for ones in found.values() for place in ones}
        if not (own or lost or buffers or others or moved):
            model.watch.structure = Structure(root)
            return
        if not (own or lost or buffers):
            return self._change(root, own, lost, others)
        self._agree(root, own, lost, buffers)
        with together(model, _WHAT):
            if lost:
                model.drain()  # which frees rows of those that all ranks had lost before
            self._change(root, own, lost, others)

    def _change(
        self, root: torch.nn.Module, own: list[list[Place]], lost: list[Place], others: list[list[Place]]
    ) -> None:
        """Take what has come, and let go of what has left. Collective, if weights have come."""
        model = self.model
        model.watch.end()
        try:
            self._let_go(lost)
            for places in own:
                self._take(places)
            if model.buffers is not None:
                model.buffers.follow(root)
            if any(not weight.started for weight in model.weights):
                model.runtime.start()
                for weight in model.weights:
                    weight.started = True
                model.show_masters()
            for places in others:
                self._join(places)
        finally:
            model.watch.begin(root)

    # --- what ranks tell each other

    def _agree(
        self, root: torch.nn.Module, own: list[list[Place]], lost: list[Place], buffers: dict[str, torch.Tensor]
    ) -> None:
        """Throw, on all ranks, if they have changed the model in different ways, or one of them cannot take a
        parameter. Collective."""
        told: dict[str, Any] = {}
        error: Exception | None = None
        try:
            self._sharing = sharing_memory(root) if own else set()
            told["lost"] = sorted(place.name for place in lost)
            told["new"] = [self._facts(root, places) for places in own]
            told["buffers"] = {name: comparable_digest(buffer) for name, buffer in buffers.items()}
        except Exception as refused:
            error = refused
        blob = told_of(_WHAT, json.dumps(told).encode(), error)
        answers = json_of(answers_of(self.model.core.exchange(_WHAT, blob), error), _WHAT, _is_possible)
        self._require_same(answers)
        self._whole = {
            facts["name"] for answer in answers for facts in answer["new"] if not facts["cut"]
        }  # on any rank
        self._reduced = {facts["name"] for answer in answers for facts in answer["new"] if facts["gradient"]}

    def _facts(self, root: torch.nn.Module, places: list[Place]) -> dict[str, Any]:
        name, parameter = places[0].name, places[0].parameter
        if isinstance(parameter, LogicalParameter):
            weight = parameter.etp
            current = weight.parameter
            shares = current is not parameter and isinstance(current, LogicalParameter) and current.etp is weight
            if shares and any(place.parameter is current for place in places_in(root)):
                raise InvalidArgumentError(
                    f"{name} has the memory of {weight.name}, as another parameter, and both are in the model: tie "
                    f"them by giving both modules one parameter, or copy it: nn.Parameter(etp.whole(p).clone())"
                )
            what: Any = f"the weight {weight.numbers[0]}"
            written = str(weight.store.stamp)
            return {
                "name": name,
                "what": what,
                "digest": written,
                "cut": True,
                "gradient": False,
                "places": len(places),
            }
        refused = "on the meta device, without values" if parameter.is_meta else kind_refused(parameter)
        if refused is not None:
            raise InvalidArgumentError(f"{name} has come to the model after shard_module_(), and is {refused}")
        assert isinstance(parameter, torch.nn.Parameter)
        source = parameter.__dict__.get("etp_cut_of", _nothing)()
        if source is not None and any(source.parameter is place.parameter for place in places_in(root)):
            raise InvalidArgumentError(
                f"{name} is made of a part of {source.name}, whose memory it would share, and both are in the model: "
                "give it memory of its own: nn.Parameter(p[...].clone())"
            )
        stays = any(is_script(place.module) for place in places) or id(parameter) in self._sharing
        chosen = None if stays else self.choose(name, parameter)
        cut = chosen is not None and can_swap(parameter) and not self.model.in_forward()
        what = [type(parameter).__name__, str(tuple(parameter.shape)), str(parameter.dtype), parameter.requires_grad]
        return {
            "name": name,
            "what": what,
            "digest": comparable_digest(parameter),
            "cut": cut,
            "gradient": parameter.grad is not None,
            "places": [place.name for place in places],
        }

    def _require_same(self, answers: list[dict[str, Any]]) -> None:
        first = answers[0]
        for rank, answer in enumerate(answers):
            for what, key in (("lost", "lost"), ("got", "new")):
                here, there = (_names(each[key]) for each in (first, answer))
                if here != there:
                    one = next(iter(set(here) ^ set(there)), "another order")
                    raise known(
                        MismatchError(
                            f"ranks 0 and {rank} have changed the model in different ways: one has {what} {one}: "
                            "change it on all ranks alike, before the same forward"
                        )
                    )
            for here, there in zip(first["new"], answer["new"], strict=True):
                if (here["what"], here["places"]) != (there["what"], there["places"]):
                    raise known(
                        MismatchError(
                            f"{here['name']} has come to the model as {here['what']} in {here['places']} on rank 0, "
                            f"and as {there['what']} in {there['places']} on rank {rank}: change the model on all "
                            "ranks alike"
                        )
                    )
                if here["digest"] != there["digest"]:
                    raise known(
                        MismatchError(
                            f"{here['name']} has come to the model after shard_module_(), and differs between ranks 0 "
                            f"and {rank}: make it from the same seed on all ranks, or "
                            "torch.distributed.broadcast(p.data, 0)"
                        )
                    )
            for name in sorted({*first["buffers"], *answer["buffers"]}):
                if first["buffers"].get(name) != answer["buffers"].get(name):
                    raise known(difference(name, 0, rank))

    # --- what comes and goes

    def _let_go(self, lost: list[Place]) -> None:
        model = self.model
        gone = {id(place.parameter) for place in lost}
        for weight in [each for each in model.weights if id(each.parameter) in gone]:
            model.depart(weight)
        for replicated in model.replicated:
            if id(replicated.parameter) in gone:
                replicated.forget()
        for name in [name for name, each in model.foreign.items() if id(each) in gone]:
            del model.foreign[name]
        model.replicated = [each for each in model.replicated if id(each.parameter) not in gone]

    def _take(self, places: list[Place]) -> None:
        model = self.model
        name, parameter = places[0].name, places[0].parameter
        if isinstance(parameter, LogicalParameter):
            weight = parameter.etp
            model.come_back(weight, parameter)
            parameter.receive()
            weight.rename(name)
            return
        assert isinstance(parameter, torch.nn.Parameter)
        if name in self._reduced and parameter.requires_grad:
            _reduce(model, name, parameter)
        if name not in self._whole:
            chosen = self.choose(name, parameter)
            assert chosen is not None
            made = copy_over(parameter)
            weight = self.cut(model, name, made, chosen, [(place.module, place.key) for place in places])
            weight.started = False
            logical = weight.parameter
            swap(parameter, logical)
            weight.parameter = parameter
            for place in places:
                place.module._parameters[place.key] = parameter
        elif model.core.size > 1 and can_reduce(parameter):
            model.replicated.append(Replicated(model, name, parameter))
        else:
            model.foreign[name] = parameter

    def _join(self, places: list[Place]) -> None:
        """Have a layer's runtime and this one meet together."""
        parameter = places[0].parameter
        assert isinstance(parameter, LogicalParameter)
        other = parameter.etp.model
        assert isinstance(other, ShardedModel)
        self.model.companions.add(other)
        other.companions.add(self.model)
        for place in places:
            watch_states(place.module, other)


def _nothing() -> None:
    """Stand for a reference to a parameter that there is not."""


def _names(entries: list[Any]) -> list[str]:
    return [entry if isinstance(entry, str) else entry["name"] for entry in entries]


def _is_of_another(parameter: torch.Tensor, model: ShardedModel) -> bool:
    return isinstance(parameter, LogicalParameter) and parameter.etp.model is not model


def copy_over(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a parameter over the same memory, with its hooks, gradient and attributes, for the time of a cut."""
    with DisableTorchFunctionSubclass():
        made = torch.nn.Parameter(parameter.data, parameter.requires_grad)
        made.grad = parameter.grad
        made.__dict__.update(parameter.__dict__)
        made._backward_hooks = parameter._backward_hooks
        made._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return made


def _reduce(model: ShardedModel, name: str, parameter: torch.nn.Parameter) -> None:
    """Add over the ranks the gradient that a parameter has had before it was adopted. Collective."""
    gradient = parameter.grad
    own = torch.zeros_like(parameter, memory_format=torch.contiguous_format) if gradient is None else gradient
    own = (own.to_dense() if own.layout is not torch.strided else own).detach().contiguous()
    size = own.numel() * own.element_size()
    all_ranks = torch.empty((model.core.size, *own.shape), dtype=own.dtype)
    sizes = [size] * model.core.size
    model.core.gather_bytes(f"the gradient of {name}", own.data_ptr(), sizes, all_ranks.data_ptr())
    total = all_ranks[0].float() * model.scale
    for other in all_ranks[1:]:
        total += other.float() * model.scale
    parameter.grad = total.to(own.dtype)


def _is_possible(told: Any) -> bool:
    """Tell whether a rank's changes have the form that they must have."""
    texts = [*told["lost"], *told["buffers"], *told["buffers"].values()]
    for facts in told["new"]:
        texts += [facts["name"], facts["digest"]]
        if not (isinstance(facts["cut"], bool) and isinstance(facts["gradient"], bool)):
            return False
        if not {"what", "places"} <= facts.keys():
            return False
    return all(isinstance(text, str) for text in texts)
