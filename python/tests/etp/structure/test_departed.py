"""Weights that leave a model: their rows are freed once no rank has them, and are right until then."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from tessera import etp
from torch.nn import functional as F
from torch_ranks import launch

SIZE = 64
HEAD = 128  # rows of a head


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = torch.nn.Linear(SIZE, SIZE)
        self.head: Any = torch.nn.Linear(SIZE, HEAD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.a(x).relu())  # type: ignore[no-any-return]


def batch(rank: int, number: int = 0) -> torch.Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(10 * number + rank))


def head(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(SIZE, HEAD)


def train(model: Any, rank: int, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        optimizer.zero_grad()
        model(batch(rank, number)).square().mean().backward()
        optimizer.step()


def shard_bytes(model: Any) -> int:
    """Count what the runtime holds of weights here: rows, and what is published of them."""
    report = etp.report(model)
    return report.shard_bytes + report.publication_bytes


def without_collector(program: Callable[..., Any], *arguments: Any) -> Any:
    """Run a program without Python's collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        return program(*arguments)
    finally:
        gc.enable()


# --- memory


def sizes_over(model: Any, rank: int, replacements: int, replace: Callable[[int], None]) -> list[int]:
    """Train, and return what the runtime holds before each replacement."""
    sizes = []
    for seed in range(replacements):
        train(model, rank)
        sizes.append(shard_bytes(model))
        replace(seed)
    return sizes


def _replaced(formats: dict[str, str] | None, rank: int) -> list[int]:
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(Net(), group, formats=formats)
        return sizes_over(model, rank, 6, lambda seed: setattr(model, "head", head(seed)))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("formats", [None, {"head.*": "mxfp8"}, {".*": "bf16"}])
def test_rows_of_replaced_layers_are_freed_without_the_collector(ranks: int, formats: dict[str, str] | None) -> None:
    for found in launch(functools.partial(without_collector, _replaced, formats), ranks):
        assert len(set(found)) == 1, found


def _inference(rank: int) -> list[int]:
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(Net(), group).requires_grad_(False).eval()
        found = []
        for seed in range(6):
            model(batch(rank))
            found.append(shard_bytes(model))
            model.head = head(seed).requires_grad_(False)
        return found


def test_a_program_without_steps_holds_two_generations_at_most() -> None:
    for found in launch(functools.partial(without_collector, _inference), 2):
        assert found[1:] == [found[1]] * 5 and found[1] <= found[0] + SIZE // 2 * HEAD * 4


