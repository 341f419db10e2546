"""What a program has of a model's parameters from before shard_module_(): it goes on with the sharded ones."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tessera import InvalidArgumentError, etp
from torch.nn import functional as F
from torch_ranks import launch

MODES = ("deferred", "inline")
SIZE = 37


class Net(torch.nn.Module):
    """A look-up whose weight a list ties to the head, a recurrent layer, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = torch.nn.Embedding(SIZE, 33)
        self.rnn = torch.nn.GRU(33, 35, batch_first=True)
        self.up = torch.nn.Linear(35, 33)
        self.tied = [self.emb.weight]
        self.product = functools.partial(F.linear, weight=self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.product(self.rnn(self.emb(x))[0]) + self.up(self.rnn(self.emb(x))[0])
        return h @ self.tied[0].t()  # type: ignore[no-any-return]


def words(rank: int, number: int) -> torch.Tensor:
    return torch.randint(SIZE, (3, 4), generator=torch.Generator().manual_seed(10 * number + rank))


Loss = Callable[[Any, int], torch.Tensor]
Program = Callable[[Any, Callable[[], None], Callable[[int], None]], None]


def clipped(model: Any, shard: Callable[[], None], backward: Callable[[int], None]) -> None:
    parameters = list(model.parameters())
    shard()
    for number in range(2):
        backward(number)
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(parameter.grad)
                parameter.grad = None


def frozen(model: Any, shard: Callable[[], None], backward: Callable[[int], None]) -> None:
    named = dict(model.named_parameters())
    shard()
    named["up.weight"].requires_grad_(False)
    named["emb.weight"].data.clamp_(-0.5, 0.5)
    optimizer = torch.optim.SGD([each for each in named.values() if each.requires_grad], lr=0.1)
    for number in range(2):
        backward(number)
        optimizer.step()
        optimizer.zero_grad()


def older_optimizer(model: Any, shard: Callable[[], None], backward: Callable[[int], None]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shard()
    for number in range(3):
        backward(number)
        optimizer.step()
        optimizer.zero_grad()


def optimizer_that_has_stepped(model: Any, shard: Callable[[], None], backward: Callable[[int], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():  # the same on all ranks, as they train apart before
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    shard()
    for number in range(2):
        backward(number)
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS: list[Program] = [clipped, frozen, older_optimizer, optimizer_that_has_stepped]


def _compared(rank: int, program: Program, mode: str) -> list[str]:
    group = etp.init_group(timeout=60)
    size = group.size
    results = []
    for is_sharded in (True, False):
        model: Any = Net()

        def shard(model: Any = model, is_sharded: bool = is_sharded) -> None:
            if is_sharded:
                etp.shard_module_(model, group, min_elements=64, mode=mode)

        def backward(number: int, model: Any = model, is_sharded: bool = is_sharded) -> None:
            ranks = [rank] if is_sharded else range(size)
            losses = [model(words(each, number)).square().mean() for each in ranks]
            (sum(losses) / len(losses)).backward()

        program(model, shard, backward)
        results.append({name: etp.whole(each).detach() for name, each in model.named_parameters()})
    group.close()
    return [name for name, value in results[1].items() if not torch.allclose(results[0][name], value, atol=2e-5)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_what_was_taken_before_is_sharded(program: Program, size: int, mode: str) -> None:
    assert launch(functools.partial(_compared, program=program, mode=mode), size) == [[]] * size


def _on_meta(rank: int) -> list[bool]:
    group = etp.init_group(timeout=60)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(33, SIZE), torch.nn.LayerNorm(SIZE), torch.nn.Linear(SIZE, 35))
    parameters = list(model.parameters())
    torch.manual_seed(3)
    etp.shard_module_(model, group, min_elements=64)
    same = [before is now and not now.is_meta for before, now in zip(parameters, model.parameters(), strict=True)]
    model(torch.full((2, 33), rank + 1.0)).square().sum().backward()
    same += [parameter.grad is not None for parameter in parameters]
    group.close()
    return same


def test_parameters_on_the_meta_device_stay_the_same_objects() -> None:
    for same in launch(_on_meta, 2):
        assert len(same) == 12 and all(same), same


def _older_graph(rank: int, mode: str) -> str:
    group = etp.init_group(timeout=60)
    model = torch.nn.Linear(33, SIZE)
    torch.manual_seed(3)
    model.reset_parameters()
    loss = model(torch.full((2, 33), rank + 1.0)).sum()
    etp.shard_module_(model, group, min_elements=64, mode=mode)
    with pytest.raises(InvalidArgumentError) as caught:
        loss.backward()
    model(torch.full((2, 33), rank + 1.0)).sum().backward()
    assert etp.whole(model.weight.grad).shape == model.weight.shape
    group.close()
    return str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_of_a_graph_from_before_is_refused_by_name(mode: str) -> None:
    for text in launch(functools.partial(_older_graph, mode=mode), 2):
        assert text.startswith("a backward reaches weight as it was before shard_module_()")


def _unsharded(rank: int, mode: str) -> list[str]:
    group = etp.init_group(timeout=60)
    model = torch.nn.Linear(33, SIZE)
    torch.manual_seed(3)
    model.reset_parameters()
    etp.shard_module_(model, group, min_elements=64, mode=mode)
    weight, loss = model.weight, model(torch.full((2, 33), rank + 1.0)).sum()
    etp.unshard_(model)
    texts = []
    for call in (lambda: weight.norm(), lambda: F.linear(torch.ones(2, 33), weight), loss.backward):
        with pytest.raises(InvalidArgumentError) as caught:
            call()  # type: ignore[no-untyped-call]
        texts.append(str(caught.value))
    model(torch.ones(2, 33)).sum().backward()
    group.close()
    return texts


@pytest.mark.parametrize("mode", MODES)
def test_what_was_sharded_before_unshard_is_refused_by_name(mode: str) -> None:
    for texts in launch(functools.partial(_unsharded, mode=mode), 2):
        assert all("weight" in text and "etp.unshard_() has made its model whole" in text for text in texts), texts


def floats(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(9 * number + rank))


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = (torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).tanh()))  # type: ignore[no-any-return]


def share(model: Pair) -> None:
    model.b.weight.data = model.a.weight.data


def share_transposed(model: Pair) -> None:
    model.b.weight.data = model.a.weight.data.t()


def share_a_part(model: Pair) -> None:
    model.b.weight.data = torch.cat([model.a.weight.data, torch.zeros(1, SIZE)])
    model.a.weight.data = model.b.weight.data[1:]
    model.b.weight.data = model.b.weight.data[:SIZE]


def share_with_a_buffer(model: Pair) -> None:
    model.register_buffer("copy", model.a.weight.data)


def _sharing(rank: int, tie: Callable[[Pair], None], late: bool) -> tuple[list[bool], list[str]]:
    group = etp.init_group(timeout=60)
    size = group.size
    results = []
    for is_sharded in (True, False):
        model: Any = Pair()
        if not late:
            tie(model)
        if is_sharded and late:
            etp.shard_module_(model, group, min_elements=64)
        elif is_sharded:
            with pytest.warns(UserWarning, match="share memory as several tensors: they stay whole"):
                etp.shard_module_(model, group, min_elements=64)
        if late:
            torch.manual_seed(5)
            model.a, model.b = (torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
            tie(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            optimizer.zero_grad()
            xs = [
                torch.randn(4, SIZE, generator=torch.Generator().manual_seed(9 * number + each)) for each in range(size)
            ]
            losses = [model(xs[each]).square().sum() for each in ([rank] if is_sharded else range(size))]
            (sum(losses) / len(losses)).backward()
            optimizer.step()
        named = [*model.named_parameters(), *model.named_buffers()]
        results.append([etp.whole(each).detach().clone() for _, each in named])
        if is_sharded:
            sharded = [name for name, each in named if isinstance(each, etp.LogicalTensor)]
    group.close()
    return [torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True)], sharded


@pytest.mark.filterwarnings("ignore:.*share memory")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("tie", [share, share_transposed, share_a_part, share_with_a_buffer], ids=lambda e: e.__name__)
def test_parameters_that_share_memory_go_on_sharing_it(tie: Callable[[Pair], None], late: bool) -> None:
    for same, sharded in launch(functools.partial(_sharing, tie=tie, late=late), 2):
        assert all(same)
        assert set(sharded) == {"c.weight"} | ({"b.weight"} if tie is share_with_a_buffer else set())


def _part(rank: int) -> str:
    group = etp.init_group(timeout=60)
    model: Any = Pair()
    etp.shard_module_(model, group, min_elements=64)
    x = torch.full((2, SIZE), rank + 1.0)
    model.b.weight = torch.nn.Parameter(model.a.weight.data[:33])
    model.c = torch.nn.Linear(33, SIZE)
    with pytest.raises(InvalidArgumentError) as caught:
        model(x)
    model.b.weight = torch.nn.Parameter(model.b.weight.data.clone())
    torch.manual_seed(4)
    model.c = torch.nn.Linear(33, SIZE)
    old, model.a = model.a, torch.nn.Linear(SIZE, SIZE)
    torch.manual_seed(4)
    model.a.reset_parameters()
    model.b.weight = torch.nn.Parameter(old.weight.data[:33])  # of a layer that has left
    model(x).sum().backward()
    group.close()
    return str(caught.value)


def test_a_parameter_of_a_part_of_another_one_is_refused_by_name() -> None:
    for text in launch(_part, 2):
        assert text.startswith("b.weight is made of a part of a.weight, whose memory it would share"), text


def _copies(rank: int) -> list[float]:
    group = etp.init_group(timeout=60)
    model = Pair()
    etp.shard_module_(model, group, min_elements=64)
    before = etp.whole(model.a.weight).clone()
    with torch.no_grad():
        for copied in (
            copy.copy(model.a.weight),
            copy.copy(model.a.weight.data),
            copy.copy(model.state_dict()["a.weight"]),
        ):
            copied.mul_(2)
    same = torch.equal(etp.whole(model.a.weight), 8 * before)
    kinds = isinstance(copy.copy(model.a.weight), torch.nn.Parameter)
    group.close()
    return [same, kinds]


def test_a_shallow_copy_shares_memory() -> None:
    assert launch(_copies, 2) == [[True, True]] * 2


def _copied_amid(rank: int) -> list[bool]:
    """Copy a layer while another part of the model has what ranks are yet to make equal, as loading an adapter does."""
    group = etp.init_group(timeout=60)
    model: Any = Pair()
    etp.shard_module_(model, group, min_elements=64)
    torch.manual_seed(rank)
    model.b = torch.nn.Linear(SIZE, SIZE, bias=False)  # to be loaded
    copied = copy.deepcopy(model.c)
    model.b.load_state_dict({"weight": torch.eye(SIZE)})
    model(floats(rank, 0)).sum().backward()
    same = [torch.equal(etp.whole(copied.weight), etp.whole(model.c.weight)), model.b.weight.grad is not None]
    group.close()
    return same


def test_a_known_layer_is_copied_while_another_one_is_not_yet_equal() -> None:
    assert launch(_copied_amid, 2) == [[True, True]] * 2
