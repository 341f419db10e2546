"""What the package knows of one model: its weights, what is under way, and when its ranks meet."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from .. import _core
from .._closing import Closing, close_at_exit
from .._errors import CancelledError, InvalidArgumentError
from .attention import attentive_class
from .backwards import watch_backwards
from .batch import Batch, refuse_damaged
from .buffers import Buffers
from .compile import leave_out_of_graphs, left_out, refuse_compiled_autograd
from .group import Group
from .matrix import Listed
from .modules import Sharded, has_group, unsharded_class
from .parameter import LogicalParameter
from .phase import Phase
from .refusals import kind_refused
from .replicated import Replicated
from .shared_states import SharedStates
from .state_dict import watch_loading, watch_states
from .structure import Structure, changes, in_functional_call
from .telling import Member, json_of
from .tensor import lasting
from .threads import Threads
from .uses import refuse_transforms
from .weight import Weight

_task_of_this_backward = torch._C._current_graph_task_id
_NO_TASK = -1

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


_MOST_COUNTS_AHEAD = 1 << 16  # of another rank's count of updates


def _versions_of(weights: Iterable[Weight]) -> list[int]:
    """Count the writes of rows, by what torch counts."""
    return [weight.store.rows._version for weight in weights if weight.store.rows is not None]


class Hook:
    """A hook of a module of a sharded model, which goes when the model is unsharded or summoned."""

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        self._name = name
        self._function = left_out(function)

    @left_out
    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise InvalidArgumentError(f"{self._name} is sharded and cannot be copied: copy it within etp.summon(model)")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"{self._name} is sharded and cannot be pickled as a module: save its state_dict(), which any rank can, or "
            "the model within etp.summon(model)"
        )


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
        self._resumed = member.core.refusals  # which the runtime has come back from
        self._resuming = False
        self.joining: Any = None  # a loop in etp.join(): Join
        self.rescales = False  # gradients of each backward are multiplied by `factor`
        self.factor = 1.0
        self._unmet = False  # the last backward's gradients have not been added
        self.inline = inline
        self.scale = scale
        self.replicas = self.size // group.size
        self.job_ranks = _job_ranks(group, member.core)
        self.runtime = runtime
        self.weights: list[Weight] = []
        self.replicated: list[Replicated] = []
        self.micro_batch = 0  # backwards since the last update
        self._wrote = False  # since the last use in a forward
        self._unpublished = False  # values that are not finite, which are to be written again
        self._batch: Batch | None = None
        self.damaged: dict[Any, str] = {}  # weights that a step has written in part, and how that came
        self.threads = Threads(group.timeout)
        self._updating = False
        self.structure: Structure | None = None  # of its module
        self.adopt: Callable[[torch.nn.Module], None] | None = None  # what has changed there; collective
        self.again: Callable[[], ShardedModel] | None = None  # one with its group and options; collective
        self.copier: Callable[[ShardedModel, torch.nn.Module], Any] | None = None  # what deepcopy() of modules calls
        self.publish = "update"
        self._looking = False
        self.foreign: dict[str, torch.Tensor] = {}  # frozen parameters whose gradients nobody could add
        self.buffers: Buffers | None = None
        self._meeting = False
        self.anchor = torch.zeros((), requires_grad=True)  # autograd's way to a weight that is not its input
        self.anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self.wanted: set[int] | None = None
        self._handles: list[RemovableHandle] = []
        self._module: Callable[[], torch.nn.Module | None] = lambda: None
        self._changed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules with attributes of ours
        self._tasks: list[int] = []  # of backwards under way, outermost first
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
        for weight in self.weights:
            yield weight.parameter
        for replicated in self.replicated:
            yield replicated.parameter

    def close(self) -> None:
        """Ends its streams. Not collective. Idempotent."""
        _models.discard(self)
        self.runtime.close()

    # --- hooks

    def watch(self, module: torch.nn.Module) -> None:
        """Follows what is frozen, makes an update of load_state_dict(), and takes gradients of what is whole."""
        threads = self.threads

        def begin(root: torch.nn.Module, *_: Any) -> None:
            leave_out_of_graphs()
            refuse_transforms(self.weights[0].name if self.weights else type(root).__name__)
            self.enter_forward()
            self.look(thorough=True)
            if self.idle and threads.trains_here():
                self.follow_frozen()

        def enter(*_: Any) -> None:
            self.enter_forward()
            threads.forwards += 1
            self.look()

        def leave(*_: Any) -> None:
            threads.forwards = max(0, threads.forwards - 1)

        self._module = weakref.ref(module)
        name = type(module).__name__
        self._handles += [module.register_forward_pre_hook(Hook(name, begin)), *watch_loading(module, self)]
        for each in module.modules():
            models = [
                parameter.etp.model
                for parameter in each._parameters.values()
                if isinstance(parameter, LogicalParameter)
            ]
            owns = self in models
            if not has_group(each):  # those are watched; but their weights may be tied to other modules'
                for model in dict.fromkeys(models):
                    self._handles += watch_states(each, model)
            if each is module or (owns and not isinstance(each, Sharded)):
                self._handles += [
                    each.register_forward_pre_hook(Hook(name, enter)),
                    each.register_forward_hook(Hook(name, leave), always_call=True),
                ]
        for replicated in self.replicated:
            replicated.attach()
        for each in module.modules():
            if self.copier is None:
                break
            if any(isinstance(parameter, LogicalParameter) for parameter in each.parameters()):
                each.__dict__["__deepcopy__"] = self.copier(self, each)
                self._changed.add(each)
                kind = attentive_class(each)
                if kind is not None:
                    each.__class__ = kind
        self.structure = Structure(module)
        changes.watch()

    def look(self, thorough: bool = False) -> bool:
        """Adopt what has changed in the module since the last look, and tell whether something has. Collective, then.

        Args:
            thorough: Also compare known places: not every change is counted.
        """
        structure, module = self.structure, self._module()
        if structure is None or (structure.is_current and not thorough):
            return False
        if self.adopt is None or module is None or self._looking or not self.idle:
            return False
        if not (self.threads.trains_here() or torch.is_grad_enabled()):  # another thread's forward, to be read
            return False
        if (structure.is_current and structure.stands()) or in_functional_call():
            return False
        self._looking = True
        try:
            with lasting():
                self.adopt(module)
        finally:
            self._looking = False
        return self.structure is not structure

    def watch_tied(self, module: torch.nn.Module) -> None:
        """It has got one of the weights."""
        self._handles += watch_states(module, self)

    def leave_replicated(self) -> None:
        """To a wrapper of the model, which averages gradients of what is not sharded."""
        for replicated in self.replicated:
            replicated.detach()
        self.replicated.clear()
        module = self._module()
        if module is not None:
            self.structure = Structure(module)

    def unwatch(self) -> None:
        """Leaves the module and its whole parameters as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for each in self._changed:
            each.__dict__.pop("__deepcopy__", None)
            if attentive_class(each) is type(each):
                each.__class__ = unsharded_class(type(each))
        self._changed.clear()
        self.structure = None
        for replicated in self.replicated:
            replicated.detach()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Leave the module alone for a while. What changes there is found by the next look."""
        structure = self.structure
        self.unwatch()
        try:
            yield
        finally:
            module = self._module()
            if module is not None:
                self.watch(module)
                self.structure = structure

    @property
    def alive(self) -> bool:
        return self._module() is not None

    @property
    def idle(self) -> bool:
        """Neither a backward nor an update is under way."""
        return not self._tasks and not self._updating

    @property
    def updating(self) -> bool:
        """Whether this thread is within an update. Reads of others wait for its end."""
        return self._updating and self.threads.trains_here()

    @property
    def batch(self) -> Batch | None:
        """The step that is under way in this thread."""
        return self._batch if self._batch is None or self.threads.trains_here() else None

    @batch.setter
    def batch(self, batch: Batch | None) -> None:
        if batch is not None:
            self.threads.take_over("a step", self._name, self._under_way)
        self._batch = batch

    # --- backwards

    def in_forward(self) -> bool:
        """Tell whether a module that has sharded weights of its own, or the root, computes."""
        return self.threads.forwards > 0

    def in_backward(self) -> bool:
        """Tell whether a node of a backward runs now: hooks that are called once gradients have been added are behind
        it."""
        return not self._meeting and _task_of_this_backward() != _NO_TASK

    def enter_forward(self) -> None:
        """Publish what a step has written, if its closure computes now. Throw if a step has damaged weights."""
        self.resume()
        if self.damaged:
            refuse_damaged(self)
        if self.batch is not None:
            self.batch.pause()

    def reading_phase(self) -> Phase:
        """Return the phase of an operation by the dispatcher that reads a weight now."""
        reads_in_backward = self.in_backward()
        if not reads_in_backward and (self._tasks or self._is_refused()) and self.threads.trains_here():
            self._recover()
        if self.damaged:
            refuse_damaged(self)
        if reads_in_backward:
            return Phase.RECOMPUTE if torch.is_grad_enabled() else Phase.BACKWARD
        if self._wrote:
            self._next_step()
        return Phase.FORWARD

    def phase(self) -> Phase:
        """Of a forward use of a weight that happens now."""
        task = _task_of_this_backward()
        if task == _NO_TASK and self._tasks and self.threads.trains_here():
            self._recover()
        self.enter_forward()
        if task != _NO_TASK:
            self._join(task)
            return Phase.RECOMPUTE
        if self._wrote:
            self._next_step()
        if self.structure is not None and not self.structure.is_current:
            self.look()
        return Phase.FORWARD

    def _next_step(self) -> None:
        """Writes of the program's own have taken the place of an update."""
        self._wrote = False
        if self.micro_batch > 0:
            self.micro_batch = 0
            self.runtime.next_step()

    def enter_backward(self) -> None:
        """Called by every node of the graph that has to do with weights."""
        task = _task_of_this_backward()
        if task not in self._tasks:
            self._join(task)

    def _join(self, task: int) -> None:
        """Has the ranks meet when this backward ends, unless another one is around it: autograd's end of a backward is
        also that of one inside another (a checkpoint's), which has joined before."""
        if task in self._tasks:
            return
        refuse_compiled_autograd(self.weights[0].name if self.weights else "the model")
        self.threads.take_over("a backward", self._name, self._under_way)
        if not self._tasks and self._is_refused():
            self._recover()
        self._tasks.append(task)
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
        self.threads.require_alone(what, self._name, self._under_way)

    @property
    def _name(self) -> str:
        return f"{self.weights[0].name} and others" if self.weights else "the model"

    @property
    def _under_way(self) -> str:
        return "an update" if self._updating else "a backward" if self._tasks else ""

    def leave(self, task: int) -> None:
        """The backward has ended."""
        if task in self._tasks:
            del self._tasks[self._tasks.index(task) :]  # those within have ended, or failed
        if not self._tasks:
            self._unmet = True
            if self.joining is not None:
                self.joining.tell_backward(self)
            self._meet(self.runtime.drain)
            self._unmet = False
            self.micro_batch += 1
            if self.buffers is not None:
                self.buffers.settle()

    def _recover(self) -> None:
        """After a backward or an optimiser's step that failed: the other ranks are told, or get its weights; those of
        all models that meet together, in the order of meetings."""
        for each in sorted({self, *self.companions}, key=lambda model: model.number):
            each._recover_alone()

    def _recover_alone(self) -> None:
        refused = self._is_refused()
        if self._resuming or not (refused or self._tasks or self._updating):
            return
        self._resuming = True
        try:
            if self._updating and not refused:
                self.end_update()
            if refused or self._tasks:
                self._abandon()
        finally:
            self._resuming = False

    def _is_refused(self) -> bool:
        """Tell whether a call of its ranks has been refused since its runtime was last in order."""
        return self.member.core.refusals != self._resumed

    def resume(self) -> None:
        """Bring the runtime to a state that is the same on all ranks, where a call has been refused. Collective: every
        rank does so before its next call."""
        if not self._is_refused() or self._resuming or _task_of_this_backward() != _NO_TASK:
            return
        if self.threads.trains_here() or (torch.is_grad_enabled() and not self._under_way):
            self.member.family.settle()
            self._recover()

    def _abandon(self) -> None:
        """Collective: ends what is under way, and tells what is damaged. Gradients are kept unless a rank has lost
        some."""
        refusals = self.member.core.refusals
        lost = bool(self._tasks) or self._unmet
        for task in self._tasks:
            _joined.pop(task, None)
        self._tasks.clear()
        if self.states is not None:
            self.states.adding = False
        self.close_update()
        with DisableTorchFunctionSubclass(), torch.no_grad():
            for weight in self.weights:
                weight.before_abandon()
            lost = self.runtime.abandon(lost)
            self.runtime.added()
            for weight in self.weights:
                weight.after_abandon()
            for replicated in self.replicated:
                replicated.put_back()
        self._unpublished = False
        if lost:
            self._discard()
        self._unmet = False
        if self._is_refused():  # else this rank is alone in it, and the others learn it in their drain
            self._align()
        self._resumed = refusals

    def _align(self) -> None:
        """Have all ranks take as damaged what one of them does, or what some have written and others have not, and
        count updates alike: one may have begun, or ended, on some of them only. Collective."""
        reasons: dict[str, list[int]] = {}
        for place, weight in enumerate(self.weights):
            if weight in self.damaged:
                reasons.setdefault(self.damaged[weight], []).append(place)
        stamps = [weight.store.stamp for weight in self.weights]
        told = json.dumps([reasons, None if self.states is None else self.states.count, stamps]).encode()
        answers = json_of(
            self.member.core.exchange("what a refused call has left", told), "what is left", self._may_be_left
        )
        counts = [count for _, count, _ in answers]
        if self.states is not None:
            if None in counts:  # it was being made
                self.states = None
            else:
                self.states.align(max(counts))
        for rank, (others, _, theirs) in enumerate(answers):
            for why, places in others.items() if rank != self.member.core.rank else ():
                self.damage([self.weights[place] for place in places], why)
            differ = [
                weight for weight, one, first in zip(self.weights, theirs, answers[0][2], strict=True) if one != first
            ]
            why = f"ranks 0 and {rank} have not written the same into it when a call was refused or interrupted"
            self.damage([weight for weight in differ if weight not in self.damaged], why)

    def _may_be_left(self, told: Any) -> bool:
        reasons, count, stamps = told
        if len(stamps) != len(self.weights) or any(type(stamp) is not int for stamp in stamps):
            return False
        places = [place for places in reasons.values() for place in places]
        # An update that has ended on some ranks only is one ahead.
        near = count is None or self.states is None or abs(count - self.states.count) <= _MOST_COUNTS_AHEAD
        return near and all(type(place) is int and 0 <= place < len(self.weights) for place in places)

    # --- meetings

    def drain(self) -> None:
        """Collective: every gradient of every rank is added, then hooks are called."""
        self.resume()
        self._meet(self.runtime.drain)

    def _meet(self, meeting: Callable[[], list[tuple[int, int, int]]]) -> None:
        """`meeting` returns what has been added. All additions come before the first hook."""
        outer, self._meeting = self._meeting, True
        try:
            self._met(meeting)
        finally:
            self._meeting = outer

    def _met(self, meeting: Callable[[], list[tuple[int, int, int]]]) -> None:
        with DisableTorchFunctionSubclass(), torch.no_grad():
            for weight in self.weights:
                weight.before_drain()
            for replicated in self.replicated:
                replicated.give()
            added: set[int] = set()
            with ExitStack() as shown:
                try:
                    added = {number for number, *_ in meeting()}
                    for weight in self.weights:
                        weight.release()
                    self.begin_states()
                    shown.callback(self.end_states)
                except CancelledError:  # another rank has abandoned its backward
                    if not self._is_refused():
                        self._discard()
                    raise
                finally:
                    for weight in self.weights:
                        weight.after_drain(added)
                    changed = [each for each in self.replicated if each.take()]
            if self.states is not None:
                self.states.adding = False
        for weight in self.weights:
            if weight.hooks.entries and weight.is_among(added):
                weight.hooks.call(weight.parameter)
        for replicated in changed:
            replicated.hooks.call(replicated.parameter)

    def _discard(self) -> None:
        """Gradients without those of a rank that has abandoned its backward are worth nothing."""
        for weight in self.weights:
            weight.discard()
        for replicated in self.replicated:
            replicated.discard()

    def begin_update(self, weights: Iterable[Listed], what: str = "an update", timeout: float | None = None) -> None:
        """Collective: no rank reads these weights any longer, and their rows may be written.

        Args:
            what: For messages of ranks that wait for others.
            timeout: Seconds to wait for these. None: the group's, for readers.
        """
        self.threads.take_over("an update", self._name, self._under_way)
        self.resume()
        self.require_no_update()
        if self._tasks and _task_of_this_backward() == _NO_TASK:
            self._recover()
        updated = list(weights)
        self._make_states()

        def meeting() -> list[tuple[int, int, int]]:
            numbers = [number for weight in updated for number in weight.numbers]
            self.threads.keep_readers_out(self._name)
            try:
                self.runtime.begin_update(numbers, what, self._readers(timeout))
            except BaseException:
                self.threads.let_readers_in()
                raise
            self._updating = True
            return self.runtime.added()

        self._meet(meeting)
        self.begin_states()
        for weight in self.weights:
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
        if self._is_refused():
            self.close_update()
            return
        self.end_states()
        self._updating = self._wrote = False
        self.micro_batch = 0
        try:
            self.runtime.end_update()
        finally:
            self.threads.let_readers_in()
        for weight in self.weights:
            weight.drop_rows()
        self.follow_frozen()

    def close_update(self) -> None:
        """Leave an update in which a call has been refused, and which resume() ends on all ranks."""
        if not self._updating:
            return
        self.end_states()
        self._updating = self._wrote = False
        self.micro_batch = 0
        self.threads.let_readers_in()
        if self._batch is not None:
            self._batch.lose(self)
        for weight in self.weights:
            weight.drop_rows()

    def _readers(self, timeout: float | None) -> float:
        """Return how long, in seconds, a write waits for ranks that read."""
        return self.group.timeout_of_readers if timeout is None else timeout

    @contextmanager
    def writing(self, weights: Sequence[Listed], what: str, told: bytes, begins: bool) -> Iterator[Sequence[bytes]]:
        """Tell all ranks what is to be written, and give what they have told. If that is the same, and `begins` holds,
        no rank reads these weights or any state, rows of them may be written, and they are published at the end.
        Collective."""
        self.threads.take_over("a write", self._name, self._under_way)
        self.resume()
        if self._tasks and _task_of_this_backward() == _NO_TASK:
            self._recover()
        if weights:
            self.threads.keep_readers_out(self._name)
        try:
            if self._unpublished or not weights:
                answers = self.core.exchange(what, told)
            else:
                numbers = [number for each in weights for number in each.numbers]
                answers = self.runtime.begin_write(numbers, what, told, begins, self._readers(None))
            if not begins or any(answer != answers[0] for answer in answers):
                yield answers
                return
            self.begin_states()
            written = [each for each in self.weights if each in weights]
            for weight in written:
                if weight.together is not None:
                    weight.together.clear()
            self._updating = bool(weights)
            before = _versions_of(written)
            try:
                yield answers
            except BaseException as error:
                if _versions_of(written) != before:
                    self.damage(written, f"{what} had written a part of it when it ended with an error ({error})")
                raise
            finally:
                self.end_states()
                self._updating = False
                if weights and not self._is_refused():  # else resume() ends it
                    self._wrote = self._unpublished = True
                    self.runtime.end_write()
                    self._unpublished = False
                    for weight in written:
                        weight.drop_rows()
        finally:
            if weights:
                self.threads.let_readers_in()

    def _make_states(self) -> None:
        """Make room for states that other ranks read. Collective the first time."""
        if self.states is None and self.group.size > 1:
            self.states = SharedStates(self.core, self.group.rank, self.group.size, self.group.timeout)
            for weight in self.weights:
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

    def damage(self, weights: Iterable[Listed], why: str) -> None:
        """Refuse uses of weights that are written in part, until mend()."""
        self.damaged |= dict.fromkeys(weights, why)

    def mend(self, weights: Iterable[Listed]) -> None:
        """Weights have been loaded."""
        for weight in weights:
            self.damaged.pop(weight, None)

    def follow_frozen(self) -> None:
        """Parameters may be frozen, and released, at any time between backwards."""
        with DisableTorchFunctionSubclass():
            for weight in self.weights:
                weight.follow_frozen()
        for replicated in self.replicated:
            replicated.follow()
        for name, parameter in self.foreign.items():
            what = kind_refused(parameter) if parameter.requires_grad else None
            if what is not None:
                raise InvalidArgumentError(
                    f"{name} was frozen when the model was sharded, is trained now, and is {what}"
                )
