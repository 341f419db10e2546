"""Steps that fail, or that differ between ranks: refused on all ranks by name, and the group goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import as_bytes, built, loss_of
from etp_optimizers import ByHand, Lookahead, LowBit, Normalised, Promised, SometimesNormalised
from tessera import etp
from torch_ranks import launch

SIZES = (2, 3)
FAILING = 1  # the rank
PROBES = 3 * 2  # of a step of `built()`: steps of one parameter, on rows and on the whole


class Once:
    """Something that happens once."""

    def __init__(self) -> None:
        self.left = 1

    def now(self) -> bool:
        self.left -= 1
        return self.left == 0


class Fails(Promised):
    """A step that fails once, on one rank, before or behind its first write."""

    written = 0  # parameters that it writes before it fails

    def __init__(self, parameters: Any, rank: int, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.rank, self.failure = rank, Once()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.rank == FAILING and count == self.written and self.failure.now():
                    raise MemoryError("out of memory")
                parameter.sub_(parameter.grad, alpha=group["lr"])
                count += 1


class FailsLate(Fails):
    written = 2


class FailsOnRows(Fails):
    """The same, with rows of parameters."""


class FailsLateOnRows(Fails):
    written = 2


class FailsLateByData(FailsLate):
    """The same, with writes that versions of tensors do not count."""

    def step(self, closure: Any = None) -> None:
        for count, parameter in enumerate(self.param_groups[0]["params"]):
            if self.rank == FAILING and count == self.written and self.failure.now():
                raise MemoryError("out of memory")
            parameter.data.sub_(parameter.grad.data, alpha=0.1)


class FailsInTheSecondStep(Fails):
    """Before its first write, which other ranks do not wait for: the promise has been looked at in the first step."""

    def __init__(self, parameters: Any, rank: int, lr: float = 0.1) -> None:
        super().__init__(parameters, rank, lr)
        self.failure.left = 2 * PROBES + 2


etp.allow_optimizer(FailsInTheSecondStep)
etp.allow_optimizer(FailsOnRows)
etp.allow_optimizer(FailsLateByData)
etp.allow_optimizer(FailsLateOnRows)
etp.allow_optimizer(Promised)
etp.allow_optimizer(Normalised)
etp.allow_optimizer(LowBit)
etp.allow_optimizer(SometimesNormalised)


def _refused(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises((tessera.Error, MemoryError)) as caught:
        call()
    return type(caught.value).__name__, " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def _sharded(group: Any) -> Any:
    return etp.shard_module_(built(), group, min_elements=256, reduction="sum")


def _weights(model: Any) -> dict[str, bytes]:
    return {name: as_bytes(etp.whole(parameter)) for name, parameter in model.named_parameters()}


def _expected(size: int) -> dict[str, bytes]:
    torch.set_num_threads(1)
    model = built()
    for rank in range(size):
        loss_of(model, rank).backward()
    Fails(model.parameters(), FAILING - 1).step()
    return {name: as_bytes(parameter) for name, parameter in model.named_parameters()}


# --- a step that fails on one rank


def _before_the_first_write(kind: Callable[..., Any], rank: int) -> Any:
    with etp.init_group(timeout=20) as group:
        model = _sharded(group)
        optimizer = kind(model.parameters(), rank)
        loss_of(model, rank).backward()
        refused = _refused(optimizer.step)
        optimizer.step()
        return refused, _weights(model)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [Fails, FailsOnRows])
def test_a_step_that_fails_before_its_first_write_may_be_called_again(size: int, kind: Any) -> None:
    expected = _expected(size)
    for rank, ((error, text), weights) in enumerate(launch(functools.partial(_before_the_first_write, kind), size)):
        assert error == ("MemoryError" if rank == FAILING else "InvalidArgumentError")
        assert "out of memory" in text
        assert rank == FAILING or f"rank 1: {kind.__name__}.step() has failed" in text
        assert "a part" not in text
        assert weights == expected


def _after_a_write(kind: Callable[..., Any], rank: int) -> Any:
    with etp.init_group(timeout=20) as group:
        model = _sharded(group)
        saved = {name: value.clone() for name, value in built().state_dict().items()}
        optimizer = kind(model.parameters(), rank)
        loss_of(model, rank).backward()
        found = [_refused(optimizer.step), _refused(optimizer.step), _refused(lambda: loss_of(model, rank))]
        found.append(_refused(torch.optim.SGD(model.parameters(), lr=1).step))
        model.load_state_dict(saved)
        optimizer.zero_grad()
        loss_of(model, rank).backward()
        optimizer.step()
        return found, _weights(model)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [FailsLate, FailsLateOnRows, FailsLateByData])
def test_a_step_that_has_written_part_is_refused_until_a_state_is_loaded(size: int, kind: Any) -> None:
    expected = _expected(size)
    for rank, (found, weights) in enumerate(launch(functools.partial(_after_a_write, kind), size)):
        (error, text), *later = found
        assert error == ("MemoryError" if rank == FAILING else "InvalidArgumentError")
        assert "out of memory" in text and "had written a part" in text and "load_state_dict()" in text
        for error, text in later:
            assert error == "InvalidArgumentError"
            assert "emb.weight is damaged" in text and f"{kind.__name__}.step()" in text and "out of memory" in text
        assert weights == expected


def _behind_writes_of_others(rank: int) -> Any:
    with etp.init_group(timeout=20) as group:
        model = _sharded(group)
        optimizer = FailsInTheSecondStep(model.parameters(), rank)
        loss_of(model, rank).backward()
        optimizer.step()
        found = [_refused(optimizer.step), _refused(lambda: loss_of(model, rank)), _refused(optimizer.step)]
        model.load_state_dict(built().state_dict())
        optimizer.step()
        return found, _weights(model)


def test_what_other_ranks_have_written_is_refused_by_the_one_that_failed() -> None:
    expected = _expected(2)
    for rank, (found, weights) in enumerate(launch(_behind_writes_of_others, 2)):
        (error, text), *later = found
        assert error == ("MemoryError" if rank == FAILING else "InvalidArgumentError")
        assert ("had written a part" in text) == (rank != FAILING)
        for error, text in later:
            assert error == "InvalidArgumentError"
            assert "emb.weight is damaged" in text and "rank 1: FailsInTheSecondStep.step() has failed" in text
        assert weights == expected


def _in_a_closure(behind_the_backward: bool, rank: int) -> Any:
    with etp.init_group(timeout=20) as group:
        model = _sharded(group)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
        fails = Once()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, rank)
            if rank == FAILING and not behind_the_backward and fails.now():
                raise MemoryError("out of memory")
            loss.backward()
            if rank == FAILING and behind_the_backward and fails.now():
                raise MemoryError("out of memory")
            return loss

        refused = _refused(lambda: optimizer.step(closure))
        optimizer.step(closure)
        return refused, _weights(model)


@pytest.mark.parametrize("behind_the_backward", [False, True])
def test_a_closure_that_fails_on_one_rank_is_told_to_all(behind_the_backward: bool) -> None:
    found = launch(functools.partial(_in_a_closure, behind_the_backward), 2)
    assert [error for (error, _), _ in found] == ["InvalidArgumentError", "MemoryError"]
    assert all("out of memory" in text for (_, text), _ in found)
    assert found[0][1] == found[1][1]


def _in_a_hook(first: bool, rank: int) -> Any:
    """Before the first step of the optimiser, or a later one."""
    with etp.init_group(timeout=20) as group:
        model = _sharded(group)
        optimizer = torch.optim.AdamW(model.parameters())
        refused = []
        fails = Once()

        def hook(*_: Any) -> None:
            if rank == FAILING and fails.now():
                raise MemoryError("out of memory")

        if first:
            optimizer.register_step_pre_hook(hook)
        for step in range(3):
            loss_of(model, rank).backward()
            refused.append(_refused(optimizer.step)[1] if step == (0 if first else 1) else optimizer.step() or "")
            optimizer.zero_grad()
            if step == 0 and not first:
                handle = optimizer.register_step_pre_hook(hook)
        if not first:
            handle.remove()
            assert not optimizer._optimizer_step_pre_hooks
        return refused, _weights(model)


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_before_a_step_that_fails_on_one_rank_is_told_to_all(first: bool) -> None:
    found = launch(functools.partial(_in_a_hook, first), 2)
    failed = 0 if first else 1
    for rank, (refused, weights) in enumerate(found):
        assert [bool(text) for text in refused] == [step == failed for step in range(3)]
        assert "out of memory" in refused[failed]
        assert refused[failed].startswith("rank ") is (rank != FAILING)
        assert weights == found[0][1]


# --- ranks whose steps differ


class RandomStates(ByHand):
    """A state that each rank draws by itself, and a step that does not look at it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["noise"] = torch.empty_like(parameter).bernoulli_()