def _resized(rank: int) -> list[int]:
    """As resize_token_embeddings() does, with and within summon()."""
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(Net(), group)
        train(model, rank)
        found = []
        for rows in (160, 192, 224, 224):
            with etp.summon(model):
                old = model.head.weight
                model.head.weight.data = torch.cat([old.data, torch.zeros(rows - len(old), SIZE)])
                model.head.bias.data = torch.zeros(rows)
                del old  # which becomes what has left
            train(model, rank)
            found.append(shard_bytes(model) - model.a.weight.numel() * 4 // 2)
        return found


def test_rows_of_grown_weights_are_freed() -> None:
    for found in launch(functools.partial(without_collector, _resized), 2):
        assert found == [rows // 2 * SIZE * 4 for rows in (160, 192, 224, 224)]


class Moe(torch.nn.Module):
    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = torch.nn.Linear(SIZE, SIZE)
        self.experts: Any = Experts(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.a(x))  # type: ignore[no-any-return]


class Experts(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Parameter(torch.randn(3, SIZE, SIZE) / 8)
        self.down = torch.nn.ModuleList([torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.down[e](F.linear(x, self.up[e])) for e in range(3))  # type: ignore[return-value]


def _experts(rank: int) -> list[int]:
    with etp.init_group(timeout=20) as group:
        lists = [[f"experts.down.{e}.weight" for e in range(3)]]
        model = etp.shard_module_(Moe(), group, experts=lists)
        sizes = sizes_over(model, rank, 4, lambda seed: setattr(model, "experts", Experts(seed)))
        model.experts.down[0] = torch.nn.Linear(SIZE, SIZE, bias=False)  # one of a list alone
        with torch.no_grad():
            model.experts.down[0].weight.fill_(0.5)
        train(model, rank)
        return sizes


def test_stacks_and_lists_of_experts_are_freed() -> None:
    for found in launch(functools.partial(without_collector, _experts), 2):
        assert len(set(found)) == 1


def _one_of_a_list(rank: int) -> bool:
    with etp.init_group(timeout=20) as group:
        lists = [[f"experts.down.{e}.weight" for e in range(3)]]
        model = etp.shard_module_(Moe(), group, experts=lists)
        plain = Moe()
        for each in (model, plain):
            torch.manual_seed(5)
            each.experts.down[1] = torch.nn.Linear(SIZE, SIZE, bias=False)
        for number in range(2):
            for each, one in ((model, rank), (plain, None)):
                ranks = range(2) if one is None else [one]
                for of in ranks:
                    (each(batch(of, number)).square().mean() / len(ranks)).backward()
                torch.optim.SGD(each.parameters(), 0.1).step()
                each.zero_grad()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return all(torch.allclose(etp.whole(ours), theirs, atol=1e-6) for ours, theirs in pairs)


def test_the_others_of_a_list_are_used_on() -> None:
    assert all(launch(_one_of_a_list, 2))


# --- who holds one


def _held(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(Net(), group)
        train(model, rank)
        both = shard_bytes(model) + HEAD // 2 * SIZE * 4
        held: Any = model.head.weight
        before = etp.whole(held).detach().clone()
        model.head = head(1)
        if rank == 1:
            held = None
        train(model, rank, 3)
        found["kept while a rank has it"] = shard_bytes(model) == both
        if rank == 0:  # alone
            found["read alone"] = torch.equal(etp.whole(held), before) and torch.equal(held.detach() + 0, before)
            view = held.data[3:5]
            held = None
            train_to = view
        else:
            found["read alone"], train_to = True, None
        train(model, rank, 3)
        found["kept for a view"] = shard_bytes(model) == both
        found["view"] = train_to is None or torch.equal(train_to + 0, before[3:5])
        train_to = view = None
        train(model, rank, 2)
        found["freed"] = shard_bytes(model) == both - HEAD // 2 * SIZE * 4
        rows = etp.local(model.head.weight)
        kept = rows.clone()
        model.head = head(2)
        train(model, rank, 3)
        found["rows"] = torch.equal(rows, kept)  # memory that a program holds is not given to others
        whole = etp.whole(model.head.weight)
        kept = whole.clone()
        model.head = head(3)
        train(model, rank, 3)
        found["whole"] = torch.equal(whole, kept)
    return found


def test_what_a_program_holds_stays() -> None:
    for found in launch(_held, 2):
        assert all(found.values()), found


def _trains_on(rank: int) -> tuple[list[torch.Tensor], bool]:
    """The old head is in a loss of the program's own, is stepped, and comes back."""
    ranks = 2
    with etp.init_group(timeout=20) as group:
        sharded = etp.shard_module_(Net(), group)
        results = []
        freed = True
        for model, own in ((sharded, [rank]), (Net(), range(ranks))):
            old = model.head
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            for phase in range(3):
                if phase == 1:
                    model.head = head(1)
                    optimizer.add_param_group({"params": list(model.head.parameters())})
                if phase == 2:
                    model.head = old
                for number in range(3):
                    optimizer.zero_grad()
                    for of in own:
                        hidden = model.a(batch(of, number)).relu()
                        value = model(batch(of, number)).square().mean() + F.linear(hidden, old.weight).abs().mean()
                        (value / len(own)).backward()
                    optimizer.step()
            results.append([etp.whole(p).detach().clone() for p in model.parameters()])
        before = shard_bytes(sharded)
        del optimizer, old, model
        gc.collect()
        train(sharded, rank)
        freed = shard_bytes(sharded) == before - HEAD // ranks * SIZE * 4
        ours, plain = results
        return [(a - b).abs().max() for a, b in zip(ours, plain, strict=True)], freed


def test_a_weight_outside_of_its_model_is_trained_and_comes_back() -> None:
    for differences, freed in launch(_trains_on, 2):
        assert max(differences) < 1e-6 and freed


def _dies_amid(rank: int) -> list[str]:
    """Rank 1 has no parameter by the time its gradient comes."""
    found = []
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(Net(), group)
        train(model, rank)
        for number in range(3):
            loss = model(batch(rank)).square().mean()
            model.head = head(number)
            held = model.head if rank == 0 else None
            (loss + model(batch(rank, 1)).square().mean()).backward()
            model.zero_grad()
            train(model, rank)
            found.append(shard_bytes(model))
        assert (held is None) == (rank == 1)
        whole = etp.whole(model.head.weight)
        return [str(len(set(found)) == 1), str(bool(torch.isfinite(whole).all()))]


def test_a_gradient_of_a_weight_that_has_gone_is_dropped() -> None:
    assert launch(_dies_amid, 2) == [["True", "True"]] * 2


def _returns(rank: int) -> dict[str, str]:
    found: dict[str, str] = {}
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(Net(), group)
        train(model, rank)
        old, new = model.head, head(1)
        model.head = new
        train(model, rank)
        model.head = old if rank == 0 else new
        with pytest.raises(tessera.Error) as caught:
            train(model, rank)
        found["on one rank"] = str(caught.value)
        model.head = old
        train(model, rank)
        model.head = new
        train(model, rank)
        return found


def test_a_weight_that_comes_back_on_one_rank_is_named() -> None:
    for found in launch(_returns, 2):
        assert "exchange 'a change of the model's parameters'" in found["on one rank"]


def _damaged(rank: int) -> tuple[str, str]:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for group in self.param_groups:
                    for number, each in enumerate(group["params"]):
                        each.add_(1)
                        if number == 2:
                            raise KeyError("a step that fails")

    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(Net(), group)
        model(batch(rank)).sum().backward()
        with pytest.raises(KeyError):
            Fails([model.head.weight, model.head.bias, model.a.bias], 0.1).step()
        with pytest.raises(tessera.Error) as used:
            model(batch(rank))
        old = model.head
        model.head = head(1)
        train(model, rank)  # the damaged one has left
        with pytest.raises(tessera.Error) as again:
            F.linear(batch(rank), old.weight)
        return str(used.value), str(again.value)


def test_a_damaged_weight_that_has_left_refuses_its_own_uses_only() -> None:
    for used, again in launch(_damaged, 2):
        assert "head.weight is damaged" in used and "head.weight is damaged" in again


def _ends(rank: int) -> bool:
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(Net(), group)
        train(model, rank)
        old = model.head.weight
        model.head = head(1)
        train(model, rank)
        wanted = [etp.whole(each).detach().clone() for each in model.parameters()]
        etp.unshard_(model)
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted, strict=True))
        del old
        gc.collect()
        return same


def test_a_model_is_unsharded_while_a_program_has_one_that_has_left() -> None:
    assert all(launch(_ends, 2))
