"""One batch of writes: what an optimiser's step, with the steps in it, does to the weights of its models.

A batch is lazy: the update of its models begins at the first write of a weight, which all ranks make, so that a step
that fails before leaves nothing behind. A closure's forward ends the update and publishes what is written; the next
write begins another one. Within an update ranks write at their own pace, and nobody asks what the others write: each
write leaves its stamp (operation, numbers, stamps of its operands), and stamps are compared when the update ends.

A rank whose step fails refuses the next call of the others, whatever that is. Before the next use of a model all of
them exchange what is left (`Recovery`): weights that any rank has written are damaged on all ranks until a state is
loaded.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .._errors import Error, MismatchError
from .damage import WAY_OUT
from .store import Store, agree, digest_of, refuse_difference, stamp_of
from .telling import Family, unknown
from .tensor import LogicalTensor
from .weight import Weight
from .whole_parameters import require_same_before

if TYPE_CHECKING:
    from .model import ShardedModel

Updates: TypeAlias = "list[tuple[ShardedModel, list[Weight]]]"
_STAMP_BYTES = 8


class Batch:
    """The writes of one step. Made for the time of the step; `ShardedModel.batch` leads to it."""

    def __init__(self, name: str, updates: Updates, timeout: float | None = None) -> None:
        """`name` is what messages call it, such as `Lookahead.step()`; `updates` are the weights that it may write;
        `timeout` is how long it waits for readers of these, in seconds. None: as their group does."""
        self.name = name
        self._timeout = timeout
        self.wrote = False  # a weight, or a state that was there before
        self.has_compared = False  # what ranks have whole, since gradients were made
        self.optimizers: dict[int, torch.optim.Optimizer] = {}  # of steps by the dispatcher, by id
        self._weights: dict[ShardedModel, dict[Weight, None]] = {}
        self._begun: list[ShardedModel] = []
        self._written: dict[Store, None] = {}  # what ranks share, since the update began
        self._damage = False  # what is written cannot be what it should be
        self._families: dict[Family, int] = {}  # and how many refusals each had counted
        self._add(updates)

    # --- its time

    def _add(self, updates: Updates) -> None:
        for model, weights in updates:
            self._weights.setdefault(model, {}).update(dict.fromkeys(weights))
            self._families.setdefault(model.member.family, model.member.family.count())
        self._weights = dict(sorted(self._weights.items(), key=lambda item: item[0].number))
        for model in self._weights:
            model.batch = self

    def include(self, updates: Updates) -> None:
        """Take weights of a step within the step into the batch."""
        if all(weight in self._weights.get(model, ()) for model, weights in updates for weight in weights):
            return
        self.pause()
        self._add(updates)

    def compare_parameters(self) -> None:
        """Throw if ranks train other parameters, or differ in those that each has whole, unless that has been compared
        since gradients were made. Collective."""
        if not self.has_compared:
            for model in self._weights:
                require_same_before(self.name, model)
            self.has_compared = True

    def begin(self, weights: Iterable[Weight] = ()) -> None:
        """Let weights be written: all of the batch and `weights`, which belong to its models. Collective, unless they
        may be written already."""
        new: Updates = [
            (weight.model, [weight]) for weight in weights if weight not in self._weights.get(weight.model, ())
        ]
        if not new and all(model.updating for model in self._weights):
            return
        self.include(new)
        self.compare_parameters()
        for model, own in self._weights.items():
            if not model.updating:  # an update(model) around the step has begun it, and ends it
                model.begin_update(own, self.name, self._timeout)
                self._begun.append(model)

    def pause(self) -> None:
        """End the update, if there is one: a forward needs the weights. Collective."""
        if self._begun:
            self._compare()
            self._end()

    def note(self, store: Store) -> None:
        """Note a write of what ranks share."""
        if store.kept:
            self._written[store] = None
            self.wrote |= store.weight is not None or store.saved  # not gradients, which are computed again

    def finish(self) -> None:
        """Compare what ranks have written, keep the states that operations of the dispatcher have made, and publish.
        Collective."""
        for optimizer in self.optimizers.values():
            self._keep_states(optimizer)
        self._compare()
        self._end()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Begin it now, and end it behind what the program writes. Collective."""
        try:
            self.begin()
            yield
            self.finish()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.leave()

    def leave(self) -> None:
        """The step has ended."""
        for model in self._weights:
            model.batch = None

    def _end(self) -> None:
        begun, self._begun = self._begun, []
        with contextlib.ExitStack() as updates:  # all of them, also where one fails
            for model in reversed(begun):
                updates.callback(model.end_update)

    # --- what ranks have written

    def _compare(self) -> None:
        """Throw if ranks have not written the same. Collective."""
        written, self._written = list(self._written), {}
        for model in self._weights:
            stores = [store for store in written if store.model is model]
            own = b"".join(
                stamp_of(str(store), [], [store.stamp]).to_bytes(_STAMP_BYTES, "little", signed=True)
                for store in stores
            )
            answers = model.core.exchange(f"the end of {self.name}", own)
            other = next((rank for rank, answer in enumerate(answers) if answer != answers[0]), None)
            if other is None:
                continue
            self._damage = True
            pairs = itertools.zip_longest(_stamps(answers[0]), _stamps(answers[other]))
            place = next(place for place, (first, second) in enumerate(pairs) if first != second)
            what = stores[place] if place < len(stores) else f"{len(own) // _STAMP_BYTES} tensors on this rank"
            raise MismatchError(
                f"{self.name} has not written the same on ranks 0 and {other}, first into {what}: they differ in "
                "operations, or in the numbers that went into them (a learning rate, a factor, a plain tensor); give "
                f"all ranks the same. {WAY_OUT}"
            )

    def _keep_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Make one thing that all ranks share of each tensor that a step has left in optimizer.state."""
        named = {id(weight.parameter): weight for weights in self._weights.values() for weight in weights}
        for parameter, state in optimizer.state.items():
            weight = named.get(id(parameter))
            if weight is None or not isinstance(state, dict):
                continue
            for key, value in state.items():
                for tensor in _tensors(value):
                    if isinstance(tensor, LogicalTensor) and not tensor.store.kept and not tensor.chain:
                        self._keep(tensor, key, weight)

    def _keep(self, tensor: LogicalTensor, key: Any, weight: Weight) -> None:
        store = tensor.store
        what = f"the state {key!r} of {weight.name}"
        if store.own is not None:
            if not agree(weight.store, what, digest_of([store.own])):
                raise refuse_difference(what)
            if store.own.shape != weight.shape:
                return  # as a plain tensor
            rows = weight.store.spec.cut(store.own).clone(memory_format=torch.contiguous_format)
            tensor.become(weight.state_of(str(key), rows))
            return
        if store.rows is not None and weight.store.spec.is_like(store.spec):  # where other ranks read it alone
            kept = weight.state_of(str(key), store.rows)
            kept.store.written(store.stamp)
            tensor.become(kept)
            return
        store.kept, store.saved, store.name = True, True, what
        store.held = store.held or weight
        self._written[store] = None  # its stamp is compared, too

    # --- failures

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that the step has failed here, unless they know. Does not wait for them: before its next
        use each model learns what others have written (`Recovery`)."""
        wrote = self.wrote or self._damage
        said = " ".join(str(error).split())
        cause = said if _is_told(error) else f"{self.name} has failed: {type(error).__name__}: {said}"
        part = f"{self.name} had written a part. {WAY_OUT}" if wrote else ""
        if wrote or self._begun:
            unknown(error)  # ranks are at different places of the step, and learn from each other how it has ended
        for family, count in self._families.items():
            family.tell(self.name, error, count, f"{cause}; {part}" if wrote else cause)
        for model, weights in self._weights.items():
            model.close_update()
            if wrote:
                model.damage.add(weights, f"{self.name} had written a part of it when it ended with an error ({cause})")
        self._begun = []
        if wrote and part not in said:
            error.add_note(part)

    def lose(self, model: ShardedModel) -> None:
        """Note that the update of a model has ended, as a call has been refused: the next write begins another one."""
        if model in self._begun:
            self._begun.remove(model)


def _is_told(error: BaseException) -> bool:
    """Tell whether another rank is the cause of an error."""
    return isinstance(error, Error) and re.match(r"rank \d+: ", str(error)) is not None


def _stamps(told: bytes) -> Iterator[bytes]:
    for at in range(0, len(told), _STAMP_BYTES):
        yield told[at : at + _STAMP_BYTES]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state, which may be a list of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