def _two_groups(parameters: list[torch.Tensor], rank: int) -> list[dict[str, Any]]:
    """Return groups that have other parameters on rank 0."""
    first, second = reversed(parameters) if rank == 0 else parameters
    return [{"params": [first]}, {"params": [second], "lr": 0.2}]


def _drop_one(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.up.weight.grad = None


def _delete_one(model: Any, optimizer: torch.optim.Optimizer) -> None:
    del model.up.weight.grad


# Ways in which a rank drops gradients between two backwards of one step.
DROPPED: dict[str, Callable[[Any, torch.optim.Optimizer], None]] = {
    "a gradient that is dropped": _drop_one,
    "a gradient that is deleted": _delete_one,
    "gradients that are dropped": lambda model, optimizer: optimizer.zero_grad(),
}


def _different(what: str, rank: int) -> Any:
    with etp.init_group(timeout=20) as group:
        model = _sharded(group)
        parameters = list(model.parameters())
        torch.manual_seed(rank)
        kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "a learning rate, on rows": lambda: torch.optim.AdamW(parameters, lr=0.1 + rank),
            "a learning rate": lambda: ByHand(parameters, lr=0.1 + rank),
            "a state": lambda: RandomStates(parameters),
            "a frozen weight": lambda: torch.optim.SGD(parameters, lr=0.1, foreach=True),
            "an unkept promise": lambda: Normalised(parameters),
            "a promise of states that cannot be cut": lambda: LowBit(parameters),
            "other weights": lambda: torch.optim.SGD([two[rank == 0]], lr=0.1),
            "other weights, by hand": lambda: ByHand([two[rank == 0]], lr=0.1),
            "groups": lambda: torch.optim.SGD(_two_groups(two, rank), lr=0.1),
            "groups of biases": lambda: torch.optim.SGD(_two_groups([model.up.bias, model.norm.bias], rank), lr=0.1),
        }
        two = [model.up.weight, model.down.weight]
        optimizer = kinds.get(what, lambda: torch.optim.SGD(parameters, lr=0.1))()
        if what == "a frozen weight" and rank == 0:
            model.up.weight.requires_grad_(False)
        loss_of(model, rank).backward()
        if what in DROPPED:
            if rank == 0:
                DROPPED[what](model, optimizer)
            loss_of(model, rank + 5).backward()
        before = _weights(model)
        refused = _refused(optimizer.step)
        model.up.weight.requires_grad_(True)
        if what in ("a learning rate", "a state", "other weights, by hand"):
            used = _refused(lambda: loss_of(model, rank))[1]
            model.load_state_dict(built().state_dict())
        else:
            used = "" if _weights(model) == before else "written"
        model.zero_grad()
        loss_of(model, rank).backward()
        torch.optim.SGD(parameters, lr=0.1).step()
        loss_of(model, rank).backward()
        return refused, used


