"""Training loops that people write by hand around gradients: assigned ones, copies, hooks that keep them, steps that
make them."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tessera import etp
from torch_ranks import launch

MODES = ("deferred", "inline")
SIZE = 37


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = torch.nn.Linear(33, SIZE), torch.nn.Linear(SIZE, 35)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())  # type: ignore[no-any-return]


class Run:
    """One model, and losses of the ranks that it is trained by: this one's, or all ranks' in a plain process."""

    def __init__(self, model: Any, ranks: list[int], size: int) -> None:
        self.model, self.ranks, self.size = model, ranks, size

    def loss(self, number: int) -> torch.Tensor:
        inputs = [torch.randn(4, 33, generator=torch.Generator().manual_seed(9 * number + each)) for each in self.ranks]
        total = sum(self.model(x).square().mean() for x in inputs)
        return total / len(self.ranks)  # type: ignore[no-any-return]


def pulled_back(run: Run) -> list[float]:
    """Move towards where it was, with decay and clipping by hand."""
    model, norms = run.model, []
    before = {name: parameter.detach().clone() * 0.5 for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for name, parameter in model.named_parameters():
            parameter.grad = parameter.data - before[name]
            with torch.no_grad():
                parameter.mul_(0.5)
            norms.append(float(parameter.grad.norm()))
            parameter.grad.mul_(0.1 / parameter.grad.norm())
        optimizer.step()
    return norms


def read_again_and_again(run: Run) -> None:
    """Assign what was computed, and read it at once, on all ranks."""
    for parameter in run.model.parameters():
        for number in range(150):
            value = parameter.detach() * 0.5
            parameter.grad = value.clone()
            parameter.grad.norm()
            value.norm()
            with torch.no_grad():
                parameter.mul_(1.0 + 1e-3 * (number % 3 - 1))


def taken_from_a_worker(run: Run) -> None:
    """Step a shared model by a worker's gradients, by torch's inner name of them."""
    model, worker = run.model, copy.deepcopy(run.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = Run(worker, run.ranks, run.size)
    for number in range(2):
        worker.zero_grad()
        other.loss(number).backward()
        for parameter, source in zip(model.parameters(), worker.parameters(), strict=True):
            parameter._grad = source.grad
            assert parameter._grad is not None and parameter.grad is not None
        optimizer.step()
        worker.load_state_dict(model.state_dict())


def kept_by_hooks(run: Run) -> list[float]:
    kept: list[torch.Tensor] = []
    for parameter in run.model.parameters():
        parameter.register_hook(lambda gradient: kept.append(gradient))
    return _stepped(run) + sorted(float(each.norm()) for each in kept[-4:])


def kept_by_a_hook_of_several(run: Run) -> list[float]:
    kept: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook(tuple(run.model.parameters()), lambda each: kept.extend(each))
    return _stepped(run) + sorted(float(each.norm()) for each in kept[-4:])


def written_by_hooks(run: Run) -> list[float]:
    kept: list[torch.Tensor] = []

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        kept.append(gradient.mul_(0.5))
        return gradient

    def halve_in_place(gradient: torch.Tensor) -> None:
        gradient.mul_(0.5)

    run.model.a.weight.register_hook(halve)
    run.model.b.weight.register_hook(halve_in_place)
    return _stepped(run)


def written_behind_gradients(run: Run) -> None:
    """Step each parameter in a hook behind its gradient."""

    def step(parameter: torch.Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)  # type: ignore[arg-type]
        parameter.grad = None

    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        run.loss(number).backward()


def _stepped(run: Run) -> list[float]:
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for number in range(3):
        run.loss(number).backward()
        if number != 1:  # else accumulated
            norms += [float(parameter.grad.norm()) for parameter in run.model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return norms


class Hessian(torch.optim.Optimizer):
    """Divides by an estimate of the Hessian's diagonal, which its step makes behind its first writes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._generator = torch.Generator().manual_seed(5)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        for parameter in parameters:
            self.state[parameter].setdefault("diagonal", torch.zeros_like(parameter))
            self.state[parameter]["diagonal"].zero_()
        with torch.no_grad():
            for parameter in parameters:
                parameter.data.mul_(0.99)
        signs = [torch.randint(0, 2, each.shape, generator=self._generator) * 2.0 - 1 for each in parameters]
        products = torch.autograd.grad([each.grad for each in parameters], parameters, signs)
        with torch.no_grad():
            for parameter, product, sign in zip(parameters, products, signs, strict=True):
                self.state[parameter]["diagonal"].add_((product * sign).abs())
                parameter.addcdiv_(parameter.grad, self.state[parameter]["diagonal"] + 1, value=-0.1)


