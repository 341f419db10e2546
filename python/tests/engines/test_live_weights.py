"""Updates of live weights: all ranks or none, and what failed is undone."""

import threading

import pytest
import torch
from loaders import LOADERS
from tessera import InvalidArgumentError, engines
from test_learned_maps import tensors, values


class Ranks:
    """A vote of threads that stand for ranks."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.votes = []

    def agree(self, proposal):
        self.votes.append(proposal)
        self.barrier.wait(60)
        last = self.votes[-self.size :]
        self.barrier.wait(60)
        return None not in last and len(set(last)) == 1

    def run(self, work):
        found = [None] * self.size

        def one(rank):
            found[rank] = work(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


class Source:
    """A batch that fills staged memory with a version of the checkpoint, and may fail half-way."""

    def __init__(self, learned, staged, checkpoint_of):
        self.learned, self.staged, self.checkpoint_of = learned, staged, checkpoint_of
        self.version = 0
        self.failing = False

    def recv(self, min_version=None, *, timeout=None):
        checkpoint = self.checkpoint_of(self.version)
        for i, (key, memory) in enumerate(self.staged.items()):
            if self.failing and i == len(self.staged) // 2:
                raise ConnectionError("the trainer is gone")
            part = self.learned.map(key)
            memory.copy_(checkpoint[part.name][part.source or ...])
        return self.version


class Engine:
    """One rank of an engine with a model of `loaders`."""

    def __init__(self, name, rank=0, world=1, changes=None, **options):
        self.make = lambda: LOADERS[name](rank, world)
        loading = self.make()
        self.model = loading.model
        self.checkpoint = loading.checkpoint
        self.learned = engines.learn_map(self.model, self.checkpoint)
        staged = self.learned.staging()
        self.source = Source(self.learned, staged, self.values)
        if changes is not None:
            options["plan"] = lambda staged: engines.Plan(self.learned.pieces, changes)
        self.live = engines.LiveWeights(
            lambda: tensors(self.model), self.learned, self.source, staged, rank=rank, **options
        )

    def values(self, version):
        return values(self.checkpoint, 1000 * version)

    def holds(self, version):
        """Whether its weights are those that its loader would have left."""
        model = self.make().model
        if version:
            model.load_weights(iter(self.values(version).items()))
        expected = tensors(model)
        return all(torch.equal(each, expected[name]) for name, each in tensors(self.model).items())


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("name", LOADERS)
def test_each_version_is_what_the_loader_would_give(name, undo):
    one = Engine(name, undo=undo)
    for version in (1, 2, 5):
        one.source.version = version
        staged = one.live.stage()
        assert (staged.ok, staged.staged, staged.version) == (True, version, one.live.version)
        assert not one.holds(version)
        assert one.live.commit().ok
        assert one.live.version == version and one.holds(version)


def test_commit_without_a_staged_version_is_refused():
    one = Engine("fused")
    verdict = one.live.commit()
    assert not verdict.ok and "nothing is staged" in verdict.error and one.holds(0)


def test_a_version_that_waits_to_be_installed_is_not_waited_for_again():
    one = Engine("fused")
    taken = []
    recv = one.source.recv

    def counted(min_version=None, *, timeout=None):
        taken.append(min_version)
        return recv(min_version, timeout=timeout)

    one.source.recv = counted
    one.source.version = 3
    for wanted, calls in ((2, [2]), (3, [2]), (None, [2, None]), (3, [2, None])):
        one.live.receive(wanted)
        assert taken == calls and one.live.received == 3
    assert one.live.settle().ok and one.live.commit().ok and one.holds(3)
    one.source.version = 4
    one.live.receive(3)  # what was installed is not there any more
    assert taken[2:] == [3] and one.live.received == 4
    one.live.receive(4, offset=1)
    assert one.live.settle().ok and one.live.commit().ok and (one.live.version, one.holds(4)) == (4, True)


def test_numbers_on_the_bus_may_be_larger_than_versions():
    one = Engine("fused")
    for version in (0, 1, 7):
        one.source.version = version + 1
        one.live.receive(version + 1, offset=1)
        assert one.live.received == version + 1
        assert one.live.settle().staged == version
        assert one.live.commit().ok and one.live.version == version and one.holds(version + 1)


def test_a_receive_that_fails_on_one_rank_leaves_all_as_they_were():
    ranks = Ranks(2)
    both = [Engine("fused", rank, 2, agree=ranks.agree) for rank in range(2)]

    def update(rank):
        one = both[rank]
        return one.live.stage(), one.live.commit()

    for one in both:
        one.source.version = 1
    assert all(verdict.ok for verdicts in ranks.run(update) for verdict in verdicts)
    both[1].source.failing = True
    for one in both:
        one.source.version = 2
    for rank, (staged, committed) in enumerate(ranks.run(update)):
        assert not staged.ok and not committed.ok and staged.rank == rank and staged.version == 1
        assert staged.error == ("ConnectionError: the trainer is gone" if rank == 1 else "another rank failed")
        assert both[rank].holds(1)
    both[1].source.failing = False
    assert all(verdict.ok for verdicts in ranks.run(update) for verdict in verdicts)
    assert both[0].holds(2) and both[1].holds(2)


class Failing:
    """A layer that is built apart: fails where it is told to."""

    def __init__(self, model):
        self.model, self.at, self.calls = model, None, []

    def _step(self, name):
        self.calls.append(name)
        if self.at == name:
            raise ValueError(f"injected in {name}")

    def build(self, staged):
        self._step("build")

    def swap(self):
        self.kept, self.model.extra = getattr(self.model, "extra", None), object()
        self._step("swap")

    def undo(self):
        self._step("undo")
        self.model.extra = self.kept

    def drop(self):
        self._step("drop")


@pytest.mark.parametrize("point", ["build", "swap"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_change_that_fails_on_one_rank_is_undone_on_both(point, victim):
    ranks = Ranks(2)
    both, changes = [], []
    for rank in range(2):
        change = Failing(LOADERS["experts"](rank, 2).model)
        both.append(Engine("experts", rank, 2, agree=ranks.agree, changes=[change]))
        changes.append(change)

    def update(rank):
        return both[rank].live.stage(), both[rank].live.commit()

    for version in (1, 2):
        for one in both:
            one.source.version = version
        assert all(verdict.ok for verdicts in ranks.run(update) for verdict in verdicts)
    before = [change.model.extra for change in changes]
    changes[victim].at = point
    for one in both:
        one.source.version = 3
    for rank, (_, committed) in enumerate(ranks.run(update)):
        assert not committed.ok and committed.version == 2
        assert both[rank].holds(2) and changes[rank].model.extra is before[rank]
    changes[victim].at = None
    assert all(verdict.ok for verdicts in ranks.run(update) for verdict in verdicts)
    assert both[0].holds(3) and both[1].holds(3)


class Interrupted:
    """copy_() of torch.Tensor that raises at a given call, and at `more` after it."""

    def __init__(self, monkeypatch, calls, more=0):
        self.left, self.more, self.raised = calls, more, 0
        real = torch.Tensor.copy_

        def copy(tensor, *args, **options):
            self.left -= 1
            if -self.more <= self.left <= 0:
                self.raised += 1
                raise RuntimeError("interrupted")
            return real(tensor, *args, **options)

        monkeypatch.setattr(torch.Tensor, "copy_", copy)


def updated(undo):
    one = Engine("repeated", undo=undo)
    one.source.version = 1
    assert one.live.stage().ok and one.live.commit().ok
    one.source.version = 2
    assert one.live.stage().ok
    return one


@pytest.mark.parametrize("calls", range(1, 26, 2))
def test_a_copy_that_is_interrupted_anywhere_is_undone(calls, monkeypatch):
    one = updated(undo=True)
    with monkeypatch.context() as patch:
        fault = Interrupted(patch, calls)
        verdict = one.live.commit()
    if fault.raised:
        assert not verdict.ok and "interrupted" in verdict.error and not one.live.torn
        assert one.live.version == 1 and one.holds(1)
        assert one.live.stage().ok and one.live.commit().ok
    assert one.live.version == 2 and one.holds(2)


@pytest.mark.parametrize("calls", range(1, 10, 2))
def test_a_copy_that_is_interrupted_begins_again(calls, monkeypatch):
    one = updated(undo=False)
    with monkeypatch.context() as patch:
        fault = Interrupted(patch, calls)
        verdict = one.live.commit()
    assert fault.raised <= 1 and verdict.ok and one.live.version == 2 and one.holds(2)


def test_a_copy_that_fails_for_good_is_told_and_the_next_update_mends_it(monkeypatch):
    one = updated(undo=False)
    with monkeypatch.context() as patch:
        Interrupted(patch, 2, more=1000)
        verdict = one.live.commit()
    assert not verdict.ok and one.live.torn and one.live.version == 1
    assert one.live.stage().ok and one.live.commit().ok
    assert not one.live.torn and one.holds(2)


def test_a_change_that_fails_while_weights_are_torn_is_undone(monkeypatch):
    change = Failing(LOADERS["repeated"](0, 1).model)
    one = Engine("repeated", changes=[change])
    one.source.version = 1
    assert one.live.stage().ok
    with monkeypatch.context() as patch:
        Interrupted(patch, 2, more=1000)
        assert not one.live.commit().ok and one.live.torn
    before = change.model.extra
    change.at = "swap"
    assert one.live.stage().ok
    assert not one.live.commit().ok and one.live.torn and change.model.extra is before
    change.at = None
    assert one.live.stage().ok and one.live.commit().ok and not one.live.torn and one.holds(1)


def test_a_parameter_that_lies_in_another_form_is_refused_before_anything_is_changed():
    one = Engine("fused")
    one.source.version = 1
    assert one.live.stage().ok
    one.model.o.data = one.model.o.data.t()
    verdict = one.live.commit()
    assert not verdict.ok and "o is (8, 8)" in verdict.error and "cannot be written in place" in verdict.error
    with pytest.raises(InvalidArgumentError, match="cannot be written in place"):
        engines.LiveWeights(lambda: tensors(one.model), one.learned, one.source, {})


def test_large_pieces_are_exchanged_in_chunks():
    class Large(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(700, 1024), requires_grad=False)

        def load_weights(self, weights):
            for _, tensor in weights:
                self.w.copy_(tensor)

    model = Large()
    learned = engines.learn_map(model, {"w": ((700, 1024), torch.float32)})
    staged = learned.staging()
    source = Source(learned, staged, lambda version: {"w": torch.full((700, 1024), float(version))})
    live = engines.LiveWeights(lambda: tensors(model), learned, source, staged, undo=True)
    for version in (1, 2):
        source.version = version
        assert live.stage().ok and live.commit().ok
        assert (model.w == version).all()
        assert (staged["w#0"] == version - 1).all()


@pytest.mark.parametrize("name", LOADERS)
def test_an_engine_that_starts_loads_a_version_as_its_loader_would(name):
    engine = Engine(name)
    for tensor in tensors(engine.model).values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))  # memory that nobody has written
    engine.source.version = 3
    fresh = engine.make().model
    fresh.load_weights(iter(engine.values(3).items()))
    assert engine.live.load() == 3 == engine.live.version
    for key, tensor in tensors(fresh).items():
        if key in {piece.parameter for piece in engine.learned.pieces}:
            assert torch.equal(tensors(engine.model)[key], tensor), key

    engine.source.version = 4
    assert engine.live.stage(4).ok and engine.live.commit().ok and engine.live.version == 4


def test_an_engine_that_cannot_load_a_version_says_why():
    engine = Engine(next(iter(LOADERS)))
    engine.source.failing = True
    with pytest.raises(ConnectionError, match="the trainer is gone"):
        engine.live.load()
    assert engine.live.version == 0


def test_what_is_prepared_belongs_to_what_may_fail():
    seen = []

    def prepare(memory):
        seen.append(len(memory))
        if engine.source.version == 2:
            raise ValueError("cannot be computed")

    engine = Engine(next(iter(LOADERS)), prepare=prepare)
    engine.source.version = 1
    assert engine.live.stage().ok and engine.live.commit().ok and engine.holds(1)
    engine.source.version = 2
    engine.live.receive()
    assert not engine.live.ready
    verdict = engine.live.settle()
    assert not verdict.ok and "cannot be computed" in verdict.error and engine.holds(1)
    engine.source.version = 3
    engine.live.receive()
    assert engine.live.ready
    assert engine.live.settle().ok and not engine.live.ready
    assert engine.live.commit().ok and engine.holds(3) and len(seen) == 3
