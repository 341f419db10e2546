"""A rank reads gradients alone while the others go on: what it reads is what the last backward has left."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from etp_generic_scenarios import Experts
from etp_models import Tied, as_bytes, built, loss_of
from tessera import etp
from torch_ranks import launch

Parameters = list[torch.nn.Parameter]
STEPS = 4


def _gradients(parameters: Parameters) -> list[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def _one_by_one(parameters: Parameters) -> None:
    for gradient in _gradients(parameters):
        gradient.mul_(0.5)


def _as_a_list(parameters: Parameters) -> None:
    torch._foreach_mul_(_gradients(parameters), 0.5)


def _clamped(parameters: Parameters) -> None:
    torch.nn.utils.clip_grad_value_(parameters, 1e-3)


def _assigned(parameters: Parameters) -> None:
    for each in parameters:
        assert each.grad is not None
        each.grad = torch.nan_to_num(each.grad) * 2
        each.grad.add_(each.grad)


def _assigned_plain(parameters: Parameters) -> None:
    for number, each in enumerate(parameters):
        each.grad = torch.full(each.shape, 0.01 * number, dtype=each.dtype)


def _hooked(parameters: Parameters) -> None:
    for each in parameters:
        if not (each._backward_hooks or {}):
            each.register_hook(lambda gradient: gradient * 0.5)


CHANGES: dict[str, Callable[[Parameters], None]] = {
    "accumulated": lambda parameters: None,
    "one by one": _one_by_one,
    "a list": _as_a_list,
    "clamped": _clamped,
    "assigned": _assigned,
    "assigned, plain": _assigned_plain,
    "hooks": _hooked,
}


def _read(parameters: Parameters) -> list[Any]:
    """Whole values, and results of operations."""
    found: list[Any] = []
    for each in parameters:
        assert each.grad is not None
        found += [as_bytes(each.grad), float(each.grad.norm()), float((each.grad * 2).abs().max())]
    return found


def _trained(
    change: Callable[[Parameters], None],
    parameters: Parameters,
    backward: Callable[[int], None],
    optimizer: torch.optim.Optimizer,
    read: Callable[[], None],
) -> None:
    for number in range(STEPS):
        for micro in range(2):
            backward(2 * number + micro)
            read()
        change(parameters)
        read()
        optimizer.step()
        read()
        optimizer.zero_grad(set_to_none=number % 2 == 0)


def _alone(rank: int, size: int, kind: Any, what: str, reader: int | None, inline: bool, dtype: Any) -> list[Any]:
    """Without a reader, all ranks read once all have come."""
    with etp.init_group(timeout=30) as group:
        mode = "inline" if inline else "deferred"
        model = etp.shard_module_(built(kind).to(dtype), group, reduction="sum", min_elements=256, mode=mode)
        parameters = [each for each in model.parameters() if isinstance(each, etp.LogicalTensor)]
        found: list[Any] = []

        def read() -> None:
            if reader is None:
                group.core.exchange("all have come", b"")
                found.append(_read(parameters))
            elif rank == reader:
                time.sleep(0.01)  # the others are ahead
                found.append(_read(parameters))

        _trained(
            CHANGES[what],
            parameters,
            lambda number: loss_of(model, number * size + rank).backward(),
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            read,
        )
        return found


def _plain(size: int, kind: Any, what: str, dtype: Any) -> list[Any]:
    torch.set_num_threads(1)
    model = built(kind).to(dtype)
    parameters = [each for each in model.parameters() if each.numel() >= 256]
    found: list[Any] = []
    _trained(
        CHANGES[what],
        parameters,
        lambda number: [loss_of(model, number * size + each).backward() for each in range(size)] and None,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda: found.append(_read(parameters)),
    )
    return found


@pytest.mark.parametrize(
    ("size", "kind", "what", "reader", "inline", "dtype"),
    [
        *[(2, Tied, what, 0, False, torch.float32) for what in CHANGES if what != "hooks"],
        *[(3, Tied, what, 2, False, torch.float32) for what in ("accumulated", "one by one", "a list", "assigned")],
        (2, Experts, "accumulated", 1, False, torch.float32),
        (3, Experts, "a list", 0, False, torch.float32),
        (2, Tied, "accumulated", 1, False, torch.bfloat16),
        (2, Tied, "accumulated", 0, True, torch.float32),
        (3, Tied, "one by one", 1, True, torch.float32),
    ],
)
def test_one_rank_reads_gradients_alone(size: int, kind: Any, what: str, reader: int, inline: bool, dtype: Any) -> None:
    run = functools.partial(_alone, size=size, kind=kind, what=what, inline=inline, dtype=dtype)
    found = launch(functools.partial(run, reader=reader), size)[reader]
    if inline or dtype is torch.bfloat16:  # sums are rounded in another order than in one process
        expected = launch(functools.partial(run, reader=None), size)[reader]
    else:
        expected = _plain(size, kind, what, dtype)
    assert len(found) == len(expected) == 4 * STEPS
    for place, (values, right) in enumerate(zip(found, expected, strict=True)):
        assert values == right, place


def _clipped(rank: int, by: str, size: int) -> Any:
    """Norms that clip are sums of all ranks' in an order of their own: what one rank reads is what all have."""
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group, reduction="sum", min_elements=256)
        parameters = [each for each in model.parameters() if isinstance(each, etp.LogicalTensor)]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        alone, together = [], []
        for number in range(STEPS):
            loss = loss_of(model, number * size + rank)
            (scaler.scale(loss) if by == "scaler" else loss).backward()
            if by == "scaler":
                scaler.unscale_(optimizer)
                scaler.update()
            elif by == "torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            elif by == "torch, foreach":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2, foreach=True)
            else:
                etp.clip_grad_norm_(model.parameters(), 1e-2)
            if rank == 0:
                alone.append(_read(parameters))
            group.core.exchange("clipped", b"")
            together.append(_read(parameters))
            optimizer.zero_grad()
        return alone, together


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("by", ["etp", "torch", "torch, foreach", "scaler"])
def test_one_rank_reads_what_clipping_has_left(by: str, size: int) -> None:
    (alone, _), *others = launch(functools.partial(_clipped, by=by, size=size), size)
    for _, together in others:
        assert alone == together


