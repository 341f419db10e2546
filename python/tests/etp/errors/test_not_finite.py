"""A value that is not finite, in a weight whose format has no such: an error of all ranks, behind which good values are
taken."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import tessera
import torch
from tessera import etp
from torch_ranks import launch


def built() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))


def text_of(call: Callable[[], object]) -> str:
    with pytest.raises(tessera.Error) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def _spoilt(formats: dict[str, str], native: list[str], rank: int) -> dict[str, list[str]]:
    """Rank 1 has the row with the value."""
    bad = torch.ones(96, 64)
    bad[90, 3] = math.inf
    found: dict[str, list[str]] = {}
    with etp.init_group(timeout=20) as group:
        for kind in ("step", "copy_", "data", "load", "update", "foreach"):
            plain = built()
            model = etp.shard_module_(built(), group, formats=formats, native=native)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)

            def train(model: Any, optimizer: Any) -> None:
                model(batch(rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            def updates(model: Any) -> None:
                with etp.update(model):
                    model[0].weight.data.copy_(bad)

            def steps(model: Any, optimizer: Any) -> None:
                model(batch(rank)).square().mean().backward()
                model[0].weight.grad[90, 3] = math.inf
                optimizer.step()

            weight = model[0].weight
            spoils: dict[str, Callable[[], Any]] = {
                "step": functools.partial(steps, model, optimizer),
                "copy_": lambda weight=weight: weight.data.copy_(bad),
                "data": functools.partial(setattr, weight, "data", bad),
                "load": functools.partial(model.load_state_dict, {**plain.state_dict(), "0.weight": bad}),
                "update": functools.partial(updates, model),
                "foreach": lambda weight=weight: torch._foreach_copy_([weight.data], [bad]),
            }
            texts = [text_of(spoils[kind]), text_of(lambda model=model: model(batch(rank)))]
            optimizer.zero_grad()
            model.load_state_dict(plain.state_dict())
            train(model, optimizer)
            weight.data.fill_(0.5)
            texts.append(text_of(lambda weight=weight: weight.data.copy_(bad)))
            weight.data.fill_(0.25)  # good values in its place
            texts.append(str(bool((etp.whole(weight) == 0.25).all())))
            train(model, optimizer)
            found[kind] = texts
    return found


@pytest.mark.parametrize("formats", [{".*weight": "mxfp8"}, {"0.*": "nvfp4"}], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("native", [[], ["0.weight"]], ids=["", "native"])
def test_values_that_are_not_finite_are_named_on_all_ranks(formats: dict[str, str], native: list[str]) -> None:
    for rank, found in enumerate(launch(functools.partial(_spoilt, formats, native), 2)):
        for kind, (first, used, again, good) in found.items():
            for text in (first, again):
                assert text.startswith("DataLossError") and "0.weight" in text, (kind, text)
                assert ("row 90" if rank == 1 else "rank 1") in text, (kind, text)
            assert "is damaged" in used and "has not been published" in used, (kind, used)
            assert good == "True", kind
