"""Uneven numbers of steps: ranks that have left a training loop answer those that go on.

    with etp.join(model, optimizer):
        for x, y in batches:                        # more on some ranks than on others
            optimizer.zero_grad()
            loss(model(x), y).backward()
            etp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

Within it, ranks meet before each collective call of the loop (the end of a backward, clipping, a step) and say what
they are about to do. A rank that has left says so, and does what the lowest active rank says: it adds nothing to the
reduction of the backward, clips, writes, and steps its rows with that rank's settings, until all have left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .._arguments import flag
from .._errors import InvalidArgumentError, MismatchError
from . import norms
from .loops import joined
from .model import ShardedModel
from .refusals import require_optimizer
from .telling import families_in, json_of, known, telling
from .tensor import LogicalTensor
from .told_writes import Told, decode, encode, pack, unpack
from .views import models_of

_LEFT = "nothing: it has left the loop"
_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def join(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, divide_by_initial_world_size: bool = True
) -> Iterator[None]:
    """Let ranks make different numbers of steps in the loop within it. Collective: all ranks enter it, and each leaves
    it once all have left their loops. An error of one rank ends the others with its text.

    What the loop does is known to ranks that have left: backwards, `etp.clip_grad_norm_()` of parameters of the model,
    steps of the optimiser, `zero_grad()`, operations in place on parameters and gradients with numbers
    (`p.grad.mul_(0.5)`, `clip_grad_value_()`). Other calls of the loop that all ranks make (a write with a tensor,
    `etp.update()`, a step with a closure or of another optimiser) are refused by name once a rank has left; those of
    torch.distributed are the program's own.

    Args:
        model: Sharded.
        optimizer: Of its parameters, the only one that steps them.
        divide_by_initial_world_size: Gradients are the mean over all ranks, also those that have left. False: over the
            ranks that make the backward.
    """
    with telling("etp.join()", families_in([model])), ExitStack() as left:
        divides = flag("divide_by_initial_world_size", divide_by_initial_world_size)
        models = models_of(model)
        require_optimizer(optimizer)
        if not models or all(each.size == 1 for each in models):
            yield
            return
        if any(each.joining is not None for each in models):
            raise InvalidArgumentError("etp.join() of a model that has been joined already: leave that one first")
        loop = Join(model, models, optimizer, divides)
        left.callback(loop.end)
        loop.begin()
        yield
        loop.follow()


class Join:
    """One loop, before each of whose collective calls ranks tell each other what they do next."""

    def __init__(
        self, model: torch.nn.Module, models: Sequence[ShardedModel], optimizer: torch.optim.Optimizer, divides: bool
    ) -> None:
        self._model, self._models, self._optimizer = model, models, optimizer
        self._rescales = not divides
        self._parameters = list(model.parameters())
        self._follows = False  # this rank has left
        self._some_have_left = False
        self._leader = 0  # the lowest rank that has not
        self._handles: list[Any] = []

    def begin(self) -> None:
        for each in self._models:
            each.joining = self
            each.rescales = self._rescales and each.scale != 1
        joined.append(self)
        self._handles.append(self._optimizer.register_step_pre_hook(self._tell_step))

    def end(self) -> None:
        for each in self._models:
            each.joining, each.rescales, each.factor = None, False, 1.0
        if self in joined:
            joined.remove(self)
        for handle in self._handles:
            handle.remove()

    # --- of a rank in the loop

    def tell_backward(self, model: ShardedModel) -> None:
        """A backward of a model has come to its end."""
        if not self._follows:
            number = self._models.index(model)
            absent = [weight.gradient is None for weight in model.weights]
            absent += [replicated.has_none() for replicated in model.replicated]
            self._meet("the end of a backward", model=number, absent=absent)

    def tell_clip(self, parameters: Sequence[torch.Tensor], numbers: Sequence[Any]) -> None:
        if self._follows:
            return
        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        chosen = [places[id(each)] for each in parameters if id(each) in places]
        if chosen:
            self._meet("clip_grad_norm_()", chosen=chosen, numbers=list(numbers))

    def require_known(self, optimizer: torch.optim.Optimizer) -> None:
        """Throw for a step that ranks that have left cannot take part in."""
        if optimizer is not self._optimizer and not any(each is optimizer for each in vars(self._optimizer).values()):
            raise InvalidArgumentError(
                f"etp.join(): {type(optimizer).__name__}.step() of the model's parameters, and ranks that have left "
                f"know {type(self._optimizer).__name__} only: join the loop with the optimiser that steps in it"
            )

    def tell_write(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[torch.Tensor]
    ) -> None:
        """Tell of an operation that writes parameters or gradients, outside of steps and of hooks, which ranks that
        have left call by themselves."""
        stores = [each.store for each in written if isinstance(each, LogicalTensor) and each.store.kept]
        if self._follows or not stores or stores[0].model not in self._models:
            return
        model = stores[0].model
        if model.batch is not None or model.updating or model.in_meeting:
            return
        told = encode(func, args, kwargs, self._parameters, self._gradients)
        what = f"{func.name().removeprefix('aten::').partition('.')[0]} of {stores[0]}"
        self._meet(what, write=told)
        if told is None and self._some_have_left:
            raise self._untold(what)

    @property
    def _gradients(self) -> list[Any]:
        return [each.grad for each in self._parameters]

    def _untold(self, what: str) -> InvalidArgumentError:
        return known(
            InvalidArgumentError(
                f"etp.join(): {what} has operands that ranks that have left do not have: write parameters and "
                "gradients by numbers, or behind the loop"
            )
        )

    def _tell_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(each) for each in (*args, *kwargs.values())):
            raise InvalidArgumentError(
                f"etp.join(): {type(self._optimizer).__name__}.step() has a closure, and ranks that have left have no "
                "inputs for it: make gradients before the step"
            )
        if not self._follows:
            groups = [
                {name: _plain(value) for name, value in group.items() if name != "params" and _is_plain(value)}
                for group in self._optimizer.param_groups
            ]
            self._meet(f"the step of {type(self._optimizer).__name__}", groups=groups)
            self._share_whole()

    # --- of both

    def _meet(self, call: str, **told: Any) -> dict[str, Any]:
        """Tell the other ranks what this one does next. Returns what the lowest active rank has told."""
        first = self._models[0]
        answers = first.core.exchange(
            "the next call of a loop in etp.join()", json.dumps({"call": call, **told}).encode()
        )
        every = json_of(answers, "the loop in etp.join()", self._is_possible)
        active = {rank: each for rank, each in enumerate(every) if each["call"] != _LEFT}
        if not active:
            return {"call": _LEFT}
        leader = min(active)
        for rank, each in active.items():
            if each["call"] != active[leader]["call"]:
                raise MismatchError(
                    f"etp.join(): rank {leader} comes to {active[leader]['call']}, and rank {rank} to {each['call']}: "
                    "ranks that are in the loop must make the same calls in the same order"
                )
        self._some_have_left, self._leader = len(active) < len(every), leader
        for each in self._models:
            each.factor = len(every) / len(active)
        leading: dict[str, Any] = active[leader]
        return leading

    def _share_whole(self) -> None:
        """Have ranks that have left take parameters that every rank has whole, and their gradients, from the lowest
        rank in the loop: programs write into these as into any plain tensor. Collective."""
        if not self._some_have_left:
            return
        whole = [each.parameter for model in self._models for each in model.replicated]
        what = "what ranks in the loop have whole"
        answers = self._models[0].core.exchange(what, b"" if self._follows else pack(whole))
        if self._follows:
            try:
                unpack(answers[self._leader], whole)
            except ValueError as error:
                raise MismatchError(f"rank {self._leader} tells what cannot be {what}: {error}") from None

    def _is_possible(self, told: Any) -> bool:
        """Tell whether a rank may have said this of its next call."""
        if not isinstance(told["call"], str):
            return False
        if "absent" in told:
            models, flags = range(len(self._models)), told["absent"]
            whole = told["model"] in models and len(flags) == self._flags_of(self._models[told["model"]])
            return whole and all(isinstance(flag, bool) for flag in flags)
        if "chosen" in told:
            max_norm, norm_type, error_if_nonfinite = told["numbers"]
            numbers = isinstance(max_norm, float) and isinstance(norm_type, float)
            places = range(len(self._parameters))
            return numbers and isinstance(error_if_nonfinite, bool) and all(each in places for each in told["chosen"])
        if told.get("write") is not None:
            decode(told["write"], self._parameters, self._gradients)
        groups = told.get("groups", [])
        fits = len(groups) == len(self._optimizer.param_groups) or "groups" not in told
        pairs = zip(groups, self._optimizer.param_groups, strict=False)
        return fits and all(set(group) <= set(own) and all(map(_is_plain, group.values())) for group, own in pairs)

    def _flags_of(self, model: ShardedModel) -> int:
        return len(model.weights) + len(model.replicated)

    # --- of a rank that has left

    def follow(self) -> None:
        """Do what the ranks that are in the loop do, until all have left."""
        self._follows = True
        while True:
            told = self._meet(_LEFT)
            if told["call"] == _LEFT:
                return
            if "absent" in told:
                self._end_backward(self._models[told["model"]], told["absent"])
            elif "write" in told:
                self._write(told["call"], told["write"])
            elif "chosen" in told:
                max_norm, norm_type, error_if_nonfinite = told["numbers"]
                chosen = [self._parameters[place] for place in told["chosen"]]
                norms.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite)
            else:
                for group, settings in zip(self._optimizer.param_groups, told["groups"], strict=True):
                    for name, value in settings.items():
                        if isinstance(group.get(name), torch.Tensor):
                            group[name].fill_(value)
                        else:
                            group[name] = tuple(value) if isinstance(value, list) else value
                self._share_whole()
                self._optimizer.step()

    def _write(self, what: str, told: Told | None) -> None:
        if told is None:
            raise self._untold(what)
        func, args, kwargs = decode(told, self._parameters, self._gradients)
        with torch.no_grad():
            func(*args, **kwargs)

    def _end_backward(self, model: ShardedModel, absent: list[bool]) -> None:
        for weight, is_absent in zip(model.weights, absent, strict=False):
            if is_absent:
                weight.gradient = None
        for replicated, is_absent in zip(model.replicated, absent[len(model.weights) :], strict=True):
            if is_absent:
                replicated.parameter.grad = None
        model.drain()
        model.micro_batch += 1


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
