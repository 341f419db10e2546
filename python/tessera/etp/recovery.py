"""How the ranks of a model come to one state again: after a call of theirs that was refused, and after a backward or a
step that has failed here alone."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass

from .backwards import NO_TASK, current_task
from .telling import json_of, refused_before

if TYPE_CHECKING:
    from .model import ShardedModel

_MOST_COUNTS_AHEAD = 1 << 16  # of another rank's count of updates


class Recovery:
    """Ends what is under way in a model, and has all ranks know alike what is damaged."""

    def __init__(self, model: ShardedModel) -> None:
        self._model: Callable[[], ShardedModel | None] = weakref.ref(model)
        self._core = model.member.core
        self._recovered = self._core.refusals  # the count that the runtime has come back from
        self._under_way = False
        self._waits = False  # for the end of a call that goes on behind errors

    @property
    def model(self) -> ShardedModel:
        model = self._model()
        assert model is not None  # it owns this
        return model

    @property
    def is_due(self) -> bool:
        """Tell whether a call of the model's ranks has been refused since its runtime was last in order."""
        return self._core.refusals != self._recovered

    def run_if_due(self) -> None:
        """Bring the runtime to a state that is the same on all ranks, where a call has been refused. Collective: every
        rank does so before its next call."""
        if not self.is_due or self._under_way or current_task() != NO_TASK:
            return
        if self._waits:
            raise refused_before(self._core)
        model = self.model
        if model.threads.trains_here() or (torch.is_grad_enabled() and not model.under_way):
            model.member.family.settle()
            self.run()

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Have what is refused within it refuse all calls behind it at once, until its end: torch's load_state_dict()
        goes on behind errors, and other ranks have left theirs. Collective."""
        self.run_if_due()
        outer, self._waits = self._waits, True
        try:
            yield
        finally:
            self._waits = outer

    def run(self) -> None:
        """After a backward or an optimiser's step that failed: the other ranks are told, or get its weights; those of
        all models that meet together, in the order of meetings."""
        for each in sorted({self.model, *self.model.companions}, key=lambda model: model.number):
            each.recovery._run_alone()

    def _run_alone(self) -> None:
        model, refused = self.model, self.is_due
        if self._under_way or not (refused or model.tasks or model.has_update):
            return
        self._under_way = True
        try:
            if model.has_update and not refused:
                model.end_update()
            if refused or model.tasks:
                self._abandon(model)
        finally:
            self._under_way = False

    def _abandon(self, model: ShardedModel) -> None:
        """Collective: ends what is under way, and tells what is damaged. Gradients are kept unless a rank has lost
        some."""
        refusals = self._core.refusals
        lost = model.leave_backwards()
        if model.states is not None:
            model.states.adding = False
        model.close_update()
        with DisableTorchFunctionSubclass(), torch.no_grad():
            for weight in model.living_weights():
                weight.before_abandon()
            lost = model.runtime.abandon(lost)
            model.runtime.added()
            for weight in model.living_weights():
                weight.after_abandon()
            for replicated in model.replicated:
                replicated.put_back()
        model.abandoned(lost)
        if self.is_due:  # else this rank is alone in it, and the others learn it in their drain
            self._align(model)
        self._recovered = refusals

    def _align(self, model: ShardedModel) -> None:
        """Have all ranks take as damaged what one of them does, or what some have written and others have not, and
        count updates alike: one may have begun, or ended, on some of them only. Collective."""
        answers = json_of(
            self._core.exchange("what a refused call has left", self._told(model)),
            "what is left",
            lambda told: self._may_be_told(model, told),
        )
        self._align_counts(model, [count for _, count, _ in answers])
        reasons: dict[int, str] = {}  # by the weight's place; the lowest rank's, on all of them
        for damaged, _, _ in answers:
            for why, places in damaged.items():
                for place in places:
                    reasons.setdefault(place, why)
        first = answers[0][2]
        for rank, (_, _, stamps) in enumerate(answers):
            for place in range(len(model.weights)):
                if stamps[place] != first[place]:
                    why = f"ranks 0 and {rank} have not written the same into it when a call was refused or interrupted"
                    reasons.setdefault(place, why)
        for place, why in reasons.items():
            model.damage.add([model.weights[place]], why)

    def _told(self, model: ShardedModel) -> bytes:
        damaged: Mapping[Any, str] = model.damage.reasons
        reasons: dict[str, list[int]] = {}
        for place, weight in enumerate(model.weights):
            if weight in damaged:
                reasons.setdefault(damaged[weight], []).append(place)
        stamps = [weight.store.stamp for weight in model.weights]
        return json.dumps([reasons, None if model.states is None else model.states.count, stamps]).encode()

    def _align_counts(self, model: ShardedModel, counts: list[int | None]) -> None:
        if model.states is None:
            return
        if None in counts:  # it was being made
            model.states = None
        else:
            model.states.align(max(count for count in counts if count is not None))

    def _may_be_told(self, model: ShardedModel, told: Any) -> bool:
        reasons, count, stamps = told
        if len(stamps) != len(model.weights) or any(type(stamp) is not int for stamp in stamps):
            return False
        places = [place for places in reasons.values() for place in places]
        # An update that has ended on some ranks only is one ahead.
        near = count is None or model.states is None or abs(count - model.states.count) <= _MOST_COUNTS_AHEAD
        return near and all(type(place) is int and 0 <= place < len(model.weights) for place in places)
