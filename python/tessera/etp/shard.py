"""Sharding a model in place, and undoing it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from .._arguments import choice, function, whole
from .._errors import AlreadyExistsError, InvalidArgumentError
from .adopt import Adopter, copy_over
from .buffers import Buffers, require_same_buffers, require_used, rules_of
from .choice import Choice, Chosen, Filter, Pattern, Place, Shapes, matrix_of
from .compile import leave_out_of_graphs, uncompiled
from .config import is_inline
from .copying import Copier
from .experts import expert_lists, gather_together
from .gradient_hooks import watch_gradient_hooks
from .group import Group
from .interrupts import together
from .making import (
    add_stack,
    add_weight,
    can_reduce,
    digest_of,
    make_runtime,
    require_same,
    require_same_digests,
    require_same_options,
)
from .meta import Init, is_on_meta, materialise
from .model import ShardedModel
from .module_states import watch_ties
from .modules import Constructed, has_group, only_reads, put, sharded_class, unsharded_class
from .moves import watch_moves
from .optim import watch_optimizers
from .overlap import sharing_memory
from .parameter import LogicalParameter
from .plain_tensors import watch_plain_tensors
from .refusals import refuse_older_graphs, require_module, require_shardable
from .replicated import Replicated
from .state_loading import watch_loads
from .state_names import note_names
from .structure import can_swap, is_script, swap
from .telling import collective
from .tensor import lasting
from .views import models_of, places_of
from .views import whole as whole_of
from .weight import Weight, can_shard, keep_part
from .wrappers import note_root, watch_wrappers


@collective("shard_module_()")
@lasting()
def shard_module_(
    model: torch.nn.Module,
    group: Group,
    formats: Mapping[Pattern, str] | None = None,
    filter: Filter | None = None,
    min_elements: int = 2048,
    reduction: str = "mean",
    publish: str = "update",
    mode: str | None = None,
    compute_dtype: torch.dtype | None = None,
    dp: Group | None = None,
    *,
    native: Iterable[Pattern] = (),
    masters: str = "all",
    experts: Iterable[Sequence[str]] = (),
    nonfinite: str = "error",
    init: Init | None = None,
    stacks: Filter | None = None,
    buffers: str | Mapping[Pattern, str] = "broadcast",
) -> torch.nn.Module:
    """Cuts the model's matrices along dim 0 over the ranks of a group, in place, and returns it.

    Weights are gathered by the operations that use them, in modules of any class; a weight that several of them share
    stays one. Parameters become sharded in place: lists of them and optimisers that were made before hold them
    still. Experts [E, F, K] are E weights, each gathered where it is used. A convolution's weight is cut by its
    first dim, others of more than two dims as matrices of their last one. Every other
    parameter stays whole on every rank; its gradients are added over the group. Call it on every rank with the same
    weights. What torch.compile() has returned may be given, too. Collective.

    With one rank, weights without a format are left as they are: the model is as it was. Layers that were constructed
    sharded (etp.Linear, ...) keep their groups and formats; those that were constructed without a group are sharded.

    What is on the meta device is made module by module, so that a rank has no more than one module whole: by its
    reset_parameters(), or `init`. Afterwards, load_state_dict() gives it values; nn.init would give every rank the same
    rows.

    Args:
        model: In host memory, or on the meta device.
        group: Of init_group().
        formats: What travels, by regular expressions for whole names of parameters; the first match counts: a plain
            dtype ("bf16"), or "fp8_e4m3", "fp8_block_128x128", "mxfp8", "nvfp4", ... Others travel as they are.
        filter: Called with name and parameter; False leaves it whole.
        min_elements: Smaller parameters are left whole.
        reduction: "mean": gradients of all ranks are averaged; "sum": they are added.
        publish: When weights with a format are quantised: at the end of an "update", or at their "first_use" after it.
        mode: "deferred": gradients are added while the backward goes on, and .grad is set at its end. "inline": weights
            are ordinary inputs of autograd, and their gradients are reduced where the backward passes, collectively:
            torch.autograd.grad(), second derivatives, any hook. Slower; ranks must run the same backward. None:
            "deferred", unless update_config(async_reduction=False) says otherwise.
        compute_dtype: Of gathered weights with a format. None: the plain dtype that travels, else the parameter's.
        dp: A group of init_group() over an orthogonal axis, for data parallelism: its ranks keep the same rows, and
            train on different tokens. Gradients are reduced over both, in the order (dp, group) of ranks.
        native: Regular expressions for names of weights with a quantised format. Ranks share nothing of these but what
            travels: the parameter is the master that it is made from, in memory of this rank's own. One rank reads its
            values alone where processes of one user may read each other's memory (ptrace).
        masters: "all", or "trained": native weights that are frozen now keep none, and are never trained. Only what
            travels stays in memory, and state_dict(), summon() and unshard_() give the values that it decodes to.
        experts: Lists of names of weights of one shape, which are gathered and quantised together when the first one of
            a list is used, such as those of a layer of experts.
        nonfinite: "error" refuses to quantise NaN and infinity, "propagate" does it by the format's rules.
        init: Called with each module that has parameters or buffers on the meta device, to fill these.
        stacks: Called with name and parameter of those of three dims: whether they are experts. None: those of two
            slices or more are, in modules of other classes than torch.nn's.
        buffers: What becomes of buffers that a forward has changed, such as BatchNorm's running statistics, at the end
            of a backward: "broadcast": all ranks take rank 0's. "mean": floating-point ones are averaged, others are
            rank 0's. "own": each rank keeps its own, which are not compared either. Or one of these by regular
            expressions for whole names; the first match counts, others are broadcast.
    """
    if not isinstance(group, Group):
        raise InvalidArgumentError(f"shard_module_: group {group!r}: give what etp.init_group() returns")
    given, model = model, uncompiled(model)
    require_module(model)
    inline = is_inline(mode)
    choice("publish", publish, ("update", "first_use"))
    for argument, value in (("filter", filter), ("init", init), ("stacks", stacks)):
        function(argument, value)
    if compute_dtype is not None and (not isinstance(compute_dtype, torch.dtype) or not can_shard(compute_dtype)):
        raise InvalidArgumentError(f"compute_dtype {compute_dtype!r}: torch.float32, bfloat16 and float16 are possible")
    if dp is not None and not isinstance(dp, Group):
        raise InvalidArgumentError(f"shard_module_: dp {dp!r}: give what etp.init_group() returns")
    if dp is not None:
        group.member.family.unite(dp.member.family)
    replicas = 1 if dp is None else dp.size
    ranks = group.size * replicas
    min_elements = whole("min_elements", min_elements, 0)
    layers = _of_layers(model)
    named = [(name, each) for name, each in model.named_parameters() if id(each) not in layers]
    _refuse_sharded(model, named)
    _require_replicas(model, replicas)
    require_shardable(model, named)
    choose = Choice.of(ranks, filter, min_elements, formats or {}, native, masters)
    whole_ones = {id(each) for module in model.modules() if is_script(module) for each in module.parameters()}
    whole_ones |= sharing_memory(model) if ranks > 1 else set()
    chosen = choose.of_model([(name, each) for name, each in named if id(each) not in whole_ones])
    rules = rules_of(buffers)
    require_used(rules, dict(model.named_buffers()).keys())
    lists = expert_lists(experts, {name: parameter.shape for name, parameter in named}, chosen)
    if not chosen and ranks > 1 and not layers:
        whys = collections.Counter(
            choose.why_whole(name, each) or ("of shared memory or TorchScript" if id(each) in whole_ones else "")
            for name, each in named
        )
        raise InvalidArgumentError(
            f"shard_module_: no weight of {type(model).__name__} is left to shard: "
            f"{'; '.join(f'{count} {why}' for why, count in whys.items() if why) or 'it has none'}"
        )
    groups = [group] if dp is None else [group, dp]
    options = {
        "mode": "inline" if inline else "deferred",
        "nonfinite": repr(nonfinite),
        "buffers": repr([(rule.pattern, how) for rule, how in rules]),
        "experts": repr(lists),
    }
    for one in groups:
        one.require_open()
        require_same_options(one.core, "shard_module_()", options)
        require_same(one, [(name, parameter) for name, parameter in named if not parameter.is_meta])
        if any(True for _ in model.buffers()):
            held = {name: each for name, each in model.named_buffers() if not each.is_meta}
            require_same_buffers(one.core, held, rules)
    sharded = None
    with torch.device("cpu"):  # whatever the default is
        if chosen or (named and ranks > 1):
            sharded = _make_model(group, dp, reduction, publish, nonfinite, inline)
        shapes = Shapes.of(model, stacks)
        shapes.require_matrices(named, lists)
        on_meta = [name for name, each in model.named_buffers() if each.is_meta]
        cut = _Cut(sharded, shapes, compute_dtype, publish)
        _take(model, groups, cut, named, chosen, init)
        shapes.places.clear()  # `cut` lives on, and modules may leave the model
        for one in groups if on_meta else ():
            require_same_buffers(one.core, {name: model.get_buffer(name) for name in on_meta}, rules)
    if sharded is not None:
        gather_together(sharded.weights, lists)
        for module in model.modules():
            if isinstance(module, Constructed) and not module.has_group:
                module.list_experts(sharded)
        sharded.runtime.start()
        sharded.drop_rows()
        sharded.show_masters()
        sharded.adopt = Adopter(sharded, choose.of_parameter, cut.make)
        sharded.buffers = Buffers(sharded.core, model, rules)
        sharded.watch.begin(model)
        watch_optimizers()
        watch_plain_tensors()
        watch_gradient_hooks()
        watch_loads()
        watch_ties()
        watch_wrappers()
        watch_moves()
        leave_out_of_graphs()
        # All ranks have come as far, or none has.
        sharded.core.exchange("the end of shard_module_()", b"")
        group.finish(sharded.member)
    note_names(model)
    note_root(model)
    models = models_of(model)
    if sharded is not None and not sharded.weights:  # all is whole, beside layers that were constructed sharded
        models.append(sharded)
    for each in models:
        each.companions.update(other for other in models if other is not each)
    return given


def _make_model(
    group: Group, dp: Group | None, reduction: str, publish: str, nonfinite: str, inline: bool
) -> ShardedModel:
    """Make a model without weights, whose group is to be finished. Collective."""
    replicas = 1 if dp is None else dp.size
    member = group.of_model() if dp is None or dp.size == 1 else group.with_replicas(dp)
    runtime = make_runtime(member.core, reduction, publish, nonfinite, replicas)
    made = ShardedModel(group, member, runtime, inline, 1.0 if reduction == "sum" else 1 / (group.size * replicas))
    made.again = functools.partial(_make_model, group, dp, reduction, publish, nonfinite, inline)
    made.copier, made.publish = Copier, publish
    return made


def _take(
    model: torch.nn.Module,
    groups: Sequence[Group],
    cut: _Cut,
    named: list[tuple[str, torch.nn.Parameter]],
    chosen: dict[str, Chosen],
    init: Init | None,
) -> None:
    """Cuts what is chosen, and notes what stays whole."""
    sharded, places = cut.sharded, cut.shapes.places
    names = {id(each): name for name, each in named}
    digests: dict[str, bytes] = {}

    def take(old: torch.nn.Parameter, full: torch.nn.Parameter) -> None:
        name = names.get(id(old))
        if name is not None and old.is_meta:
            digests[name] = digest_of(name, full)
        if sharded is not None and name is not None and name in chosen:
            cut.take(sharded, name, old, full, chosen[name], places[id(old)])
            return
        made = full
        is_own = name is not None and not isinstance(full, LogicalParameter)  # no constructed layer has it
        if is_own and old is not full and can_swap(old) and can_swap(full):
            swap(old, full)
            full = old
        for module, place in places[id(old)] if old is not made else ():
            if module._parameters[place] is not full:
                put(module, place, full)
                if isinstance(full, LogicalParameter):  # of a constructed layer, which this module is tied to
                    full.etp.model.watch.add_tied(module)
        if name is None or sharded is None or math.prod(each.size for each in groups) == 1:
            return
        if not can_reduce(full):
            sharded.foreign[name] = full
        else:
            sharded.replicated.append(Replicated(sharded, name, full))

    for _, parameter in named:
        if not parameter.is_meta:
            take(parameter, parameter)
    if is_on_meta(model):
        materialise(model, init, take)
        for group in groups:
            require_same_digests(group, list(digests), list(digests.values()))


def _require_replicas(model: torch.nn.Module, replicas: int) -> None:
    """Throws if gradients of a layer that was constructed sharded are added over more or fewer replicas."""
    for name, module in model.named_modules():
        if isinstance(module, Constructed) and module.has_group and module.replicas != replicas:
            raise InvalidArgumentError(
                f"shard_module_: layer {name or type(module).__name__} was constructed with {module.replicas} "
                f"replicas, and the rest of the model would have {replicas}: give both the same dp="
            )


def _of_layers(model: torch.nn.Module) -> set[int]:
    """Parameters of layers that were constructed sharded."""
    return {id(each) for layer in model.modules() if has_group(layer) for each in layer._parameters.values()} - {
        id(None)
    }


@collective("unshard_()")
def unshard_(model: torch.nn.Module) -> torch.nn.Module:
    """Makes every weight whole again, in place, and returns the model. Gradients come along; an optimiser must be made
    again. Layers that were constructed sharded stay so. Collective."""
    given, model = model, uncompiled(model)
    own = [place for place in places_of(model) if not place[2].etp.model.of_layers]
    sharded = next((parameter.etp.model for _, _, parameter in own), None)
    if not isinstance(sharded, ShardedModel):
        return given
    _require_whole_model(model, sharded, {parameter.etp for _, _, parameter in own})
    sharded.drain()
    full = {}
    for weight in sharded.weights:
        old = weight.parameter
        assert isinstance(old, LogicalParameter)
        full[weight] = torch.nn.Parameter(whole_of(old).detach(), requires_grad=old.requires_grad)
        keep_part(old, full[weight])
        full[weight].grad = None if old.grad is None else whole_of(old.grad).detach()
    with together(sharded, "etp.unshard_()"):
        for module, name, parameter in own:
            put(module, name, full[parameter.etp])
            module.__class__ = unsharded_class(type(module))
        sharded.watch.end()
        sharded.is_unsharded = True
        sharded.close()
        sharded.core.close()
    return given


def _refuse_sharded(model: torch.nn.Module, named: list[tuple[str, torch.nn.Parameter]]) -> None:
    """Throw if some of its parameters are sharded."""
    name = next((name for name, each in named if isinstance(each, LogicalParameter)), None)
    if name is not None:
        raise AlreadyExistsError(
            f"shard_module_: {name} of {type(model).__name__} is sharded already: put new layers into the model that "
            "was sharded, whose next forward takes them, or undo it by etp.unshard_() of that model"
        )


def _require_whole_model(model: torch.nn.Module, sharded: ShardedModel, weights: Collection[Weight]) -> None:
    """Throw if the sharded model has others, too."""
    root = sharded.watch.module
    for _, _, parameter in places_of(root) if root is not None else ():
        if parameter.etp.model is sharded and parameter.etp not in weights:
            part, all_of_it = unsharded_class(type(model)), unsharded_class(type(root))
            raise InvalidArgumentError(
                f"etp.unshard_() of {part.__name__}, which is a part of a sharded {all_of_it.__name__} that has "
                f"{parameter.etp.name}, too: give it the whole model"
            )


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How the weights of a model are cut."""

    sharded: ShardedModel | None
    shapes: Shapes
    compute_dtype: torch.dtype | None
    publish: str

    def take(
        self,
        sharded: ShardedModel,
        name: str,
        old: torch.nn.Parameter,
        full: torch.nn.Parameter,
        how: Chosen,
        places: list[Place],
    ) -> None:
        """Cut a parameter, whose values `full` has, and let it become what is sharded: lists of parameters and
        optimisers that were made before hold it still. One that a graph leads to cannot: another one takes its
        places."""
        recurrent = {module for module, _ in places if isinstance(module, torch.nn.RNNBase)}
        for recurring in recurrent:
            recurring._flat_weight_refs = []  # weak references, which a parameter that changes its kind must not have
        swaps = can_swap(old)
        weight = self.make(sharded, name, copy_over(full) if swaps else full, how, places)
        parameter = weight.parameter
        if swaps:
            swap(old, parameter)
            weight.parameter = parameter = old
        else:
            refuse_older_graphs(old, name)
        for module, place in places:
            if module._parameters[place] is not parameter:
                put(module, place, parameter)
        for recurring in recurrent:
            listed: Any = recurring._flat_weights
            recurring._flat_weight_refs = [None if each is None else weakref.ref(each) for each in listed]

    def make(
        self, sharded: ShardedModel, name: str, full: torch.nn.Parameter, how: Chosen, places: list[Place]
    ) -> Weight:
        """Cut a parameter, and prepare the modules that have it."""
        if self.shapes.is_stack(name, full, places):
            weight: Weight = add_stack(
                sharded, name, full, how.format, self.compute_dtype, self.publish, how.native, how.planes_only
            )
        else:
            matrix = matrix_of(full.shape, places)
            copied = sharded.inline or not all(only_reads(module, place) for module, place in places)
            weight = add_weight(
                sharded, name, full, matrix, how.format, self.compute_dtype, how.native, how.planes_only, copied
            )
        if full.grad is not None:
            weight.parameter.grad = weight.gradient_of(weight.cut(full.grad).clone())
        for module, place in places:
            fast = place == "weight" and not sharded.inline and weight.stride is None
            kind = sharded_class(module) if fast else None
            if kind is not None:
                module.__class__ = kind
        return weight
