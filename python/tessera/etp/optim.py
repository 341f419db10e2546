"""Optimisers: each step of one that holds sharded parameters is a batch of writes, whatever its class.

Three kinds of steps (`_Way`). Elementwise ones of torch, and those that allow_optimizer() names, compute on rows.
etp.Muon does, too, and moves matrices itself. Every other step runs as it is, on logical tensors, operation by
operation of the dispatcher. A step within a step (a wrapper's, a super().step()) is a part of the outer one's batch.
"""

from __future__ import annotations

import enum
import functools
import logging
import struct
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._errors import InvalidArgumentError
from .backwards import model_beside
from .batch import Batch, Updates
from .compile import calls_by, left_out, stance, suspend, uncompiled_calls
from .digests import is_plain_tensor
from .handed_rows import HandedOver, counts_writes, groups_of, logical_state
from .model import ShardedModel, models_of_this_process
from .parameter import LogicalParameter
from .promise import Promise
from .refusals import require_same_ranks
from .replicated import is_replicated, replicated_of
from .telling import collective, families_in, numbers_of, telling
from .weight import Weight
from .whole_parameters import checksum, require_same_before
from .wrappers import is_averaged

_log = logging.getLogger(__name__)

# Their steps treat every element by itself, so that rows of a weight are updated as in the whole one.
_ELEMENTWISE = {
    f"torch.optim.{name}"
    for name in (
        "adadelta",
        "adagrad",
        "adam",
        "adamax",
        "adamw",
        "asgd",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
    )
}
_allowed: set[type[torch.optim.Optimizer]] = set()


class _Way(enum.Enum):
    """How the step of a class runs."""

    ROWS = enum.auto()  # on this rank's rows
    PROMISED = enum.auto()  # on rows, as the user has promised: the first step is compared
    DISPATCHED = enum.auto()  # on logical tensors


def numbered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """The parameters as state_dict() numbers them."""
    return enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])


