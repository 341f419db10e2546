"""What the package knows of one model: its weights, what is under way, and when its ranks meet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import Variable

from .. import _core
from .._closing import Closing, close_at_exit
from .._errors import CancelledError, DataLossError, Error, InvalidArgumentError
from .backwards import NO_TASK, current_task, watch_backwards
from .batch import Batch
from .buffers import Buffers
from .compile import refuse_compiled_autograd
from .damage import Damage
from .departed import Departed
from .grad_values import add_beside_runtime
from .group import Group
from .module_watch import ModuleWatch
from .phase import Phase
from .recovery import Recovery
from .refusals import kind_refused
from .replicated import Replicated
from .shared_states import SharedStates
from .telling import Member, known
from .tensor import lasting
from .threads import Threads
from .weight import Weight

_models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()

_joined: dict[int, list[ShardedModel]] = {}  # by backward


def _end_of(task: int) -> None:
    """The ranks meet for one model after another, in an order that they share; also where one meeting fails, as the
    others would be waited for."""
    with ExitStack() as meetings:
        for model in sorted(_joined.pop(task, ()), key=lambda model: -model.number):
            meetings.callback(model.leave, task)


def models_of_this_process() -> list[ShardedModel]:
    """Of modules that somebody still has; in the order in which they were sharded, which is that of other ranks."""
    return sorted((model for model in _models if model.alive), key=lambda model: model.number)


def _job_ranks(group: Group, core: _core.ShardGroup) -> tuple[int, ...] | None:
    """Of the ranks of all replicas. Collective."""
    own = -1 if group.job_rank is None else group.job_rank
    told = core.exchange("the ranks of the job", own.to_bytes(8, "little", signed=True))
    found = tuple(int.from_bytes(each, "little", signed=True) for each in told)
    return None if min(found) < 0 else found


def _versions_of(weights: Iterable[Weight]) -> list[int]:
    """Count the writes of rows, by what torch counts."""
    return [weight.store.rows._version for weight in weights if weight.store.rows is not None]


class ShardedModel(Closing):
    """The weights of one model, and its runtime. Trained by one thread at a time; others may read meanwhile.

    The ranks meet at the end of the outermost backward, which adds all gradients, and when weights are updated.
    """

    of_layers = False
    _made = 0

    def __init__(self, group: Group, member: Member, runtime: _core.EtpRuntime, inline: bool, scale: float) -> None:
        self.group = group
        self.member = member
        self.size = member.core.size  # ranks of all replicas
        self.joining: Any = None  # a loop in etp.join(): Join
        self.is_unsharded = False  # its module has plain parameters in the place of these
        self.rescales = False  # gradients of each backward are multiplied by `factor`
        self.factor = 1.0
        self._unmet = False  # the last backward's gradients have not been added
        self.inline = inline
        self.scale = scale
        self.replicas = self.size // group.size
        self.job_ranks = _job_ranks(group, member.core)
        self.runtime = runtime
        self.weights: list[Weight] = []  # of its modules, in the order of their numbers: the same on all ranks
        self.departed = Departed()  # not the same on all ranks
        self.replicated: list[Replicated] = []
        self.micro_batch = 0  # backwards since the last update
        self.backwards = 0  # that have gone through it
        self._wrote = False  # since the last use in a forward
        self._updated: list[Weight] = []  # by the update that is under way
        self._batch: Batch | None = None
        self.damage = Damage()
        self.threads = Threads(group.timeout)
        self.watch = ModuleWatch(self)
        self.recovery = Recovery(self)
        self.has_update = False
        self.adopt: Callable[[torch.nn.Module], None] | None = None  # what has changed there; collective
        self.again: Callable[[], ShardedModel] | None = None  # one with its group and options; collective
        self.copier: Callable[[ShardedModel, torch.nn.Module], Any] | None = None  # what deepcopy() of modules calls
        self.publish = "update"
        self.foreign: dict[str, torch.Tensor] = {}  # frozen parameters whose gradients nobody could add
        self.buffers: Buffers | None = None
        self._meeting = False
        with lasting():
            self.anchor = torch.zeros((), requires_grad=True)  # autograd's way to a weight that is not its input
            self.anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self.wanted: set[int] | None = None
        self.tasks: list[int] = []  # of backwards under way, outermost first
        self.companions: weakref.WeakSet[ShardedModel] = weakref.WeakSet()  # in one module with it: they meet together
        self.states: SharedStates | None = None  # and masters and gradients, where other ranks read them
        self.number = ShardedModel._made
        ShardedModel._made += 1
        _models.add(self)
        watch_backwards(models_of_this_process)
        close_at_exit(self)

    @property
    def core(self) -> _core.ShardGroup:
        """The ranks of all replicas, for a call of all of them."""
        self.resume()
        return self.member.core

    def leaves(self) -> Iterator[torch.Tensor]:
        """Yield the leaves of graphs by which a backward comes to its weights."""
        yield self.anchor
        for weight in self.living_weights():
            if weight.parameter is not None:
                yield weight.parameter
        for replicated in self.replicated:
            yield replicated.parameter

    def living_weights(self) -> list[Weight]:
        """Return its weights, and those that have left it and somebody still has."""
        return [*self.weights, *self.departed.alive()] if self.departed else self.weights

    def depart(self, weight: Weight) -> None:
        """Note that no module of it has a weight any longer. All ranks do so. REQUIRES: no gradient is under way."""
        self.weights.remove(weight)
        weight.depart()
        self.departed.add(weight)

    def come_back(self, weight: Weight, parameter: torch.Tensor) -> None:
        """Note that a module has a weight, by this parameter of it. All ranks do so."""
        if not weight.departed:
            weight.parameter = parameter
            return
        self.departed.discard(weight)
        weight.come_back(parameter)
        self.weights.append(weight)
        self.weights.sort(key=lambda each: each.number)

    def _remove_dead(self) -> None:
        """Tell the runtime which weights this rank has no more. REQUIRES: no gradient is under way."""
        numbers = self.departed.take_dead()
        if numbers:
            self.runtime.remove(numbers)

    def close(self) -> None:
        """Ends its streams. Not collective. Idempotent."""
        _models.discard(self)
        self.runtime.close()

    def leave_replicated(self) -> None:
        """To a wrapper of the model, which averages gradients of what is not sharded."""
        for replicated in self.replicated:
            replicated.detach()
        self.replicated.clear()
        self.watch.take_note()

    @property
    def alive(self) -> bool:
        """Tell whether somebody still has its module."""
        return self.watch.is_needed

    @property
    def idle(self) -> bool:
        """Neither a backward nor an update is under way."""
        return not self.tasks and not self.has_update

    @property
    def updating(self) -> bool:
        """Whether this thread is within an update. Reads of others wait for its end."""
        return self.has_update and self.threads.trains_here()

    @property
    def batch(self) -> Batch | None:
        """The step that is under way in this thread."""
        return self._batch if self._batch is None or self.threads.trains_here() else None

    @batch.setter
    def batch(self, batch: Batch | None) -> None:
        if batch is not None:
            self.threads.take_over("a step", self.name, self.under_way)
        self._batch = batch

    # --- backwards

    def in_forward(self) -> bool:
        """Tell whether a module that has sharded weights of its own, or the root, computes."""
        return self.threads.forwards > 0

    @property
    def in_meeting(self) -> bool:
        """Tell whether its ranks meet now, or a backward runs: hooks are called then."""
        return self._meeting or current_task() != NO_TASK

    def in_backward(self) -> bool:
        """Tell whether a node of a backward runs now: hooks that are called once gradients have been added are behind
        it."""
        return not self._meeting and current_task() != NO_TASK

    def enter_forward(self) -> None:
        """Publish what a step has written, if its closure computes now. Throw if a step has damaged weights."""
        self.resume()
        self._refuse_damaged()
        if self.batch is not None:
            self.batch.pause()

    def _refuse_damaged(self) -> None:
        """Throw if a step has damaged weights, unless they have left."""
        if self.damage:
            self.watch.look_if_changed()
            self.damage.refuse()

    def reading_phase(self) -> Phase:
        """Return the phase of an operation by the dispatcher that reads a weight now."""
        reads_in_backward = self.in_backward()
        if not reads_in_backward and (self.tasks or self.recovery.is_due) and self.threads.trains_here():
            self.recovery.run()
        self._refuse_damaged()
        if reads_in_backward:
            return Phase.RECOMPUTE if torch.is_grad_enabled() else Phase.BACKWARD
        if self._wrote:
            self._next_step()
        return Phase.FORWARD

    def phase(self) -> Phase:
        """Of a forward use of a weight that happens now."""
        task = current_task()
        if task == NO_TASK and self.tasks and self.threads.trains_here():
            self.recovery.run()
        self.enter_forward()
        if task != NO_TASK:
            self._join(task)
            return Phase.RECOMPUTE
        if self._wrote:
            self._next_step()
        self.watch.look_if_changed()
        return Phase.FORWARD

    def _next_step(self) -> None:
        """Writes of the program's own have taken the place of an update."""
        self._wrote = False
        if self.micro_batch > 0:
            self.micro_batch = 0
            self.runtime.next_step()

    def enter_backward(self) -> None:
        """Called by every node of the graph that has to do with weights."""
        task = current_task()
        if self.is_unsharded:
            raise InvalidArgumentError(
                f"a backward goes through {self.name} as it was sharded, and etp.unshard_() has made its model whole: "
                "run the forward again"
            )
        if task not in self.tasks:
            self._join(task)

    def _join(self, task: int) -> None:
        """Has the ranks meet when this backward ends, unless another one is around it: autograd's end of a backward is
        also that of one inside another (a checkpoint's), which has joined before."""
        if task in self.tasks:
            return
        refuse_compiled_autograd(self.weights[0].name if self.weights else "the model")
        self.threads.take_over("a backward", self.name, self.under_way)
        if not self.tasks and self.recovery.is_due:
            self.recovery.run()
        if self.batch is not None:  # a step that makes gradients: they are of what it has written
            self.batch.pause()
        self.backwards += 1
        self.tasks.append(task)
        if self.states is not None:
            self.states.adding = True
        joined = _joined.setdefault(task, [])
        joined.append(self)
        if len(joined) == 1:
            Variable._execution_engine.queue_callback(lambda: _end_of(task))
        for each in self.companions:
            each._join(task)

    def require_alone(self, what: str) -> None:
        """Throw if another thread is within a backward or an update: calls of all ranks have one order."""
        self.threads.require_alone(what, self.name, self.under_way)

    @property
    def name(self) -> str:
        """Say which one it is, for messages."""
        return f"{self.weights[0].name} and others" if self.weights else "the model"

    @property
    def under_way(self) -> str:
        """Name what a call of another thread would meet, for messages; empty if there is nothing."""
        return "an update" if self.has_update else "a backward" if self.tasks else ""

    def leave(self, task: int) -> None:
        """The backward has ended."""
        if task in self.tasks:
            del self.tasks[self.tasks.index(task) :]  # those within have ended, or failed
        if not self.tasks and self.trains():
            self._unmet = True
            if self.joining is not None:
                self.joining.tell_backward(self)
            self._meet(self.runtime.drain)
            self._unmet = False
            self.micro_batch += 1
            if self.buffers is not None:
                self.buffers.settle()
        elif not self.tasks:
            self.leave_alone()

    def trains(self) -> bool:
        """Tell whether a backward of some rank may have given gradients, or its forward may have changed buffers: the
        same on all ranks, unlike the number of backwards that only pass through a frozen model (those of an attack, or
        of guidance by a classifier)."""
        if not all(weight.frozen for weight in self.weights) or self.departed.had_any or self.joining is not None:
            return True
        if any(replicated.wants_gradient for replicated in self.replicated):
            return True
        return self.buffers is not None and self.buffers.may_move

    def leave_alone(self) -> None:
        """End a backward, or one that has failed, without the others. REQUIRES: trains() does not hold."""
        self.leave_backwards()
        if self.states is not None:
            self.states.adding = False
        with DisableTorchFunctionSubclass(), torch.no_grad():
            for weight in self.weights:
                weight.after_drain(set())

    def leave_backwards(self) -> bool:
        """Leave those that are under way, which have failed, and tell whether gradients are lost with them."""
        lost = bool(self.tasks) or self._unmet
        for task in self.tasks:
            _joined.pop(task, None)
        self.tasks.clear()
        return lost

    def abandoned(self, lost: bool) -> None:
        """The runtime has ended what was under way. `lost`: with gradients of some rank."""
        if lost:
            self._discard()
        self._unmet = False

    def resume(self) -> None:
        """Bring the runtime to a state that is the same on all ranks, where a call has been refused. Collective: every
        rank does so before its next call."""
        self.recovery.run_if_due()

    # --- meetings

    def drain(self) -> None:
        """Collective: every gradient of every rank is added, then hooks are called."""
        self.resume()
        if self.idle and not self._unmet:
            self._remove_dead()
        self._meet(self.runtime.drain)

    def _meet(self, meeting: Callable[[], list[tuple[int, int, int]]]) -> None:
        """`meeting` returns what has been added. All additions come before the first hook."""
        outer, self._meeting = self._meeting, True
        try:
            self._met(meeting)
        finally:
            self._meeting = outer

    def _met(self, meeting: Callable[[], list[tuple[int, int, int]]]) -> None:
        weights = self.living_weights()
        with DisableTorchFunctionSubclass(), torch.no_grad():
            for weight in weights:
                weight.before_drain()
            for replicated in self.replicated:
                replicated.give()
            added: set[int] = set()
            with ExitStack() as shown:
                try:
                    added = {number for number, *_ in meeting()}
                    if self.replicated:
                        ranks = self.runtime.replicated_ranks()
                        for replicated in self.replicated:
                            replicated.was_given(ranks)
                    add_beside_runtime(self)
                    for weight in weights:
                        weight.release()
                    self.begin_states()
                    shown.callback(self.end_states)
                except CancelledError:  # another rank has abandoned its backward
                    if not self.recovery.is_due:
                        self._discard()
                    raise
                finally:
                    for weight in weights:
                        weight.after_drain(added)
                    changed = [each for each in self.replicated if each.take()]
            if self.states is not None:
                self.states.adding = False
        for weight in weights:
            if weight.hooks.entries and weight.is_among(added) and weight.parameter is not None:
                weight.hooks.call(weight.parameter)
        for replicated in changed:
            replicated.hooks.call(replicated.parameter)
        for weight in self.departed.alive():
            weight.receive_no_more()
        if not self.has_update:
            self._remove_dead()

    def _discard(self) -> None:
        """Gradients without those of a rank that has abandoned its backward are worth nothing."""
        for weight in self.living_weights():
            weight.discard()
        for replicated in self.replicated:
            replicated.discard()

    def begin_update(self, weights: Iterable[Weight], what: str = "an update", timeout: float | None = None) -> None:
        """Collective: no rank reads these weights any longer, and their rows may be written.

        Args:
            what: For messages of ranks that wait for others.
            timeout: Seconds to wait for these. None: the group's, for readers.
        """
        self.threads.take_over("an update", self.name, self.under_way)
        self.resume()
        self.require_no_update()
        if self.tasks and current_task() == NO_TASK:
            self.recovery.run()
        updated = self._updated = list(weights)
        self._make_states()

        def meeting() -> list[tuple[int, int, int]]:
            numbers = [number for weight in updated for number in weight.numbers]
            self.threads.keep_readers_out(self.name)
            try:
                self.runtime.begin_update(numbers, what, self._readers(timeout))
            except BaseException:
                self.threads.let_readers_in()
                raise
            self.has_update = True
            return self.runtime.added()

        self._meet(meeting)
        self.begin_states()
        for weight in self.living_weights():
            if weight.together is not None:
                weight.together.clear()

    def require_no_update(self) -> None:
        """Throw if this thread is within an update."""
        if self.updating:
            raise InvalidArgumentError(
                f"{self.weights[0].name} and others: an update is under way; updates of one model do not nest"
            )

    def end_update(self) -> None:
        """Collective: publishes them. Once a call within the update has been refused, resume() ends it on all ranks."""
        if self.recovery.is_due:
            self.close_update()
            return
        self.end_states()
        self.has_update = self._wrote = False
        self.micro_batch = 0
        updated, self._updated = self._updated, []
        try:
            self._publish(self.runtime.end_update, updated, "an update")
        finally:
            self.threads.let_readers_in()
        self.drop_rows()
        self.follow_frozen()

    def _publish(self, publish: Callable[[], None], written: Sequence[Weight], what: str) -> None:
        """Publish what has been written. A value that is not finite is an error of all ranks: nothing is published, and
        the weights are damaged until they are. Collective."""
        try:
            publish()
        except DataLossError as error:
            with suppress(Error):  # that the group is lost has another text
                self.runtime.abandon(False)  # the update
            self.damage.add(written, f"{what} has not been published ({error})", until_published=True)
            raise known(error) from None
        self.damage.mend_published(written)

    def close_update(self) -> None:
        """Leave an update in which a call has been refused, and which resume() ends on all ranks."""
        if not self.has_update:
            return
        self.end_states()
        self.has_update = self._wrote = False
        self.micro_batch = 0
        self._updated = []
        self.threads.let_readers_in()
        if self._batch is not None:
            self._batch.lose(self)
        self.drop_rows()

    def drop_rows(self) -> None:
        """Let go of rows that are published, of weights that are kept quantised only."""
        for weight in self.living_weights():
            weight.drop_rows()

    def _readers(self, timeout: float | None) -> float:
        """Return how long, in seconds, a write waits for ranks that read."""
        return self.group.timeout_of_readers if timeout is None else timeout

    @contextmanager
    def writing(self, weights: Sequence[Weight], what: str, told: bytes, begins: bool) -> Iterator[Sequence[bytes]]:
        """Tell all ranks what is to be written, and give what they have told. If that is the same, and `begins` holds,
        no rank reads these weights or any state, rows of them may be written, and they are published at the end.
        Collective."""
        self.threads.take_over("a write", self.name, self.under_way)
        self.resume()
        if self.tasks and current_task() == NO_TASK:
            self.recovery.run()
        if weights:
            self.threads.keep_readers_out(self.name)
        try:
            if not weights:
                answers = self.core.exchange(what, told)
            else:
                numbers = [number for each in weights for number in each.numbers]
                answers = self.runtime.begin_write(numbers, what, told, begins, self._readers(None))
            if not begins or any(answer != answers[0] for answer in answers):
                yield answers
                return
            self.begin_states()
            written = [each for each in self.living_weights() if each in weights]
            for weight in written:
                if weight.together is not None:
                    weight.together.clear()
            self.has_update = bool(weights)
            before = _versions_of(written)
            try:
                yield answers
            except BaseException as error:
                if _versions_of(written) != before:
                    self.damage.add(written, f"{what} had written a part of it when it ended with an error ({error})")
                raise
            finally:
                self.end_states()
                self.has_update = False
                if weights and not self.recovery.is_due:  # else resume() ends it
                    self._wrote = True
                    self._publish(self.runtime.end_write, written, what)
                    for weight in written:
                        weight.drop_rows()
        finally:
            if weights:
                self.threads.let_readers_in()

    def _make_states(self) -> None:
        """Make room for states that other ranks read. Collective the first time."""
        if self.states is None and self.group.size > 1:
            self.states = SharedStates(self.core, self.group.rank, self.group.size, self.group.timeout)
            for weight in self.living_weights():
                weight.hide_master()
            self.show_masters()

    def show_masters(self) -> None:
        """Let other ranks read masters that do not travel. Collective, once there are such weights."""
        hidden = [weight for weight in self.weights if weight.wants_master_shown]
        if not hidden or self.group.size == 1:
            return
        self._make_states()
        assert self.states is not None
        self.states.begin()
        for weight in hidden:
            if weight.wants_master_shown and (self.states.reads_private or not weight.native):
                weight.show_master(self.states)
        self.states.end()

    def begin_states(self) -> None:
        """Let states of optimisers be written and made: all ranks have come. Collective the first time."""
        self._make_states()
        if self.states is not None:
            self.states.begin()

    def end_states(self) -> None:
        """Let other ranks read them."""
        if self.states is not None:
            self.states.end()

    @property
    def writes_states(self) -> bool:
        """Tell whether states and gradients may be written: no rank reads them alone."""
        return self.states is not None and self.states.writing

    @contextmanager
    def writing_states(self) -> Iterator[None]:
        """Let states and gradients be written. REQUIRES: all ranks have come. Collective the first time."""
        self.begin_states()
        try:
            yield
        finally:
            self.end_states()

    def follow_whole(self) -> None:
        """Have gradients of parameters that every rank has whole told in the backward that begins: they may have been
        released since, or swapped."""
        if self.idle and self.threads.trains_here():
            for replicated in self.replicated:
                replicated.follow()

    def follow_frozen(self) -> None:
        """Parameters may be frozen, and released, at any time between backwards."""
        with DisableTorchFunctionSubclass():
            for weight in self.living_weights():
                weight.follow_frozen()
        for replicated in self.replicated:
            replicated.follow()
        for name, parameter in self.foreign.items():
            what = kind_refused(parameter) if parameter.requires_grad else None
            if what is not None:
                raise InvalidArgumentError(
                    f"{name} was frozen when the model was sharded, is trained now, and is {what}"
                )