TEXTS = {
    "a learning rate, on rows": "AdamW.step() of sharded emb.weight and others: ranks 0 and 1 differ in a setting",
    "a frozen weight": "SGD.step(): up.weight is frozen on rank 0 and trained on rank 1: give all ranks the same",
    "a learning rate": "ByHand.step() has not written the same on ranks 0 and 1, first into sharded tensor emb.weight",
    "a state": "the state 'noise' of emb.weight would write different values",
    "an unkept promise": "allow_optimizer(Normalised) promises that its step treats every element by itself, and a "
    "step of emb.weight on the whole gives other values than one on rows, of the parameter",
    "a promise of states that cannot be cut": "the state 'momentum' of sharded emb.weight is Coded, of which there are "
    "no rows: leave allow_optimizer() out",
    "other weights": "in which parameters a group has",
    "other weights, by hand": "ByHand.step() has not written the same on ranks 0 and 1, first into sharded tensor",
    "groups": "in which parameters a group has",
    "groups of biases": "ranks 0 and 1 differ in parameters, or in a setting",
    **dict.fromkeys(DROPPED, "or in what was written into parameters, gradients or states"),
    "gradients that are dropped": "SGD.step(): the gradient of up.bias differs between ranks 0 and 1",
}


@pytest.mark.parametrize("what", TEXTS)
@pytest.mark.parametrize("size", SIZES)
def test_steps_that_differ_are_refused_on_all_ranks(what: str, size: int) -> None:
    for (_, text), used in launch(functools.partial(_different, what), size):
        assert TEXTS[what] in text
        assert used == "" or "weight is damaged" in used