def allow_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    """Promise that an optimiser's step treats every element by itself, so that it can compute on this rank's rows.

    It is a matter of speed: any optimiser is right without it. torch's own are known. The first two steps of each
    optimiser of the class are compared with steps of plain torch, on one parameter of each shape, dtype and group,
    which takes the memory of a few such parameters, and a difference is refused. An optimiser that holds another one
    runs as without the promise; the one that it holds may still compute on rows.

    Args:
        kind: A class of optimisers.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InvalidArgumentError(f"allow_optimizer({kind!r}): give a class of optimisers")
    _allowed.add(kind)


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    """Tell whether steps of a class compute on rows."""
    return kind in _allowed or _computes_on_rows(kind.step)


def _computes_on_rows(step: Any) -> bool:
    return getattr(step, "__module__", "") in _ELEMENTWISE or getattr(step, "computes_on_rows", False)


def _way_of(step: Any, optimizer: torch.optim.Optimizer) -> _Way:
    if _computes_on_rows(step):
        return _Way.ROWS
    holds = any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())
    return _Way.PROMISED if type(optimizer) in _allowed and not holds else _Way.DISPATCHED


def updates_of(optimizer: torch.optim.Optimizer) -> Updates:
    """The weights that it may write, by model, in an order that all ranks share."""
    found: dict[int, tuple[ShardedModel, list[Weight]]] = {}
    with DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, LogicalParameter):
                    if not parameter.requires_grad and parameter.grad is None:
                        continue
                    weight = parameter.etp
                    if weight.parameter is not parameter:  # another one has taken its place in the model
                        continue
                    if weight.model.is_unsharded:
                        raise InvalidArgumentError(
                            f"{type(optimizer).__name__} was made before etp.unshard_() and holds {weight.name} as it "
                            "was sharded, which no model uses now: make optimisers after unshard_()"
                        )
                    found.setdefault(weight.model.number, (weight.model, []))[1].append(weight)
                elif parameter.grad is None and "sharded_as" in parameter.__dict__:
                    raise InvalidArgumentError(
                        f"{type(optimizer).__name__} was made before shard_module_() and holds {parameter.sharded_as} "
                        "as it was, which no model uses now: make optimisers after shard_module_()"
                    )
    return [found[number] for number in sorted(found)]


_promises: weakref.WeakKeyDictionary[torch.optim.Optimizer, Promise] = weakref.WeakKeyDictionary()
_looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_beside: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # likewise, of those without sharded parameters


def _look_at(optimizer: torch.optim.Optimizer, models: list[ShardedModel]) -> None:
    """Before its first step: what else it holds has been averaged over the same ranks."""
    _looked_at.add(optimizer)
    meshes = {
        tuple(parameter.device_mesh.mesh.flatten().tolist())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter).__name__ == "DTensor"
    }
    for mesh in sorted(meshes):
        for model in models:
            require_same_ranks(model, mesh, "fully_shard()")
    _warn_of_others(optimizer, models)


def _warn_of_others(optimizer: torch.optim.Optimizer, models: list[ShardedModel]) -> None:
    """Warn of parameters that shard_module_() has not seen, and whose gradients differ between ranks: else the program
    adds them by other means. Collective, if there are such parameters."""
    others = [
        parameter
        for _, parameter in numbered(optimizer)
        if isinstance(parameter, torch.nn.Parameter) and is_plain_tensor(parameter) and not is_replicated(parameter)
    ]
    if not others or all(model.size == 1 for model in models):
        return
    gradients = checksum([each.grad for each in others if each.grad is not None])
    answers = models[0].core.exchange("gradients of parameters beside a sharded model", str(gradients).encode())
    if len(set(answers)) > 1:
        warnings.warn(
            f"{type(optimizer).__name__} holds {len(others)} parameters, the first of shape {tuple(others[0].shape)}, "
            f"that every rank has whole beside {models[0].name}, with gradients of its own: nobody adds these over the "
            "ranks; give the whole model to etp.shard_module_(), or add them yourself",
            stacklevel=4,
        )


def _warn_of_beside(optimizer: torch.optim.Optimizer) -> None:
    """Warn of an optimiser that holds nothing of a sharded model, and parameters whose gradients come through one."""
    beside = [(parameter, model_beside(parameter)) for _, parameter in numbered(optimizer)]
    beside = [(parameter, name) for parameter, name in beside if name and not is_averaged(parameter)]
    if beside:
        warnings.warn(
            f"{type(optimizer).__name__} holds {len(beside)} parameters, the first of shape "
            f"{tuple(beside[0][0].shape)}, that get gradients through the sharded {beside[0][1]} and are no part of a "
            "sharded model: each rank has its own gradients, which nobody adds; have them in the model that "
            "etp.shard_module_() is given, or wrap all in DistributedDataParallel, or add them yourself",
            stacklevel=5,
        )


# --- steps


@left_out
@collective("an optimiser's step")
def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before any step: have the step of this class see to sharded parameters."""
    changed = [known for known in models_of_this_process() if known.watch.differs()]
    if changed:  # their new parameters may be all that this one holds
        parameters = {id(parameter) for _, parameter in numbered(optimizer)}
        for known in changed:
            if known.watch.has_any_of(parameters):
                known.watch.look(thorough=True)
    if optimizer in _looked_at:
        _tell_of_hooks(optimizer)
        if getattr(type(optimizer).step, "in_batch", False):
            return
    models = [model for model, _ in updates_of(optimizer)] or _models_of_whole(optimizer)
    if not models and optimizer not in _beside:
        _beside.add(optimizer)
        _warn_of_beside(optimizer)
    if models:
        if optimizer not in _looked_at:
            _look_at(optimizer, models)
            _tell_of_hooks(optimizer)
        _enter_step(type(optimizer))


