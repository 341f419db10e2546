"""What cannot be adopted, copied or carried back is refused by name, on all ranks, and the group goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from tessera import etp
from torch_ranks import launch


def built() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))


def step(model: Any, rank: int) -> None:
    model(batch(rank)).square().mean().backward()


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(tessera.Error) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def layer(seed: int, outputs: int = 64) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(64, outputs)


def _adopted(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)
        plain = model[2]

        def refused(name: str, new: Any) -> None:
            model[2] = new
            found[name] = error_of(lambda: step(model, rank))
            found[name + ", again"] = error_of(lambda: step(model, rank))
            model[2] = plain
            step(model, rank)
            model.zero_grad()

        refused("values", layer(rank))
        refused("shapes", layer(1, 64 + rank))
        refused("dtype", layer(1).to(torch.float8_e4m3fn))
        refused("on one rank", layer(1) if rank == 0 else torch.nn.Sequential(layer(1)))
        refused("lazy", torch.nn.LazyLinear(64))
        frozen = layer(1)
        frozen.weight.requires_grad_(rank == 0)
        refused("frozen on one rank", frozen)
        half = torch.nn.Parameter(model[0].weight)  # the memory of a weight that is there, too
        model.twin = half
        found["memory"] = error_of(lambda: step(model, rank))
        del model.twin
        step(model, rank)
    return found


def test_what_cannot_be_adopted_is_named_on_all_ranks() -> None:
    results = launch(_adopted, 2)
    for rank, found in enumerate(results):
        for part in ("2.weight has come to the model", "differs between ranks 0 and 1", "broadcast"):
            assert part in found["values"]
        assert "2.weight has come to the model as" in found["shapes"] and "(65, 64)" in found["shapes"]
        assert "2.weight" in found["dtype"] and "torch.float8_e4m3fn" in found["dtype"]
        assert "ranks 0 and 1 have changed the model in different ways" in found["on one rank"]
        assert "2.weight" in found["lazy"] and "lazy" in found["lazy"]
        assert "2.weight" in found["frozen on one rank"]
        assert "twin has the memory of 0.weight" in found["memory"], rank
        for name, text in found.items():
            if ", again" in name:
                assert text == found[name.removesuffix(", again")]


class Packed(torch.Tensor):
    """A wrapper as torchao's and bitsandbytes' are: it knows few operations."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type[Packed], inner: torch.Tensor) -> Packed:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return type(args[0])(args[0].inner)
        raise NotImplementedError(f"Packed: {func}")


class Opaque(Packed):
    """One that does not tell what it is made of."""

    __tensor_flatten__ = None  # type: ignore[assignment]


