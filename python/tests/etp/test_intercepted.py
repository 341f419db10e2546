"""Programs that have their own word in torch's functions: functions that they replace, modes, classes of tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from tessera import etp
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_ranks import launch

MODES = ("deferred", "inline")
WORDS, SIZE = 41, 37


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = torch.nn.Embedding(WORDS, 33)
        self.up = torch.nn.Linear(33, SIZE)
        self.norm = torch.nn.LayerNorm((4, SIZE))  # whose weight has two dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(self.emb(x) if x.dtype is torch.int64 else x))  # type: ignore[no-any-return]


Loss = Callable[[Any, int], torch.Tensor]


def words(rank: int) -> torch.Tensor:
    return torch.randint(WORDS, (3, 4), generator=torch.Generator().manual_seed(rank))


def floats(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, 33, generator=torch.Generator().manual_seed(rank))


@contextmanager
def replaced(where: Any, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, by(before))
    try:
        yield
    finally:
        setattr(where, name, before)


def doubled(function: Any) -> Any:
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def counted(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        call.count += 1  # type: ignore[attr-defined]
        return function(*args, **kwargs)

    call.count = 0  # type: ignore[attr-defined]
    return call


def _function(where: Any, name: str) -> Loss:
    def loss(model: Any, rank: int) -> torch.Tensor:
        with replaced(where, name, doubled):
            return model(words(rank)).square().mean()  # type: ignore[no-any-return]

    return loss


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func in (F.linear, F.embedding) else result


def in_mode(model: Any, rank: int) -> torch.Tensor:
    with Doubles():
        return model(words(rank)).square().mean()  # type: ignore[no-any-return]


def on_a_device(model: Any, rank: int) -> torch.Tensor:
    with torch.device("cpu"):
        return model(words(rank)).square().mean()  # type: ignore[no-any-return]


class DoublesProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) else result


def in_mode_of_the_dispatcher(model: Any, rank: int) -> torch.Tensor:
    x, later = words(rank), floats(rank).transpose(0, 1)  # of which one is not contiguous
    with DoublesProducts():
        flat = F.linear(model.emb(x).flatten(0, 1), model.up.weight)
        return model(x).square().mean() + flat.square().mean() + model.up(later).sum()  # type: ignore[no-any-return]


class Marked(torch.Tensor):
    """Keeps its class."""


class Doubling(torch.Tensor):
    """Doubles products, by what torch's own `__torch_function__` makes of them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result.mul(2) if func is F.linear else result


def of_a_class(model: Any, rank: int) -> torch.Tensor:
    out = model(floats(rank).as_subclass(Doubling))
    assert type(out) is Doubling
    return out.as_subclass(torch.Tensor).square().mean()


def of_a_class_that_does_nothing(model: Any, rank: int) -> torch.Tensor:
    x = floats(rank).as_subclass(Marked)
    made = (
        model(x),
        F.linear(x, model.up.weight),
        x[0, 0] + model.up.weight[:1, :33],
        torch.cat([model.up.weight, x[0]]),
    )
    assert [type(each) for each in made] == [Marked] * 4
    return sum(each.as_subclass(torch.Tensor).square().mean() for each in made)  # type: ignore[return-value]


class Wrapped:
    """What is no tensor, and takes part in torch's functions."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.tensor if isinstance(value, Wrapped) else value

        return Wrapped(func(*map(plain, args), **{name: plain(each) for name, each in (kwargs or {}).items()}))


def wrapped(model: Any, rank: int) -> torch.Tensor:
    return model.up(Wrapped(floats(rank))).tensor.square().mean()  # type: ignore[no-any-return]


def once(model: Any, rank: int) -> torch.Tensor:
    names = ("linear", "embedding", "layer_norm", "normalize")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced(F, name, counted))
        loss = model(words(rank)).square().mean() + F.normalize(model.up.weight).sum()
        counts = [getattr(F, name).count for name in names]
    assert counts == [1, 1, 1, 1], counts
    return loss  # type: ignore[no-any-return]


LOSSES: dict[str, Loss] = {
    "F.linear": _function(F, "linear"),
    "F.embedding": _function(F, "embedding"),
    "F.layer_norm": _function(F, "layer_norm"),
    "nn.Linear.forward": _function(torch.nn.Linear, "forward"),
    "nn.Embedding.forward": _function(torch.nn.Embedding, "forward"),
    **{
        loss.__name__: loss
        for loss in (
            in_mode,
            on_a_device,
            in_mode_of_the_dispatcher,
            of_a_class,
            of_a_class_that_does_nothing,
            wrapped,
            once,
        )
    },
}


def _compared(rank: int, mode: str) -> list[str]:
    group = etp.init_group(timeout=60)
    size, wrong = group.size, []
    for name, loss in LOSSES.items():
        model: Any = Net()
        plain = copy.deepcopy(model)
        etp.shard_module_(model, group, min_elements=64, mode=mode)
        own, losses = loss(model, rank), [loss(plain, each) for each in range(size)]
        same = [torch.allclose(own, losses[rank], rtol=1e-4)]
        own.backward()
        (sum(losses) / size).backward()
        named = dict(plain.named_parameters())
        for key, parameter in model.named_parameters():
            wanted = named[key].grad
            assert (parameter.grad is None) == (wanted is None)
            same.append(wanted is None or torch.allclose(etp.whole(parameter.grad), wanted, rtol=1e-3, atol=1e-5))
        wrong += [] if all(same) else [f"{name}: {same}"]
    group.close()
    return wrong


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3])
def test_who_has_a_word_in_torchs_functions_has_it(size: int, mode: str) -> None:
    assert launch(functools.partial(_compared, mode=mode), size) == [[]] * size