class _ToldHook:
    """A hook that is called before a step, and whose error ends the step of the other ranks."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        with telling(f"a hook before {type(optimizer).__name__}.step()", families_in([optimizer])):
            return self._hook(optimizer, args, kwargs)


def _tell_of_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Follow the program's hooks: torch calls them behind this package's."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    for key, hook in hooks.items():
        if not isinstance(hook, _ToldHook):
            hooks[key] = _ToldHook(hook)


def _enter_step(kind: type[torch.optim.Optimizer]) -> None:
    """Put a batch around the steps of a class, and of those that it derives from.

    torch decorates `step` of each class once, with a function that calls all hooks around it. It finds the step in a
    cell of its closure when it comes to it: there the batch is inside of all hooks, and a user's see logical tensors.
    Elementwise steps of classes that have not been decorated yet are found by a super().step()."""
    for each in kind.__mro__:
        step: Any = each.__dict__.get("step")
        if step is None or getattr(step, "in_batch", False):
            continue
        if getattr(step, "hooked", False):
            cell = step.__closure__[step.__code__.co_freevars.index("func")]
            cell.cell_contents = _in_batch(cell.cell_contents)
            step.in_batch = True
        elif _computes_on_rows(step):
            each.step = _in_batch(step)  # type: ignore[attr-defined]


def _in_batch(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step whose writes of sharded parameters are one batch."""
    if getattr(step, "in_batch", False):
        return step

    @functools.wraps(step)
    def wrapper(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        updates = updates_of(optimizer)
        if not updates:  # it holds none, or rows of them, as within a step that computes on rows
            return _run_beside(step, optimizer, args, kwargs)
        outer = next((model.batch for model, _ in updates if model.batch is not None), None)
        if outer is not None:
            outer.include(updates)
            return _run(step, optimizer, updates, outer, args, kwargs)
        for model, _ in updates:
            if model.joining is not None:
                model.joining.require_known(optimizer)
            model.resume()
            model.damage.refuse()
        batch = Batch(f"{type(optimizer).__name__}.step()", updates)
        go_on = suspend()
        try:
            result = _run(step, optimizer, updates, batch, args, kwargs)
            batch.finish()
            return result
        except BaseException as error:
            batch.fail(error)
            raise
        finally:
            batch.leave()
            go_on()

    wrapper.in_batch = True  # type: ignore[attr-defined]
    return left_out(wrapper)


def _models_of_whole(optimizer: torch.optim.Optimizer) -> list[ShardedModel]:
    """Return the models of parameters that every rank has whole, in an order that ranks share."""
    found = {
        replicated.model.number: replicated.model
        for _, parameter in numbered(optimizer)
        if (replicated := replicated_of(parameter)) is not None and replicated.model.size > 1
    }
    return [found[number] for number in sorted(found)]


def _run_beside(
    step: Callable[..., Any], optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the step of an optimiser without sharded parameters: of those that every rank has whole, or of none."""
    models = _models_of_whole(optimizer)
    if not models or any(model.batch is not None for model in models):  # of a step that is compared already
        return step(optimizer, *args, **kwargs)
    for model in models:
        if model.joining is not None:
            model.joining.require_known(optimizer)
        require_same_before(f"{type(optimizer).__name__}.step()", model, repr(groups_of(optimizer, model)))
    closure = kwargs.get("closure", args[0] if args else None)
    if callable(closure) and not _computes_on_rows(step):
        args, kwargs = _with_closure(_averaged(closure, models[0]), args, kwargs)
    return step(optimizer, *args, **kwargs)


def _run(
    step: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    updates: Updates,
    batch: Batch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a step in a batch."""
    way = _way_of(step, optimizer)
    closure = kwargs.get("closure", args[0] if args else None)
    if not callable(closure):
        closure = None
    if way is _Way.DISPATCHED:
        _tell_once(optimizer)
        _cut_loaded_states(optimizer, updates)
        batch.optimizers[id(optimizer)] = optimizer
        batch.compare_parameters()
        if closure is not None:
            args, kwargs = _with_closure(_computing(closure, batch, updates[0][0]), args, kwargs)
        with uncompiled_calls():
            return step(optimizer, *args, **kwargs)
    handed = HandedOver(optimizer, updates, batch, way is _Way.ROWS or counts_writes(type(optimizer)))
    promise = _promises.setdefault(optimizer, Promise()) if way is _Way.PROMISED else None

    def begin(*arguments: Any) -> None:
        if promise is not None:
            promise.keep(step, optimizer, updates, arguments)
        handed.begin()

    try:
        if closure is None:
            begin()
            return step(optimizer, *args, **kwargs)

        def evaluate() -> Any:
            """Compute gradients, which needs the weights: rows are handed over behind it."""
            handed.give_back()
            loss = closure()
            begin(lambda: loss)
            return loss

        args, kwargs = _with_closure(evaluate, args, kwargs)
        return step(optimizer, *args, **kwargs)
    finally:
        handed.give_back()


def _with_closure(
    closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a step with another closure."""
    if "closure" in kwargs:
        return args, kwargs | {"closure": closure}
    return (closure, *args[1:]), kwargs


def _computing(closure: Callable[[], Any], batch: Batch, model: ShardedModel) -> Callable[[], Any]:
    """Return a closure that makes gradients within a step that goes by the dispatcher. Collective."""
    averaged = _averaged(calls_by(stance())(closure), model)

    @functools.wraps(closure)
    def evaluate() -> Any:
        batch.has_compared = False
        return averaged()

    return evaluate


def _averaged(closure: Callable[[], Any], model: ShardedModel) -> Callable[[], Any]:
    """Return a closure whose loss is that of all ranks' inputs, as gradients are: a step that decides by it (a line
    search, a test of convergence) decides the same on all ranks, and as one process would. Collective."""

    @functools.wraps(closure)
    def evaluate() -> Any:
        loss = closure()
        is_tensor = isinstance(loss, torch.Tensor)
        if isinstance(loss, bool) or not (loss.numel() == 1 if is_tensor else isinstance(loss, (int, float))):
            model.core.exchange("the loss of a closure", b"")
            return loss
        answers = model.core.exchange(
            "the loss of a closure", struct.pack("=d", float(loss.detach() if is_tensor else loss))
        )
        if not all(answers):
            return loss
        mean = sum(each for (each,) in numbers_of(answers, "=d", "the loss of a closure")) * model.scale
        if not is_tensor:
            return mean
        shown = loss.clone()
        shown.data.fill_(mean)
        return shown

    return evaluate


_states: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()


def _cut_loaded_states(optimizer: torch.optim.Optimizer, updates: Updates) -> None:
    """Keep this rank's rows of whole tensors that load_state_dict() has put into the states of an optimiser whose steps
    go by the dispatcher. Collective, once behind each load."""
    if _states.get(optimizer) is optimizer.state:
        return
    _states[optimizer] = optimizer.state
    for weight in (weight for _, weights in updates for weight in weights):
        state: Any = optimizer.state.get(weight.parameter)
        for key, value in list(state.items()) if isinstance(state, dict) else ():
            if type(value) is torch.Tensor and value.shape == weight.shape and value.dtype.is_floating_point:
                state[key] = logical_state(weight, key, value)


_told: set[type] = set()


def _tell_once(optimizer: torch.optim.Optimizer) -> None:
    """Log that a class's steps go by the dispatcher, and what that costs."""
    kind = type(optimizer)
    if kind in _told:
        return
    _told.add(kind)
    count = sum(isinstance(parameter, LogicalParameter) for _, parameter in numbered(optimizer))
    _log.info(
        "%s.step() is not known to treat every element by itself: it runs operation by operation on %d sharded "
        "parameters, about 30 us for each operation on a parameter, and gathers what it reads as a whole. If it does "
        "treat every element by itself, etp.allow_optimizer(%s) makes it as fast as torch's own; etp.Muon is torch's "
        "Muon with the work shared by ranks",
        kind.__name__,
        count,
        kind.__name__,
    )


_hooked: list[Callable[[], None]] = []


def watch_optimizers() -> None:
    """Once a process."""
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before).remove)
