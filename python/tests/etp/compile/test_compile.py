"""A compiled model gives the bytes of plain torch that is not compiled."""

from __future__ import annotations

import functools
import pathlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import etp_compile_scenarios
import pytest
import tessera
import torch
from etp_compile_scenarios import OPTIONS, Called
from etp_generic_scenarios import ByHand
from etp_models import Run, Tied, adamw, as_bytes, batch, built, loss_of, on_ranks, plainly, scenarios_of
from tessera import etp
from torch._dynamo.utils import counters
from torch_ranks import launch

SCENARIOS = scenarios_of(vars(etp_compile_scenarios))


def _with(backend: str, scenario: Callable[[Run], Any], run: Run) -> Any:
    torch._dynamo.reset()
    etp_compile_scenarios.BACKEND["backend"] = backend
    return scenario(run)


@pytest.fixture(scope="module", params=["aot_eager", pytest.param("eager", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return on_ranks({name: functools.partial(_with, request.param, each) for name, each in SCENARIOS.items()}, 2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_are_those_of_plain_torch(found: dict[str, list[Any]], name: str) -> None:
    expected = plainly(SCENARIOS[name], 2)
    for rank in found[name]:
        assert rank == expected


def _alone(kind: Callable[[], torch.nn.Module]) -> Any:
    """Of one rank. What is not sharded has no format."""
    model = built(kind)
    names = [name for name, each in model.named_parameters() if each.dim() > 1 and each.numel() >= 256]
    return etp.shard_module_(model, etp.init_group(), {name.replace(".", r"\."): "f32" for name in names}, **OPTIONS)


def _broken(kind: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Plain torch with breaks at its modules."""
    plain = built(kind)
    for each in plain.modules():
        if isinstance(each, (torch.nn.Linear, torch.nn.Embedding)):
            each.forward = torch.compiler.disable(each.forward)
    return plain


def _compiled_in_steps(model: torch.nn.Module) -> list[int]:
    torch._dynamo.reset()
    called = torch.compile(model, backend="aot_eager")
    optimizer = adamw(model.parameters())
    seen = []
    for number in range(6):
        counters.clear()
        loss_of(called, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(counters["frames"]["ok"])
    return seen


@pytest.mark.parametrize("kind", [Tied, ByHand, Called])
def test_later_steps_compile_nothing(kind: Callable[[], torch.nn.Module]) -> None:
    first, _, *later = _compiled_in_steps(_alone(kind))
    assert first >= 4  # it did compile
    # Up to torch 2.9 a method that waits for the argument of its call is another one in each step.
    assert later == (_compiled_in_steps(_broken(kind))[2:] if kind is not Called else [0] * 4)


@pytest.mark.parametrize("kind", [Tied, Called])
def test_what_lies_between_two_uses_is_compiled(kind: Callable[[], torch.nn.Module]) -> None:
    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def note(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append([getattr(node.target, "__name__", "") for node in module.graph.nodes if node.op != "placeholder"])
        return module.forward

    loss_of(torch.compile(_alone(kind), backend=note), 0)
    assert any("gelu" in graph for graph in graphs)


@pytest.mark.parametrize("kind", [Tied, ByHand])
def test_one_graph_is_refused_with_the_reason(kind: Callable[[], torch.nn.Module]) -> None:
    torch._dynamo.reset()
    called = torch.compile(_alone(kind), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
        called(batch(0)[0])


def test_compiled_autograd_is_refused_by_name() -> None:
    torch._dynamo.reset()
    model = _alone(Tied)
    loss = loss_of(model, 0)
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match="compiled autograd"),  # of this package, or torch's own (2.9)
    ):
        loss.backward()


def test_a_thread_compiles() -> None:
    """The compiler keeps settings by thread."""
    torch._dynamo.reset()
    model, plain = _alone(ByHand), built(ByHand)
    called = torch.compile(model, backend="eager")
    found = []
    thread = threading.Thread(target=lambda: found.append(as_bytes(called(batch(0)[0]))))
    thread.start()
    thread.join()
    assert found == [as_bytes(plain(batch(0)[0]))]


def _layers(rank: int) -> list[bytes]:
    """With and without the compiler."""
    torch._dynamo.reset()
    found = []
    for compiles in (False, True):
        with etp.init_group(timeout=60) as group:
            torch.manual_seed(0)
            parts: list[torch.nn.Module] = [
                etp.Embedding(203, 32, etp_group=group),
                etp.LayerNormLinear(32, 32, etp_group=group),
                torch.nn.GELU(),
                etp.LayerNormMLP(32, 64, etp_group=group),
                etp.Linear(32, 203, etp_group=group),
            ]
            model = etp.shard_module_(torch.nn.Sequential(*parts), group)
            called = torch.compile(model, backend="aot_eager") if compiles else model
            optimizer = adamw(model.parameters())
            for number in range(3):
                loss_of(called, 2 * number + rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(b"".join(as_bytes(etp.whole(each)) for each in model.parameters()))
    return found


def test_layers_that_are_constructed_sharded() -> None:
    for plain, compiled in launch(_layers, 2):
        assert compiled == plain


def _in_ddp(rank: int) -> list[bytes]:
    """Without the compiler, and with it outside and inside of the wrapper."""
    found = []
    with etp.init_group(timeout=60) as group:
        for way in ("plain", "outside", "inside"):
            model = etp.shard_module_(built(ByHand), group, **OPTIONS)
            called: Any = torch.compile(model, backend="aot_eager") if way == "inside" else model
            called = torch.nn.parallel.DistributedDataParallel(called)
            called = torch.compile(called, backend="aot_eager") if way == "outside" else called
            optimizer = adamw(model.parameters())
            for number in range(2):
                loss_of(called, 2 * number + rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(b"".join(as_bytes(etp.whole(each)) for each in model.parameters()))
            etp.unshard_(model)
            assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    return found


def test_in_distributed_data_parallel() -> None:
    for plain, *compiled in launch(_in_ddp, 2):
        assert compiled == [plain, plain]


def _at_different_speeds(folder: pathlib.Path, limit: float, rank: int) -> str:
    """Rank 1 compiles until rank 0 waits for it: longer than that takes if `limit` is short."""
    there = folder / ("failed" if limit < 10 else "waits")

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        end = time.monotonic() + 120
        while rank == 1 and not there.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return module.forward

    group = etp.init_group(timeout=limit)
    model = etp.shard_module_(built(), group)
    try:
        loss = loss_of(torch.compile(model, backend=backend), rank)
        if rank == 0:
            (folder / "waits").touch()
        loss.backward()
    except tessera.Error as error:
        return str(error)
    finally:
        (folder / "failed").touch()
    return ""


def test_ranks_compile_at_different_speeds(tmp_path: pathlib.Path) -> None:
    assert launch(functools.partial(_at_different_speeds, tmp_path, 120), 2) == ["", ""]


def test_a_rank_that_compiles_for_too_long_is_named(tmp_path: pathlib.Path) -> None:
    waited, _ = launch(functools.partial(_at_different_speeds, tmp_path, 2), 2)
    assert re.search(r"waited 2(\.\d+)? s for rank 1 to end a backward", waited)


class Branches(torch.nn.Module):
    """Three layers of one input, which a graph makes and another one uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(203, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        self.head = torch.nn.Linear(32, 203)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        normed = self.norm(x)
        q, k, v = (part(normed) for part in self.parts)
        return self.head(x + torch.nn.functional.scaled_dot_product_attention(q, k, v) * normed.sigmoid())


def test_gradients_are_those_of_plain_torch_with_the_same_breaks() -> None:
    """Which may be others than without breaks: a graph adds gradients by itself."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    model, plain = _alone(Branches), _broken(Branches)
    for each in (model, plain):
        loss_of(torch.compile(each, backend="aot_eager"), 0).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.equal(etp.whole(ours.grad), theirs.grad)