def _values(name: str, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    drawn = torch.randn(64, 64)
    if name == "packed":
        return Packed(drawn)
    if name == "opaque":
        return Opaque(drawn)
    if name == "quantised":
        return torch.quantize_per_tensor(drawn, 0.1, 0, torch.qint8)
    return drawn > 0 if name == "bool" else (drawn * 8).to(getattr(torch, name))


_FOREIGN = [
    *("packed", "opaque", "quantised", "int8", "uint8", "int64", "bool", "float8_e4m3fn", "float8_e5m2"),
    *("float64", "complex64"),
]  # kinds of frozen parameters


def _foreign(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=20) as group:
        for name in _FOREIGN:
            model = built()
            model.extra = torch.nn.Parameter(_values(name, 1), requires_grad=False)
            etp.shard_module_(model, group)
            found[name, "is left as it is"] = not isinstance(model.extra, etp.LogicalTensor)
            step(model, rank)
            model.late = torch.nn.Parameter(_values(name, 2), requires_grad=False)
            step(model, rank)
            if name != "opaque":
                model.other = torch.nn.Parameter(_values(name, rank), requires_grad=False)
                found[name, "later"] = error_of(lambda model=model: step(model, rank))
                other = built()
                other.extra = torch.nn.Parameter(_values(name, rank), requires_grad=False)
                found[name, "at first"] = error_of(lambda other=other: etp.shard_module_(other, group))
        model = built()
        model.extra = torch.nn.Parameter(_values("float8_e4m3fn", 1), requires_grad=False)
        etp.shard_module_(model, group)
        model.extra.requires_grad_(True)
        found["released"] = error_of(lambda: step(model, rank))
        other = built()
        other.extra = torch.nn.Parameter(_values("float8_e4m3fn", 1))
        found["trained"] = error_of(lambda: etp.shard_module_(other, group))
    return found


def test_frozen_parameters_of_any_kind_stay_whole() -> None:
    for found in launch(_foreign, 2):
        for name in _FOREIGN:
            assert found[name, "is left as it is"]
            if name != "opaque":
                assert "other has come to the model" in found[name, "later"], found[name, "later"]
                assert "extra differs between ranks" in found[name, "at first"]
        assert "extra" in found["released"] and "float8" in found["released"]
        assert "extra" in found["trained"] and "float8" in found["trained"]


def _summoned(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group)
        before = [etp.whole(each).detach() for each in (model[0].weight, model[2].weight)]

        def within(name: str, change: Callable[[], object]) -> None:
            def enter() -> None:
                with etp.summon(model):
                    change()

            found[name] = error_of(enter)
            now = [etp.whole(each) for each in (model[0].weight, model[2].weight)]
            found[name + ": as before"] = all(map(torch.equal, now, before))
            step(model, rank)
            model.zero_grad()

        within("values", lambda: model[0].weight.data.add_(rank))
        within("one element", lambda: model[2].weight.data[-1, -1].mul_(1 + rank))
        within("rank 0 alone", lambda: rank or model[0].weight.data.zero_())
        within("replaced alone", lambda: rank or setattr(model[0], "weight", torch.nn.Parameter(torch.ones(64, 64))))
        new = torch.nn.Parameter(torch.ones(64 + rank, 64))
        within("replaced by other shapes", lambda: setattr(model[0], "weight", new))
        within("replaced by other values", lambda: setattr(model[2], "weight", torch.nn.Parameter(before[1] + rank)))
        within("another shape by .data", lambda: setattr(model[0].weight, "data", torch.ones(64 + rank, 64)))
        within("a gradient", lambda: step(model, rank))

        def fail() -> None:
            if rank == 0:
                raise tessera.InvalidArgumentError("no room on the disk")

        within("an error of one rank", fail)
    return found


def test_different_writes_within_summon_are_refused() -> None:
    for rank, found in enumerate(launch(_summoned, 2)):
        replaced = ("replaced by other shapes", "replaced by other values", "another shape by .data")
        for name in ("values", "one element", "rank 0 alone", "replaced alone", *replaced):
            assert "weight was written or replaced within summon(), and not alike on ranks 0 and 1" in found[name], name
            assert found[name + ": as before"], name
        assert "weight has got a gradient within summon()" in found["a gradient"]
        assert "no room on the disk" in found["an error of one rank"]
        assert rank == 0 or "rank 0" in found["an error of one rank"]


def _copied(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with etp.init_group(timeout=20) as group:
        model = etp.shard_module_(built(), group, formats={"0.weight": "nvfp4", ".*weight": "bf16"})
        second = copy.deepcopy(model)
        found["format"] = second[0].weight.etp.format
        found["other memory"] = second[0].weight.etp is not model[0].weight.etp
        step(second, rank)
        found["gradients"] = [each.grad is None for each in model.parameters()]
        model.late = layer(1)
        step(model, rank)
        model[2] = layer(2)
        step(model, rank)
        found["late"] = model.late.weight.etp.format, model[2].weight.etp.format
        linear = etp.Linear(64, 64, etp_group=group)
        found["constructed"] = error_of(lambda: copy.deepcopy(linear))
        with etp.summon(model):
            third = copy.deepcopy(model)
        found["plain"] = [type(each).__name__ for each in third.parameters()]
    return found


def test_copies() -> None:
    for found in launch(_copied, 2):
        assert found["format"] == "nvfp4" and found["other memory"] and all(found["gradients"])
        assert found["late"] == ("bf16", "bf16")
        assert "constructed sharded" in found["constructed"]
        assert set(found["plain"]) == {"Parameter"}
