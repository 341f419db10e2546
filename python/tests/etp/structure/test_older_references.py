"""What a program has of a model's parameters from before shard_module_(): it goes on with the sharded ones."""

from __future__ import annotations

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
