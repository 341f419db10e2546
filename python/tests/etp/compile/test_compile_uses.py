"""Compiled functions see of sharded parameters what they see without the compiler, and what plain torch gives: the
whole, in a forward and outside of it. One compiled function is used in both places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from etp_compile_uses import USES, Use
from etp_models import built
from tessera import etp
from torch_ranks import launch

OWN = ("its type", "what ETP knows")  # which plain torch has not
COMPILES_SPLIT = hasattr(torch._dynamo.config, "nontraceable_tensor_subclasses")  # p.split(): torch 2.6 does not


class Given(torch.nn.Module):
    """Its forward is whatever function it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3, 20, 32))
        self.v = torch.nn.Parameter(torch.randn(70, 32))
        self.use: Use | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.use is not None
        return self.use(self.w, self.v, x)


def _seen(model: Any, use: Use, inside: bool, graph: bool) -> str:
    x = torch.ones(())
    model.use = use
    with torch.set_grad_enabled(graph):
        try:
            return str(model(x) if inside else use(model.w, model.v, x))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _differences(rank: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    torch.set_printoptions(precision=8)
    with etp.init_group(timeout=60) as group:
        model, plain = etp.shard_module_(built(Given), group, min_elements=256), built(Given)
        for name, use in USES.items():
            torch._dynamo.reset()
            compiled = torch.compile(use, backend="eager")
            found[name] = []
            for place in [(inside, graph) for _ in range(2) for graph in (True, False) for inside in (False, True)]:
                expected, got = _seen(model, use, *place), _seen(model, compiled, *place)
                wanted = expected if name in OWN else _seen(plain, use, *place)
                found[name] += [(*place, wanted, expected, got)] if {expected, got} != {wanted} else []
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[Any]]]:
    return launch(_differences, 2)


@pytest.mark.parametrize("name", USES)
def test_compiled_uses_are_those_without_the_compiler(found: list[dict[str, list[Any]]], name: str) -> None:
    for rank in found:
        if name == "parts" and not COMPILES_SPLIT:
            assert [got.split(":")[0] for *_, got in rank[name]] == ["AssertionError"] * 8
        else:
            assert rank[name] == []
