"""A rank of an engine in its own process: the worker's real code around a model of `loaders`, or around one of vLLM,
with faults on demand."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import traceback
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import stub_vllm
import torch
from fault_points import Faults
from loaders import LOADERS
from test_learned_maps import filled, tensors, values

MODELS = ("fused", "expert_parallel", "interleaved", "transposed", "repeated", "tied")  # fit 1, 2 and 4 ranks
LARGE, LARGE_SHAPE = "large", (2048, 2048)
BUILT = "interleaved."  # this part is built beside and swapped, the others are copied into place


class Place(NamedTuple):
    """Of a rank."""

    rank: int
    world: int
    port: int  # where the engine's ranks meet
    undo: bool
    patience: float  # seconds that votes wait
    model: str = ""  # folder of a model of vLLM; empty: Together; LARGE: Large


class Together(torch.nn.Module):
    """Models side by side, with a tensor that is derived from one of them."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.checkpoint: dict[str, Any] = {}
        for name in MODELS:
            loading = LOADERS[name](rank, world)
            self.add_module(name, loading.model)
            self.checkpoint |= {f"{name}.{each}": known for each, known in loading.checkpoint.items()}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            part, _, rest = name.partition(".")
            self.get_submodule(part).load_weights([(rest, tensor)])  # type: ignore[operator]

    def derive(self) -> torch.Tensor:
        return self.get_submodule("fused").qkv.detach().double().cumsum(0)  # type: ignore[union-attr]