def steps_that_differentiate(run: Run) -> None:
    optimizer = Hessian(run.model.parameters())
    for number in range(2):
        run.loss(number).backward(create_graph=True)
        optimizer.step()
        for parameter in run.model.parameters():
            parameter.grad = None


PROGRAMS: list[Callable[[Run], Any]] = [
    pulled_back,
    read_again_and_again,
    taken_from_a_worker,
    kept_by_hooks,
    kept_by_a_hook_of_several,
    written_by_hooks,
    written_behind_gradients,
]


def _compared(rank: int, programs: list[Callable[[Run], Any]], mode: str) -> list[str]:
    group = etp.init_group(timeout=60)
    size, wrong = group.size, []
    for program in programs:
        model, plain = Net(), Net()
        etp.shard_module_(model, group, min_elements=64, mode=mode)
        own = program(Run(model, [rank], size)) or []
        wanted = program(Run(plain, list(range(size)), size)) or []
        named = dict(plain.named_parameters())
        same = [torch.allclose(torch.tensor(own), torch.tensor(wanted), rtol=1e-3)]
        for name, parameter in model.named_parameters():
            same.append(torch.allclose(etp.whole(parameter), named[name], rtol=1e-3, atol=1e-5))
        wrong += [] if all(same) else [f"{program.__name__}: {same} {own} {wanted}"]
    group.close()
    return wrong


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3])
def test_the_loop_is_that_of_one_process(size: int, mode: str) -> None:
    assert launch(functools.partial(_compared, programs=PROGRAMS, mode=mode), size) == [[]] * size


def test_a_step_may_differentiate_behind_its_writes() -> None:
    programs: list[Callable[[Run], Any]] = [steps_that_differentiate]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of create_graph=True
        assert launch(functools.partial(_compared, programs=programs, mode="inline"), 2) == [[]] * 2


def _copied_alone(rank: int, mode: str) -> list[bool]:
    group = etp.init_group(timeout=20)
    model, plain = Net(), Net()
    etp.shard_module_(model, group, min_elements=64, mode=mode)
    same: list[bool] = []
    if rank == group.size - 1:
        copies = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        file = io.BytesIO()
        torch.save(copies, file)
        file.seek(0)
        saved, wanted = torch.load(file), plain.state_dict()
        same = [torch.equal(saved[name], wanted[name]) for name in wanted]
        same.append(float(model.a.weight.detach().clone().norm()) == float(plain.a.weight.norm()))
        same.append(torch.equal(model.a.weight.detach().clone() * 2, plain.a.weight.detach() * 2))
    group.core.exchange("the end", b"")
    group.close()
    return same


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_reads_copies_alone(mode: str) -> None:
    first, second = launch(functools.partial(_copied_alone, mode=mode), 2)
    assert first == [] and len(second) == 6 and all(second)


class Prompted(torch.nn.Module):
    """A sharded base, and what is trained beside it."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.prompt = torch.nn.Parameter(torch.zeros(4, 33))
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x + self.prompt)  # type: ignore[no-any-return]


def _beside(rank: int, wrapped: bool, trained: bool) -> list[str]:
    group = etp.init_group(timeout=60)
    base = etp.shard_module_(Net().requires_grad_(trained), group, min_elements=64)
    model = Prompted(base)
    run = Run(torch.nn.parallel.DistributedDataParallel(model) if wrapped else model, [rank], group.size)
    optimizer = torch.optim.SGD([model.prompt], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            run.loss(number).backward()
            optimizer.step()
            optimizer.zero_grad()
    group.close()
    return [str(each.message) for each in caught if "through the sharded" in str(each.message)]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_parameters_beside_a_sharded_model_are_warned_of(wrapped: bool, trained: bool) -> None:
    for texts in launch(functools.partial(_beside, wrapped=wrapped, trained=trained), 2):
        assert len(texts) == (0 if wrapped else 1)
        assert all(text.startswith("SGD holds 1 parameters, the first of shape (4, 33)") for text in texts)