UNKEPT: dict[str, tuple[Callable[..., bool], str, int]] = {
    "of large parameters": (lambda parameter, group, state: parameter.numel() > 4096, "emb.weight", 1),
    "of wide ones": (lambda parameter, group, state: parameter.shape[-1] == 80, "down.weight", 1),
    "of one group": (lambda parameter, group, state: group.get("trust", False), "down.weight", 1),
    "behind the first step": (lambda parameter, group, state: bool(state), "emb.weight", 2),
}


def _unkept(what: str, rank: int) -> Any:
    with etp.init_group(timeout=20) as group:
        model = _sharded(group)
        groups = [{"params": [model.emb.weight, model.up.weight]}, {"params": [model.down.weight], "trust": True}]
        optimizer = SometimesNormalised(groups, UNKEPT[what][0])
        for _ in range(UNKEPT[what][2] - 1):
            loss_of(model, rank).backward()
            optimizer.step()
        loss_of(model, rank).backward()
        before = _weights(model)
        texts = [_refused(optimizer.step)[1] for _ in range(3)]
        assert len(set(texts)) == 1, texts
        return texts[0], _weights(model) == before


@pytest.mark.parametrize("what", UNKEPT)
def test_a_promise_is_looked_at_for_each_kind_of_parameter(what: str) -> None:
    for text, kept in launch(functools.partial(_unkept, what), 2):
        assert f"a step of {UNKEPT[what][1]} on the whole gives other values" in text and kept


# --- what is told, and what a step leaves


def test_a_step_by_the_dispatcher_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Told(ByHand):
        pass

    model = etp.shard_module_(built(), etp.init_group(), formats={"up.weight": "f32"})
    optimizer = Told(model.parameters())
    for _ in range(2):
        loss_of(model, 0).backward()
        with caplog.at_level("INFO", logger="tessera"):
            optimizer.step()
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("Told.step() is not known to treat every element by itself") and "30 us" in text


def _kept_states(rank: int) -> Any:
    with etp.init_group(timeout=20) as group:
        model = _sharded(group)
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loss_of(model, rank).backward()
        optimizer.step()
        slow = optimizer.state[model.up.weight]["slow"]
        momentum = optimizer.base.state[model.up.weight]["momentum_buffer"]
        return [(type(each).__name__, tuple(each.shape), each.store.kept, each.store.name) for each in (slow, momentum)]


def test_states_are_kept_once_a_step_has_left_them() -> None:
    for slow, momentum in launch(_kept_states, 2):
        assert slow == ("LogicalTensor", (80, 32), True, "the state 'slow' of up.weight")
        assert momentum == ("LogicalTensor", (80, 32), True, "the state 'momentum_buffer' of up.weight")


def _nested(rank: int) -> Any:
    """Two optimisers in one wrapper, which has no parameters of its own but those of one of them."""
    with etp.init_group(timeout=20) as group:
        model = _sharded(group)
        first = torch.optim.SGD([model.up.weight], lr=0.1)
        second = torch.optim.Adafactor([model.emb.weight], lr=0.1)

        class Both(torch.optim.Optimizer):
            def __init__(self) -> None:
                super().__init__(first.param_groups, {})

            def step(self, closure: Any = None) -> None:
                first.step()
                second.step()

        optimizer = Both()
        loss_of(model, rank).backward()
        versions = [model.up.weight.etp.version, model.emb.weight.etp.version]
        optimizer.step()
        after = [model.up.weight.etp.version, model.emb.weight.etp.version]
        loss_of(model, rank)
        return [new - old for old, new in zip(versions, after, strict=True)], model.up.weight.etp.model.batch is None


def test_steps_within_a_step_are_a_part_of_it() -> None:
    for published, ended in launch(_nested, 2):
        assert published[1] == 1 and ended


def test_allow_optimizer_takes_classes() -> None:
    with pytest.raises(tessera.InvalidArgumentError, match="give a class of optimisers"):
        etp.allow_optimizer(Promised([torch.nn.Parameter(torch.ones(1))]))  # type: ignore[arg-type]


def test_plain_optimisers_are_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    ByHand([parameter]).step()
    assert torch.equal(parameter.detach(), torch.full((3,), 0.9))