class Large(torch.nn.Module):
    """One parameter of 16 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(LARGE_SHAPE), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)

    def derive(self) -> torch.Tensor:
        return self.weight[0].clone()


def made(place: Place) -> Any:
    model = Large() if place.model == LARGE else Together(place.rank, place.world)
    model.derived = model.derive()
    return model


def contents(number: int, model: str = "") -> dict[str, torch.Tensor]:
    """What a trainer sends as its `number`-th checkpoint."""
    if model == LARGE:
        return {"weight": torch.full(LARGE_SHAPE, float(number))}
    if not model:
        return values(Together(0, 1).checkpoint, 1000 * number)
    if pool := sorted(pathlib.Path(model).glob("contents-*.pt")):  # those whose tokens are known
        found: dict[str, torch.Tensor] = torch.load(pool[number % len(pool)])
        return found
    shapes = json.loads((pathlib.Path(model) / "shapes.json").read_text())
    seed = 1000 * number
    return {name: 0.1 * filled(shape, torch.bfloat16, seed + i) for i, (name, shape) in enumerate(shapes.items())}


class Built:
    """A Change: parameters that are made beside those that serve."""

    def __init__(self, model: Together, learned: Any, faults: Faults) -> None:
        self.model, self.learned, self.faults = model, learned, faults
        self.pieces = [piece for piece in learned.pieces if piece.parameter.startswith(BUILT)]
        self.made: dict[str, torch.nn.Parameter] = {}
        self.kept: dict[str, torch.nn.Parameter] = {}

    def build(self, staged: Mapping[str, torch.Tensor]) -> None:
        self.made = {}
        for name in {piece.parameter for piece in self.pieces}:
            live = self.model.get_parameter(name)
            made = self.made[name] = torch.nn.Parameter(torch.zeros_like(live), requires_grad=False)
            made.__dict__.update(live.__dict__)  # its loader
        for piece in self.pieces:
            self.faults.at("build")
            piece.install(self.made[piece.parameter].data, staged[self.learned.key(piece.source)])

    def _put(self, name: str, parameter: torch.nn.Parameter) -> None:
        module, _, last = name.rpartition(".")
        self.model.get_submodule(module)._parameters[last] = parameter

    def swap(self) -> None:
        for name, parameter in self.made.items():
            self.faults.at("swap")
            self.kept[name] = self.model.get_parameter(name)
            self._put(name, parameter)

    def undo(self) -> None:
        for name, parameter in self.kept.items():
            self.faults.at("undo")
            self._put(name, parameter)

    def drop(self) -> None:
        self.faults.at("drop")
        self.made, self.kept = {}, {}


class Copied:
    """A piece whose copy may fail."""

    def __init__(self, piece: Any, faults: Faults) -> None:
        self._piece, self._faults = piece, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._piece, name)

    def install(self, parameter: torch.Tensor, staged: torch.Tensor) -> None:
        self._faults.at("copy")
        self._piece.install(parameter, staged)

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        self._faults.at("copy")  # of an exchange
        found: torch.Tensor = self._piece.place(parameter)
        return found


def stub_worker(place: Place) -> Any:
    """What vLLM's worker has that matters here, around a model of `loaders`, and a test's methods besides."""
    stub_vllm.install(place.rank, place.world)
    from tessera import engines
    from tessera.engines.vllm import _joined, worker

    class Worker(worker.Extension):  # type: ignore[misc]
        def __init__(self) -> None:
            self.faults = Faults()
            self.model = made(place)
            self.vllm_config = stub_vllm.config()
            _joined.on_meta = engines.on_meta
            _joined.plan_of = self._plan
            self.weight_transfer_engine = worker.TesseraWeightTransferEngine(None, self.vllm_config, None, self.model)
            self.faults.around_worker()

        def _plan(self, model: Any, learned: Any, staged: Any, dtype: Any) -> Any:
            self.faults.at("plan")
            copied = [Copied(piece, self.faults) for piece in learned.pieces if not piece.parameter.startswith(BUILT)]
            return engines.Plan(copied, [Built(model, learned, self.faults)], [self._derive])

        def _derive(self) -> None:
            self.faults.at("refresh")
            self.model.derived = self.model.derive()

        def holds(self, number: int) -> str:
            """Empty if the weights are those that the loader leaves of contents(number); else those that are not."""
            model = made(place)
            if number:
                model.load_weights(contents(number, place.model).items())
            wanted, found = tensors(model), tensors(self.model)
            different = [name for name, each in wanted.items() if not torch.equal(each, found[name])]
            if not torch.equal(model.derive(), self.model.derived):
                different.append("derived")
            return " ".join(different)

    return Worker()


class Calls:
    """What the test's server calls in a worker."""

    def __init__(self, worker: Any, place: Place) -> None:
        from tessera import engines
        from tessera.engines.vllm import _joined as module

        self._worker, self._place = worker, place
        if place.undo:
            module.LiveWeights = lambda *a, **o: engines.LiveWeights(*a, **o, undo=True)
        module.StoreVote = lambda store, rank, world, _: engines.StoreVote(store, rank, world, place.patience)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def arm(self, rank: int, *fault: Any) -> None:
        if rank == self._place.rank:
            self._worker.faults.arm(*fault)

    def disarm(self) -> list[str]:
        found: list[str] = self._worker.faults.disarm()
        return found


def serve(connection: Connection, log: str, environment: dict[str, str], place: Place) -> None:
    """Answers calls, as a worker process of vLLM does: (worked, value)."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    meeting = f"tcp://127.0.0.1:{place.port}"
    if place.model not in ("", LARGE):
        import fault_vllm

        worker = fault_vllm.worker(place, meeting)
    else:
        if place.world > 1:
            torch.distributed.init_process_group("gloo", meeting, rank=place.rank, world_size=place.world)
        worker = stub_worker(place)
    calls = Calls(worker, place)
    connection.send((True, "ready"))
    while True:
        try:
            method, args, options = connection.recv()
        except EOFError:
            break
        try:
            connection.send((True, getattr(calls, method)(*args, **options)))
        except KeyboardInterrupt:  # the caller goes on
            connection.send((True, worker.weight_transfer_engine.status()))
        except Exception as error:
            traceback.print_exc()
            connection.send((False, f"{type(error).__name__}: {error}"))
    worker.weight_transfer_engine.shutdown()
    sys.exit(0)
