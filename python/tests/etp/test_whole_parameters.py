"""Parameters that every rank has whole (norms, biases) beside sharded ones: hooks, torch.autograd.grad() and closures
see what one process would, they are saved as plain ones, and ranks that treat them differently are told so by name."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_models import as_bytes, built
from tessera import etp
from torch_ranks import launch

Program = Callable[[Any, "Losses"], Any]
SIZES = (2, 3)


class Model(torch.nn.Module):
    """Two weights that are sharded, and a norm and biases that are not; one bias is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(24, 40)
        self.norm = torch.nn.LayerNorm(40)
        self.down = torch.nn.Linear(40, 24)
        self.extra = torch.nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor, uses_extra: bool = True) -> torch.Tensor:
        y = self.down(torch.tanh(self.norm(self.up(x))))
        return y * self.extra if uses_extra else y


class Losses:
    """The loss of this rank's inputs, or the mean over the inputs of all ranks."""

    def __init__(self, size: int, rank: int | None) -> None:
        self._size, self._rank = size, rank

    def __call__(self, model: Any, number: int = 0, **options: Any) -> torch.Tensor:
        if self._rank is not None:
            return self._of(model, self._rank, number, options)
        return sum(self._of(model, rank, number, options) for rank in range(self._size)) / self._size  # type: ignore[return-value]

    def _of(self, model: Any, rank: int, number: int, options: dict[str, Any]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randn(5, 24, generator=generator)
        extra = {"uses_extra": rank == 0} if options.get("on_rank_0") else {}
        return (model(x, **extra) - x).square().mean()


def _whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: etp.whole(each).detach().clone() for name, each in model.named_parameters()}