def _hooks(rank: int) -> Any:
    """Post-accumulate hooks run where the backward has ended; tensor hooks, on all ranks, before."""
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group, reduction="sum", min_elements=256)
        weight, read = model.up.weight, []
        weight.register_hook(lambda gradient: gradient * 0.5)
        if rank == 1:
            weight.register_post_accumulate_grad_hook(lambda parameter: read.append(float(parameter.grad.norm())))
        for number in range(8):
            loss_of(model, 2 * number + rank).backward()
            if rank == 1:
                read.append(float(weight.grad.norm()))
            if number % 3 == 2:
                model.zero_grad()
        return read


def test_hooks_of_one_rank_read_gradients() -> None:
    _, read = launch(_hooks, 2)
    torch.set_num_threads(1)
    model = built()
    expected = []
    model.up.weight.register_hook(lambda gradient: gradient * 0.5)
    for number in range(8):
        for rank in range(2):
            loss_of(model, 2 * number + rank).backward()
        expected += [float(model.up.weight.grad.norm())] * 2
        if number % 3 == 2:
            model.zero_grad()
    assert read == pytest.approx(expected, rel=1e-5)


def _places(rank: int) -> list[int]:
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group, reduction="sum", min_elements=256)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for number in range(4):
            loss_of(model, 2 * number + rank).backward()
            etp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(etp.local(model.up.weight.grad).data_ptr())
            optimizer.zero_grad()
        return found


def test_memory_of_gradients_is_used_again() -> None:
    for places in launch(_places, 2):
        assert len(set(places)) == 1


def _held(rank: int) -> Any:
    """What a program still has of a gradient keeps its values."""
    with etp.init_group(timeout=30) as group:
        model = etp.shard_module_(built(), group, reduction="sum", min_elements=256)
        held = []
        for number in range(4):
            loss_of(model, 2 * number + rank).backward()
            gradient = model.up.weight.grad
            rows = etp.local(gradient)
            kept = {0: gradient, 1: rows, 2: rows.view(-1), 3: rows.numpy()}[number]
            held.append((kept, rows.clone()))
            del gradient, rows, kept
            model.zero_grad()
        for kept, values in held:
            now = etp.local(kept) if isinstance(kept, etp.LogicalTensor) else torch.as_tensor(kept)
            assert torch.equal(now.reshape(values.shape), values)
        first = held[0][0]
        return as_bytes(first) if rank == 1 else None


def test_what_is_held_of_a_gradient_keeps_its_values() -> None:
    _, read = launch(_held, 2)
    torch.set_num_threads(1)
    model = built()
    for rank in range(2):
        loss_of(model, rank).backward()
    assert read == as_bytes(model.up.weight.grad)


def _differently(rank: int) -> Any:
    with etp.init_group(timeout=5) as group:
        model = etp.shard_module_(built(), group, reduction="sum", min_elements=256)
        loss_of(model, rank).backward()
        found = []
        for call in (
            lambda: model.up.weight.grad.mul_(rank + 1),
            lambda: torch._foreach_mul_([model.up.weight.grad, model.down.weight.grad], rank + 1.0),
        ):
            before = etp.local(model.up.weight.grad).clone()
            with pytest.raises(tessera.InvalidArgumentError) as caught:
                call()
            assert torch.equal(etp.local(model.up.weight.grad), before)
            found.append(str(caught.value))
        if rank == 0:
            float(model.up.weight.grad.norm())
        return found


def test_writes_that_differ_are_refused_before_they_are_made() -> None:
    for texts in launch(_differently, 2):
        for text in texts:
            assert "would write different values" in text


def _not_made(rank: int) -> str:
    with etp.init_group(timeout=6) as group:
        model = etp.shard_module_(built(), group, reduction="sum", min_elements=256)
        loss_of(model, rank).backward()
        model.up.weight.etp.model.states._timeout = 1
        text = ""
        if rank == 0:
            model.up.weight.grad = model.up.weight.grad * 2
            model.up.weight.grad.store.recipe = None  # or it would be made again of what both have
            with pytest.raises(tessera.DeadlineExceededError) as caught:
                float(model.up.weight.grad.norm())
            text = str(caught.value)
        return text


def test_a_gradient_that_another_rank_has_not_is_named_at_the_deadline() -> None:
    text = launch(_not_made, 2)[0]
    assert "the rows of sharded tensor the gradient of up.weight: rank 1 has not ended its backward pass, or" in text
