"""The tensor-parallel forward pass, and the swap of its weights between two requests.

Each rank has one thread that runs both, in the order that rank 0 gives: no collective crosses another, and all ranks
answer a request with the same version.
"""

import _thread
import pathlib
import queue
import statistics
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import check
import tessera
import torch
import torch.distributed as dist
from model import embed, untrained
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HEARTBEAT = 10  # seconds: an idle rank 0 lets the others wait at most this long
SILENCE = 300  # seconds until a rank considers the other lost; a dead one is noticed immediately
PLAN = {
    "embeddings.word_embeddings": RowwiseParallel(input_layouts=Replicate()),
    "encoder.layer.*.attention.self.query": ColwiseParallel(),
    "encoder.layer.*.attention.self.key": ColwiseParallel(),
    "encoder.layer.*.attention.self.value": ColwiseParallel(),
    "encoder.layer.*.attention.output.dense": RowwiseParallel(),
    "encoder.layer.*.intermediate.dense": ColwiseParallel(),
    "encoder.layer.*.output.dense": RowwiseParallel(),
}


def join(store: dist.Store, rank: int, world: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SILENCE))


def parallel_model(dtype: torch.dtype) -> torch.nn.Module:
    """With random weights. Every rank holds all of what the plan does not name."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(untrained(dtype), mesh, PLAN).requires_grad_(False)


class Version(NamedTuple):
    """Grows with every swap: a trainer's versions grow, and the next trainer may start over."""

    trainer: int  # counted by this job: 1 is the first
    number: int  # the trainer's number


@dataclass
class Request:
    tokens: list[list[int]]
    answer: Future[tuple[Version, torch.Tensor]] = field(default_factory=Future)  # and a row for each sentence
    came: float = field(default_factory=time.perf_counter)


class Engine:
    """The engine of one rank; thread-safe. Its thread interrupts the main one when it ends, unless close() has
    requested that."""

    def __init__(self, model: torch.nn.Module, folder: pathlib.Path | None = None) -> None:
        self.model = model
        self.rank = dist.get_rank()
        self.version = Version(0, 0)  # random weights
        self.failure: Exception | None = None
        self._folder = folder  # for check.py
        self._queue: queue.Queue[Request | str] = queue.Queue()  # on rank 0: requests, "swap", "stop"
        self._staged: queue.Queue[tuple[tessera.Batch, int, Future[None]]] = queue.Queue()
        self._swap = (0.0, 0.0)  # begin and end of the last one
        self._swaps: list[float] = []  # seconds
        self._blocked: list[float] = []  # seconds, for every request that overlapped a swap
        self._requests = 0
        self._bytes: dict[str, float] = {}  # of a version, once one has arrived
        self._checks: dict[int, dict[str, int]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def embed(self, tokens: list[list[int]]) -> Future[tuple[Version, torch.Tensor]]:
        """Rank 0: (version, a row for each sentence), when its turn comes."""
        request = Request(tokens)
        self._queue.put(request)
        return request.answer

    def swap(self, batch: tessera.Batch, trainer: int) -> None:
        """All ranks: commits what `batch` has staged from the trainer with this number, when its turn comes."""
        done: Future[None] = Future()
        self._staged.put((batch, trainer, done))
        if self.rank == 0:
            self._queue.put("swap")
        done.result(SILENCE)

    def close(self) -> None:
        """Rank 0: ends the threads of all ranks."""
        self._queue.put("stop")
        self._thread.join(SILENCE)

    def status(self) -> dict[str, Any]:
        """Rank 0: its state and statistics; times in milliseconds."""
        return {
            "version": self.version.number,
            "trainer": self.version.trainer,
            "requests": self._requests,
            "swap_ms": _figures(self._swaps),
            "blocked_ms": _figures(self._blocked),
            "bytes": self._bytes,
            "checks": self._checks,
        }

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:
            self.failure = error
        if self.failure or self.rank != 0:  # only rank 0 answers
            _thread.interrupt_main()

    def _step(self) -> bool:
        """Rank 0 chooses the next step, and all ranks take it."""
        request = self._next() if self.rank == 0 else None
        command = [request.tokens if isinstance(request, Request) else request]
        dist.broadcast_object_list(command, src=0)
        match command[0]:
            case "stop":
                return False
            case "swap":
                self._commit()
            case list(tokens):
                with torch.no_grad():  # in inference_mode() DTensor's dispatch takes three times as long
                    vectors = embed(self.model, tokens)
                if isinstance(request, Request):
                    self._answer(request, vectors)
        return True

    def _next(self) -> Request | str:
        try:
            return self._queue.get(timeout=HEARTBEAT)
        except queue.Empty:
            return "heartbeat"

    def _answer(self, request: Request, vectors: torch.Tensor) -> None:
        self._requests += 1
        begin, end = self._swap
        if request.came < end:
            self._blocked.append(end - max(begin, request.came))
        if request.answer.set_running_or_notify_cancel():
            request.answer.set_result((self.version, vectors))

    def _commit(self) -> None:
        begin = time.perf_counter()
        batch, trainer, done = self._staged.get(timeout=SILENCE)
        version = batch.commit()
        dist.barrier()  # every rank has it
        self.version = Version(trainer, version)
        self._swap = (begin, time.perf_counter())
        self._swaps.append(self._swap[1] - begin)
        self._bytes = _traffic(batch.stats)
        if self._folder:
            found = check.compare(self._folder, self.model, version)
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, found)
            self._checks[version] = {key: sum(part[key] for part in parts) for key in found}
        done.set_result(None)


def _traffic(stats: tessera.BatchStats) -> dict[str, float]:
    """The bytes of a version on its way to all ranks, and how much of that is quantised; ratios to bf16."""
    return {
        "moved": stats.bytes_moved,
        "moved_ratio": stats.batch_ratio,
        "quantised": stats.quantized_bytes_moved,
        "quantised_in_bf16": 2 * stats.quantized_elements_moved,
        "quantised_ratio": stats.quantized_ratio,  # of this rank's pieces, to the byte
    }


def _figures(seconds: list[float]) -> dict[str, float]:
    milliseconds = [1e3 * second for second in seconds] or [0.0]
    return {"count": len(seconds), "median": statistics.median(milliseconds), "max": max(milliseconds)}
