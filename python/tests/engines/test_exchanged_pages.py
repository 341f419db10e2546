"""Updates in place that exchange pages: what they leave, and that they can be undone."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch
from loaders import LOADERS
from tessera import InvalidArgumentError, engines
from tessera.engines import _pages
from tessera.engines._pages import ExchangedPages, StagedPages, _alike
from test_learned_maps import tensors, values

pytestmark = pytest.mark.skipif(not _pages.can_exchange(), reason="this system cannot exchange pages")

PAGE = mmap.PAGESIZE
SIZES = (1, PAGE - 1, PAGE, 3 * PAGE + 5, _pages._TABLE + PAGE // 2, 3 * _pages._TABLE)


def at(offset: int, size: int) -> torch.Tensor:
    """Bytes that begin that far into a page."""
    memory = torch.zeros(size + 2 * PAGE, dtype=torch.uint8)
    begin = (offset - memory.data_ptr()) % PAGE
    return memory[begin : begin + size]


def digits(size: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Places:
    """Live tensors of many sizes at odd addresses, and a change of them and their twins."""

    def __init__(self) -> None:
        self.live = {str(size): at(64 * k, size) for k, size in enumerate(SIZES)}
        self.twins = dict(zip(self.live, _alike(list(self.live.values())), strict=True))
        self.fill()
        self.change = ExchangedPages(lambda: self.live, self.twins)

    def fill(self) -> None:
        for seed, (name, live) in enumerate(self.live.items()):
            live.copy_(digits(live.numel(), seed))
            self.twins[name].copy_(digits(live.numel(), 100 + seed))

    def hold(self, exchanged: bool) -> bool:
        return all(
            torch.equal(live, digits(live.numel(), 100 * exchanged + seed))
            and torch.equal(self.twins[name], digits(live.numel(), 100 * (not exchanged) + seed))
            for seed, (name, live) in enumerate(self.live.items())
        )


def test_both_places_hold_what_the_other_held_and_keep_their_addresses():
    places = Places()
    addresses = [each.data_ptr() for each in (*places.live.values(), *places.twins.values())]
    rest = [each.untyped_storage().nbytes() for each in places.live.values()]
    for exchanged in (True, False, True):
        places.change.build({})
        places.change.swap()
        places.change.drop()
        assert places.hold(exchanged)
    assert addresses == [each.data_ptr() for each in (*places.live.values(), *places.twins.values())]
    assert rest == [each.untyped_storage().nbytes() for each in places.live.values()]


def test_what_lies_beside_a_tensor_in_its_pages_stays():
    memory = digits(4 * PAGE + 300, 7)
    before = memory.clone()
    live = memory[100 : 100 + 3 * PAGE]
    (twin,) = _alike([live])
    twin.fill_(1)
    ExchangedPages(lambda: {"live": live}, {"live": twin}).swap()
    assert torch.equal(live, torch.ones_like(live)) and torch.equal(twin, before[100 : 100 + 3 * PAGE])
    assert torch.equal(memory[:100], before[:100]) and torch.equal(memory[100 + 3 * PAGE :], before[100 + 3 * PAGE :])


def test_undo_puts_back_what_was_exchanged_and_nothing_else():
    places = Places()
    places.change.undo()
    assert places.hold(False)
    places.change.swap()
    places.change.undo()
    assert places.hold(False)
    places.change.undo()
    assert places.hold(False)
    places.change.drop()
    places.change.swap()
    assert places.hold(True)


def test_an_exchange_that_was_undone_before_it_began_does_nothing(monkeypatch):
    places = Places()
    waiting = []
    monkeypatch.setattr(threading.Thread, "start", lambda self: waiting.append(self))
    monkeypatch.setattr(threading.Thread, "join", lambda self: None)
    places.change.swap()
    places.change.undo()
    for thread in waiting:
        thread.run()
    assert waiting and places.hold(False)


@pytest.mark.parametrize("refused", [1, 2, 3, None])
def test_what_the_system_refuses_to_move_is_copied(monkeypatch, refused):
    """The first, second or third move of each tensor; or all."""
    real, calls = _pages._mremap(), []

    def refusing(*arguments):
        calls.append(arguments)
        return None if refused in ((len(calls) - 1) % 3 + 1, None) else real(*arguments)

    places = Places()
    monkeypatch.setattr(_pages, "_mremap", lambda: refusing)
    for exchanged in (True, False):
        places.change.swap()
        assert places.hold(exchanged)
    assert len(calls) > 6


def test_a_tensor_that_was_replaced_is_refused_before_anything_is_touched():
    places = Places()
    places.live["1"] = places.live["1"].clone()
    with pytest.raises(InvalidArgumentError, match="1 has moved since staging memory was made for it"):
        places.change.build({})
    assert places.hold(False)


class Updates:
    """A model of `loaders` that takes versions by StagedPages."""

    def __init__(self, name: str, rank: int = 0, world: int = 1) -> None:
        self.make = lambda: LOADERS[name](rank, world)
        loading = self.make()
        self.model, self.checkpoint = loading.model, loading.checkpoint
        self.learned = engines.learn_map(self.model, self.checkpoint)
        self.version, self.failing = 0, False
        self.pages = StagedPages(lambda: tensors(self.model), self.learned, least_bytes=1)
        self.live = engines.LiveWeights(
            lambda: tensors(self.model),
            self.learned,
            self,
            self.pages.staged,
            plan=lambda staged: self.pages.applied(engines.Plan(self.learned.pieces)),
            agree=lambda ok: ok is not None and not self.failing,
        )

    def recv(self, min_version=None, *, timeout=None):
        self.version += 1
        for key, memory in self.pages.staged.items():
            part = self.learned.map(key)
            memory.copy_(self.values(self.version)[part.name][part.source or ...])
        return self.version

    def values(self, version):
        return values(self.checkpoint, 1000 * version)

    def holds(self, version):
        model = self.make().model
        model.load_weights(iter(self.values(version).items()))
        expected = tensors(model)
        return all(torch.equal(each, expected[name]) for name, each in tensors(self.model).items())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", LOADERS)
def test_each_version_is_what_the_loader_would_give(name, rank):
    one = Updates(name, rank, 2)
    addresses = [each.data_ptr() for each in tensors(one.model).values()]
    for version in (1, 2, 3):
        assert one.live.stage().ok and one.live.commit().ok
        assert one.holds(version)
    assert addresses == [each.data_ptr() for each in tensors(one.model).values()]


def test_fused_and_sharded_parameters_are_exchanged_and_padded_ones_are_copied():
    one = Updates("fused")
    assert one.live.stage().ok
    (change,) = one.live.plan.changes
    assert set(change.names) == {"qkv", "gate_up", "o", "norm"} and not one.live.plan.pieces
    padded = [name for name in LOADERS if Updates(name).learned.untouched]
    assert padded
    for name in padded:
        other = Updates(name)
        assert other.live.stage().ok
        exchanged = {each for change in other.live.plan.changes for each in change.names}
        assert not exchanged & other.learned.untouched.keys()


def test_a_failed_commit_leaves_the_version_before():
    one = Updates("fused")
    assert one.live.stage().ok and one.live.commit().ok
    assert one.live.stage().ok
    votes = iter([True, False])
    one.live._agree = lambda ok: ok is not None and next(votes)
    assert not one.live.commit().ok and not one.live.torn
    assert one.holds(1)
    one.live._agree = lambda ok: ok is not None
    assert one.live.stage().ok and one.live.commit().ok and one.holds(3)


@pytest.mark.parametrize("kind", ["shared", "file", "overlapping"])
def test_memory_that_others_see_keeps_its_pages(kind, tmp_path):
    size = 4 * PAGE
    if kind == "overlapping":
        memory = torch.zeros(size + PAGE, dtype=torch.uint8)
        places = [memory[:size], memory[PAGE:]]
    else:
        file = tmp_path / "weights"
        file.write_bytes(bytes(size))
        with file.open("r+b") as opened:
            flags = mmap.MAP_PRIVATE if kind == "file" else mmap.MAP_SHARED
            mapped = mmap.mmap(opened.fileno(), size, flags=flags)
        places = [torch.frombuffer(mapped, dtype=torch.uint8)]
    apart = torch.zeros(size, dtype=torch.uint8)
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in (*places, apart)]
    assert _pages._are_private(spans) == [False] * len(places) + [True]