def gradients_of_biases(model: Any, loss: Losses) -> Any:
    """By torch.autograd.grad(), and a step by them."""
    parameters = [model.up.bias, model.norm.weight, model.norm.bias, model.extra]
    for step in range(3):
        gradients = torch.autograd.grad(loss(model, step), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
    return _whole(model)


def a_gradient_of_what_one_rank_uses(model: Any, loss: Losses) -> Any:
    gradients = torch.autograd.grad(loss(model, on_rank_0=True), [model.extra, model.up.bias], allow_unused=True)
    unused = torch.autograd.grad(loss(model), [model.up.bias, torch.nn.Parameter(torch.ones(1))], allow_unused=True)
    return [*gradients, unused[0], torch.tensor(unused[1] is None)]


def a_clamped_gradient(model: Any, loss: Losses) -> Any:
    """By hooks of tensors: one that was there before, one that goes, one that looks."""
    seen: dict[str, list[float]] = {name: [] for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        parameter.register_hook(lambda gradient: gradient * 100).remove()
        parameter.register_hook(lambda gradient, name=name: seen[name].append(float(gradient.detach().sum())))
    for step in range(2):
        loss(model, step).backward()
    return [*(etp.whole(each.grad) for each in model.parameters()), torch.tensor(list(seen.values()))]


def hooks_of_several(model: Any, loss: Losses) -> Any:
    """One hook for weights, whole parameters and what no backward reaches."""
    seen: list[torch.Tensor] = []
    unused = torch.ones(1, requires_grad=True)

    def look(gradients: Any) -> None:
        assert gradients[-1] is None
        seen.extend(etp.whole(each).detach().clone() for each in gradients[:-1])

    parameters = [*model.parameters(), unused]
    handle = torch.autograd.graph.register_multi_grad_hook(parameters, look)
    any_of = torch.autograd.graph.register_multi_grad_hook(parameters, lambda _: seen.append(torch.ones(1)), mode="any")
    for step in range(2):
        loss(model, step).backward()
    handle.remove()
    any_of.remove()
    loss(model, 2).backward()
    assert len(seen) == 2 * len(parameters)
    return sorted(seen, key=lambda each: (each.shape, float(each.sum())))


def hooks_by_unbound_methods(model: Any, loss: Losses) -> Any:
    seen: list[torch.Tensor] = []
    for each in model.parameters():
        torch.Tensor.register_hook(each, lambda gradient: gradient * 3)
        torch.Tensor.register_post_accumulate_grad_hook(each, lambda p: seen.append(etp.whole(p.grad).detach().clone()))
    loss(model).backward()
    return sorted(seen, key=lambda each: (each.shape, float(each.sum())))


def a_line_search(model: Any, loss: Losses) -> Any:
    """Step an optimiser that has whole parameters only."""
    optimizer = torch.optim.LBFGS([model.up.bias, model.down.bias], max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(model)
        found.backward()
        return found

    losses = [float(optimizer.step(closure).detach()) for _ in range(2)]
    return [*_whole(model).values(), torch.tensor(losses)]


def an_inner_step(model: Any, loss: Losses) -> Any:
    """MAML: gradients through a step of all parameters."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    inner = torch.autograd.grad(loss(model, 1), parameters, create_graph=True)
    moved = {name: p - 0.1 * g for name, p, g in zip(names, parameters, inner, strict=True)}
    outer = loss(lambda x: torch.func.functional_call(model, moved, (x,)), 2)
    return [etp.whole(each) for each in torch.autograd.grad(outer, parameters)]


def a_penalty_of_gradients(model: Any, loss: Losses) -> Any:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss(model), parameters, create_graph=True)
    penalty = sum(each.square().sum() for each in gradients)
    (loss(model, 1) + penalty).backward()
    return [etp.whole(each.grad) for each in parameters]


DEFERRED: dict[str, Program] = {
    each.__name__: each
    for each in (
        gradients_of_biases,
        a_gradient_of_what_one_rank_uses,
        a_clamped_gradient,
        hooks_of_several,
        hooks_by_unbound_methods,
        a_line_search,
    )
}
INLINE = {**DEFERRED, **{each.__name__: each for each in (an_inner_step, a_penalty_of_gradients)}}


def _hooked() -> Any:
    model = built(Model)
    for parameter in (model.up.bias, model.norm.weight):
        parameter.register_hook(lambda gradient: gradient * 2)
    return model


def _runs(size: int, rank: int) -> Any:
    with etp.init_group(timeout=60) as group:
        return {
            (mode, name): program(etp.shard_module_(_hooked(), group, mode=mode, min_elements=256), Losses(size, rank))
            for mode, programs in (("deferred", DEFERRED), ("inline", INLINE))
            for name, program in programs.items()
        }


@pytest.fixture(scope="module", params=SIZES)
def runs(request: pytest.FixtureRequest) -> tuple[int, list[Any]]:
    return request.param, launch(functools.partial(_runs, request.param), request.param)


def _listed(found: Any) -> list[torch.Tensor]:
    return list(found.values() if isinstance(found, dict) else found)


@pytest.mark.parametrize(
    ("mode", "name"), [("deferred", name) for name in DEFERRED] + [("inline", name) for name in INLINE]
)
def test_values_are_those_of_one_process(runs: tuple[int, list[Any]], mode: str, name: str) -> None:
    size, ranks = runs
    expected = _listed(INLINE[name](_hooked(), Losses(size, None)))
    for rank in ranks:
        for value, right in zip(_listed(rank[mode, name]), expected, strict=True):
            torch.testing.assert_close(value.detach(), right.detach(), rtol=1e-3, atol=2e-5)
    for other in ranks[1:]:
        assert [as_bytes(each) for each in _listed(other[mode, name])] == [
            as_bytes(each) for each in _listed(ranks[0][mode, name])
        ]


# --- dtypes that the runtime does not add


class Spectral(torch.nn.Module):
    """A layer in the space of frequencies, and a scale in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(24, 64)
        self.modes = torch.nn.Parameter(torch.randn(5, 8, dtype=torch.complex64))
        self.scale = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.late = torch.nn.Parameter(torch.ones(1, dtype=torch.complex128), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(self.up(x).view(-1, 8, 8)) * self.modes.T
        y = torch.fft.irfft(frequencies, 8).flatten(1)[:, :24] * self.scale.prod().float()
        return y + self.late.abs().sum().float() * y.mean()


def _spectral(model: Any, loss: Losses, clip: Callable[..., Any]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = []
    model.modes.register_hook(lambda gradient: gradient * 2)
    model.scale.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for step in range(4):
        model.late.requires_grad_(step > 1)
        loss(model, 2 * step).backward()
        loss(model, 2 * step + 1).backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    copied = copy.deepcopy(model)
    loss(copied, 9).backward()
    found = {"seen": torch.stack(seen[1::2]), "copied": copied.modes.grad}
    model.load_state_dict(copied.state_dict())
    return {**_whole(model), **found}


def _spectral_runs(size: int, rank: int) -> Any:
    with etp.init_group(timeout=60) as group:
        return {
            (mode, clip.__module__): _spectral(
                etp.shard_module_(built(Spectral), group, mode=mode, min_elements=256), Losses(size, rank), clip
            )
            for mode in ("deferred", "inline")
            for clip in (etp.clip_grad_norm_, torch.nn.utils.clip_grad_norm_)
        }


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_other_dtypes_are_trained(size: int) -> None:
    plain = built(Spectral)
    expected = _spectral(plain, Losses(size, None), torch.nn.utils.clip_grad_norm_)
    ranks = launch(functools.partial(_spectral_runs, size), size)
    for rank in ranks:
        for case, found in rank.items():
            for name, right in expected.items():
                torch.testing.assert_close(found[name], right, rtol=1e-4, atol=1e-6)
                assert torch.equal(found[name], ranks[0][case][name])


# --- what ranks do differently


class ByHand(torch.optim.Optimizer):
    """A step that goes by the dispatcher."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad


def _written(model: Any, rank: int) -> None:
    with torch.no_grad():
        model.up.bias.add_(rank)


def _permuted(model: Any, rank: int) -> None:
    with torch.no_grad():
        model.norm.weight.copy_(torch.arange(40.0).roll(rank))


def _without_gradient(model: Any, rank: int) -> None:
    if rank == 0:
        model.norm.bias.grad = None


def _exchanged(model: Any, rank: int) -> None:
    """Give one gradient to one or the other of two parameters of one shape."""
    first, second = model.norm.weight, model.norm.bias
    gradient = torch.ones_like(first)
    first.grad, second.grad = (gradient, None) if rank == 0 else (None, gradient)


def _sparse(model: Any, rank: int) -> None:
    model.norm.bias.grad = (model.norm.bias.grad.detach() * (1 + rank)).to_sparse()


def _clipped(model: Any, rank: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.down.bias, 1e-9 * (1 + rank))


def _frozen(model: Any, rank: int) -> None:
    if rank == 0:
        model.norm.weight.requires_grad_(False)


def _frozen_weight(model: Any, rank: int) -> None:
    if rank == 0:
        model.up.weight.requires_grad_(False)


def _loaded(model: Any, rank: int) -> None:
    state = {name: etp.whole(each).clone() for name, each in model.state_dict().items()}
    state["down.bias"] += rank
    model.load_state_dict(state)


def _written_in_an_update(model: Any, rank: int) -> None:
    with etp.update(model), torch.no_grad():
        model.extra.mul_(1 + rank)


DIFFERENCES: dict[str, tuple[Callable[[Any, int], None], str]] = {
    "a write": (_written, "up.bias differs between ranks 0 and 1, and is no sharded tensor, but whole on every rank"),
    "the same values elsewhere": (_permuted, "norm.weight differs between ranks 0 and 1"),
    "no gradient": (_without_gradient, "the gradient of norm.bias differs between ranks 0 and 1"),
    "a gradient of another parameter": (_exchanged, "the gradient of norm.weight differs between ranks 0 and 1"),
    "a sparse gradient": (_sparse, "the gradient of norm.bias differs between ranks 0 and 1"),
    "a clipped gradient": (_clipped, "the gradient of down.bias differs between ranks 0 and 1"),
    "a frozen norm": (_frozen, "norm.weight is frozen on rank 0 and trained on rank 1"),
    "a frozen weight": (_frozen_weight, "up.weight is frozen on rank 0 and trained on rank 1"),
    "a loaded bias": (_loaded, "down.bias differs between ranks 0 and 1"),
    "an update": (_written_in_an_update, "extra differs between ranks 0 and 1"),
}
STEPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "rows": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "dispatcher": lambda model: ByHand(model.parameters(), lr=0.1),
    "whole ones only": lambda model: torch.optim.Adam([each for each in model.parameters() if each.dim() == 1]),
}


def _differ(size: int, rank: int) -> Any:
    found = {}
    loss = Losses(size, rank)
    with etp.init_group(timeout=60) as group:
        for what, (program, _) in DIFFERENCES.items():
            for kind, make in STEPS.items():
                model = etp.shard_module_(built(Model), group, min_elements=256)
                optimizer = make(model)
                loss(model).backward()
                program(model, rank)
                before = [as_bytes(etp.whole(each)) for each in model.parameters()]
                with pytest.raises(tessera.MismatchError) as caught:
                    optimizer.step()
                assert [as_bytes(etp.whole(each)) for each in model.parameters()] == before, (what, kind)
                model.requires_grad_(True)  # the way out
                model.load_state_dict(built(Model).state_dict())
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
                found[what, kind] = str(caught.value), [as_bytes(etp.whole(each)) for each in model.parameters()]
    return found


@pytest.fixture(scope="module")
def differences() -> list[Any]:
    return launch(functools.partial(_differ, 2), 2)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_named_before_a_step(differences: list[Any], what: str, kind: str) -> None:
    for rank in differences:
        text, after = rank[what, kind]
        assert DIFFERENCES[what][1] in text and ".step(): " in text and "no weight was written" in text
        assert after == differences[0][what, kind][1]


# --- files, and what is beside a model


def _saved(rank: int) -> Any:
    with etp.init_group(timeout=60) as group:
        model = etp.shard_module_(_hooked(), group, min_elements=256)
        model.up.bias.tag = "mine"
        stream = io.BytesIO()
        torch.save(list(model.parameters()), stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        one = pickle.loads(pickle.dumps(model.up.bias))
        assert type(one) is torch.nn.Parameter and vars(one).keys() == {"tag"}
        assert torch.equal(copy.deepcopy(model.up.bias), one)
        etp.unshard_(model)
        assert all(not {"register_hook", "__reduce_ex__"} & vars(each).keys() for each in model.parameters())
        Losses(1, 0)(model).backward()
        return [as_bytes(each) for each in loaded], model.up.bias.grad


def test_they_are_saved_as_plain_parameters_and_get_their_hooks_back() -> None:
    plain = _hooked()
    Losses(1, 0)(plain).backward()
    for loaded, gradient in launch(_saved, 2):
        assert loaded == [as_bytes(each) for each in plain.parameters()]
        torch.testing.assert_close(gradient, plain.up.bias.grad)


def _beside(averages: bool, rank: int) -> list[str]:
    head = built(lambda: torch.nn.Linear(24, 3))
    table = torch.nn.Embedding(3, 3, sparse=True)
    loss = Losses(2, rank)
    with etp.init_group(timeout=60) as group, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = etp.shard_module_(built(Model), group, min_elements=256)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters(), *table.parameters()], lr=0.1)
        for step in range(2):
            loss(lambda x: head(model(x)).mean() + x, step).backward()
            table(torch.tensor([1])).sum().backward()  # alike, and sparse
            for parameter in head.parameters() if averages else ():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if "whole beside" in str(each.message)]


@pytest.mark.parametrize("averages", [True, False])
def test_gradients_beside_a_model_that_nobody_adds_are_warned_of(averages: bool) -> None:
    for told in launch(functools.partial(_beside, averages), 2):
        assert len(told) == (0 if averages else 1)
        assert all("SGD holds 3 parameters, the first of shape (3, 24)" in text for text in told)
