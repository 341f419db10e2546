"""copy.deepcopy() of a sharded model, a part of it, or a parameter: a second sharded model of the same group."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch

from .._errors import InvalidArgumentError
from .adopt import Adopter
from .buffers import Buffers
from .digests import same_bits
from .experts import Experts, gather_together
from .making import add_stack, add_weight
from .model import ShardedModel
from .modules import Constructed
from .parameter import LogicalParameter
from .replicated import Replicated
from .stack import Stack
from .telling import telling
from .views import whole
from .weight import Weight, keep_part


class Copier:
    """What copy.deepcopy() calls for a module that has sharded weights, in place of its class's own."""

    def __init__(self, model: ShardedModel, module: torch.nn.Module) -> None:
        self._model, self._module = weakref.ref(model), weakref.ref(module)

    def __call__(self, memo: dict[Any, Any]) -> torch.nn.Module:
        """Copy the module, whose copy becomes the root of a sharded model. Collective."""
        model, module = self._model(), self._module()
        assert model is not None and module is not None
        what = f"a copy of {type(module).__name__}"
        with telling(what, [model.member.family]):
            if model.watch.has_unknown(module):  # it is to be copied as what it becomes
                model.watch.look(thorough=True)
            copying = Copying.of(model, memo, what)
            copying.has_root = True
            with model.watch.paused():
                copied: torch.nn.Module = copy.deepcopy(module, memo)
            copying.finish(copied, memo)
        return copied

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()


class Copying:
    """One call of copy.deepcopy(), and the model that it makes."""

    def __init__(self, model: ShardedModel, what: str) -> None:
        if model.again is None:
            raise InvalidArgumentError(
                f"{model.weights[0].name} and others belong to layers that were constructed sharded, of which there is "
                f"no copy ({what}): construct a second layer, and load_state_dict() of the first into it"
            )
        self._old, self._new = model, model.again()
        self._made: dict[Weight, Weight] = {}
        self.has_root = False  # a module is copied, which starts all weights at its end

    @staticmethod
    def of(model: ShardedModel, memo: dict[Any, Any], what: str) -> Copying:
        """Return what a call of deepcopy(), which has that memo, makes of a model. Collective, the first time."""
        key = ("tessera.etp", model.number)
        if key not in memo:
            memo[key] = Copying(model, what)
        found: Copying = memo[key]
        return found

    def parameter(self, old: LogicalParameter) -> LogicalParameter:
        """Copy one parameter."""
        weight, new = old.etp, self._new
        full = torch.nn.Parameter(whole(old).detach(), requires_grad=old.requires_grad)
        keep_part(old, full)
        compute = weight.compute if weight.format else None
        how = (weight.native, weight.planes_only)
        if isinstance(weight, Stack):
            made: Weight = add_stack(new, weight.name, full, weight.format, compute, new.publish, *how)
        else:
            made = add_weight(new, weight.name, full, weight.matrix, weight.format, compute, *how, weight.copied)
        made.started = False
        self._made[weight] = made
        return made.parameter  # type: ignore[no-any-return]

    def start(self) -> None:
        """Have ranks tell each other where rows lie. Collective."""
        self._new.runtime.start()
        self._new.group.finish(self._new.member)
        for old, new in self._made.items():
            if not new.started:
                new.started = True
                new.drop_rows()
                if new.planes_only and not same_bits(whole(old.parameter), whole(new.parameter)):
                    raise InvalidArgumentError(
                        f"{old.name} is kept as {old.format} only, and its decoded values do not encode to themselves: "
                        "a copy would have others: shard with masters='all', or copy within etp.summon(model)"
                    )
        self._new.show_masters()

    def finish(self, copied: torch.nn.Module, memo: dict[Any, Any]) -> None:
        """Make a module the root of the new model. Collective."""
        old, new = self._old, self._new
        lists = {id(each.together): each.together for each in self._made if isinstance(each.together, Experts)}
        names = [[each.name for each in together.weights] for together in lists.values()]
        gather_together(new.weights, [each for each in names if {*each} <= {made.name for made in new.weights}])
        for module in copied.modules():
            if isinstance(module, Constructed) and not module.has_group:
                module.list_experts(new)
        self.start()
        for replicated in old.replicated:
            parameter = memo.get(id(replicated.parameter))
            if parameter is not None:
                new.replicated.append(Replicated(new, replicated.name, parameter))
        for name, parameter in old.foreign.items():
            if id(parameter) in memo:
                new.foreign[name] = memo[id(parameter)]
        for name, parameter in copied.named_parameters():
            if isinstance(parameter, LogicalParameter):
                parameter.etp.rename(name)
        if isinstance(old.adopt, Adopter):
            new.adopt = Adopter(new, old.adopt.choose, old.adopt.cut)
        if old.buffers is not None:
            new.buffers = Buffers(new.core, copied, old.buffers.rules)
        new.watch.begin(copied)


def copy_parameter(old: LogicalParameter, memo: dict[Any, Any]) -> LogicalParameter:
    """Copy a parameter, in the course of its module's copy or by itself. Collective."""
    model = old.etp.model
    assert isinstance(model, ShardedModel)
    with telling("a copy of a parameter", [model.member.family]):
        copying = Copying.of(model, memo, "a copy of a parameter")
        made = copying.parameter(old)
        memo[id(old)] = made
        if not copying.has_root:
            copying.start()
    return made


LogicalParameter.copied_by = staticmethod(copy_parameter)
