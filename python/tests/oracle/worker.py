"""One process of a launch: has torch produce its part of every case, transfers it over the bus, and records both."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import fork_server
import tessera
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .buffers import Buffer
from .cases import Case, Launch, Side
from .reference import (
    DTYPES,
    Torch,
    asks_for_full,
    asks_for_redistribute,
    broadcast,
    cast,
    near,
    rank_order,
    slack,
    to_bytes,
    whole,
)

DEADLINE = 400  # seconds, of everything that waits for another process
VERSION = 7


@dataclass(frozen=True)
class Local:
    """A local tensor: its elements in row-major order, and its shape as torch has it."""

    data: bytes
    shape: tuple[int, ...]


@dataclass
class Record:
    """The results of one process for one case."""

    source: Local | None = None
    expected: Local | None = None
    received: Local | None = None
    problems: list[str] = field(default_factory=list)  # that torch does not agree with itself, or memory is harmed


# Changes the destination's layout that Tessera gets, to check that the comparison notices.
Sabotage = Callable[[tessera.Layout], tessera.Layout]


def run(launch: Launch, cases: list[Case], process: int, folder: Path, port: int, sabotage: Sabotage | None) -> None:
    """The whole life of a process; leaves `folder`/N.records or N.error."""
    output = os.open(folder / f"{process}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(DEADLINE + 30)
    try:
        fork_server.require_preloaded()
        records = _Process(launch, cases, process, folder, port, sabotage).run()
        (folder / f"{process}.records").write_bytes(pickle.dumps(records))
    except BaseException:
        (folder / f"{process}.error").write_text(traceback.format_exc())
        sys.stdout.flush()
        os._exit(1)  # whatever gloo's threads wait for


class _Process:
    def __init__(
        self, launch: Launch, cases: list[Case], process: int, folder: Path, port: int, sabotage: Sabotage | None
    ) -> None:
        self._launch = launch
        self._cases = cases
        self._process = process
        self._folder = folder
        self._port = port
        self._sabotage = sabotage
        self._records = {case.index: Record() for case in cases}
        self._sources: dict[int, Buffer] = {}
        self._destinations: dict[int, Buffer] = {}

    def run(self) -> dict[int, Record]:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["TESSERA_RUNTIME_DIR"] = str(self._folder / "run")
        for variable in ("TESSERA_STORE", "TESSERA_NAMESPACE", "TESSERA_AGENT"):
            os.environ.pop(variable, None)
        deadline = timedelta(seconds=DEADLINE)
        store = dist.TCPStore("127.0.0.1", self._port, timeout=deadline)  # served by the test
        world = self._launch.world
        dist.init_process_group("gloo", store=store, rank=self._process, world_size=world, timeout=deadline)
        self._torch = Torch(self._process, self._cases)
        for case in self._cases:
            try:
                self._prepare(case)
            except Exception as error:
                error.add_note(str(case))
                raise
        self._transfer()
        for case in self._cases:
            self._look(case)
        dist.destroy_process_group()
        return self._records

    # --- torch

    def _prepare(self, case: Case) -> None:
        """Both sides of a case, from torch."""
        record = self._records[case.index]
        full, redistributed = torch.empty_like(whole(case)), None
        if self._process in case.src.grid.processes:
            source = self._torch.source(case)
            local = self._torch.local(source, case.dtype)
            record.source = Local(to_bytes(local), tuple(local.shape))
            self._sources[case.index] = self._buffer(case, local.shape, case.dtype, case.scattered_src)
            self._sources[case.index].fill(local)
            if asks_for_full(case):
                full = self._torch.full(case, source)
            if asks_for_redistribute(case):
                redistributed = self._torch.redistributed(case, source)
        exact = whole(case) if case.src.reduce_op is None else rank_order(case)
        if asks_for_full(case):
            full = broadcast(full, case.src.grid.processes[0])
            if case.content == "floats":
                if not near(full, exact, slack(case)):
                    record.problems.append("torch's full_tensor is far from the rank-order sum")
            elif to_bytes(full) != to_bytes(exact):
                record.problems.append("torch's full_tensor is not what was distributed")
        else:
            full = exact
        if self._process not in case.dst.grid.processes:
            return
        told = self._torch.local(
            self._torch.distribute(exact if case.content == "floats" else full, case.dst, case.dtype), case.dtype
        )
        if redistributed is not None and not self._agree(case, redistributed, told):
            record.problems.append("torch's redistribute and distribute_tensor do not agree")
        wanted = cast(told, case.target)
        record.expected = Local(to_bytes(wanted), tuple(wanted.shape))
        self._destinations[case.index] = self._buffer(case, wanted.shape, case.target, case.scattered_dst)

    def _agree(self, case: Case, redistributed: torch.Tensor, told: torch.Tensor) -> bool:
        if case.content != "floats":
            return to_bytes(redistributed) == to_bytes(told)
        bound = self._torch.distribute(slack(case), case.dst, "f64")
        return near(redistributed, told, self._torch.local(bound, "f64"))

    def _buffer(self, case: Case, shape: Any, dtype: str, scattered: bool) -> Buffer:
        rng = random.Random(case.data_seed + self._process) if scattered else None
        return Buffer(tuple(shape), DTYPES[dtype], rng)

    # --- Tessera

    def _transfer(self) -> None:
        """A process that is a rank of both jobs has a bus and a thread for each."""
        work: list[Callable[[], tessera.Bus]] = []
        if self._process in self._launch.trainers:
            work.append(self._send)
        if self._process in self._launch.inference:
            work.append(self._receive)
        with ThreadPoolExecutor(2) as pool:
            buses = [future.result() for future in [pool.submit(each) for each in work]]
        dist.barrier()  # a staged send ends before it is received
        for bus in buses:
            bus.close()

    def _send(self) -> tessera.Bus:
        bus = self._connect("trainer", "inference", self._launch.trainers)
        tensors = {
            case.name: self._registered(case, case.src, self._sources[case.index], self._launch.trainers)
            for case in self._cases
            if case.index in self._sources
        }
        batch = bus.register(tensors, mode=self._launch.sender, direction="send")
        batch.send(version=VERSION, timeout=DEADLINE)
        return bus

    def _receive(self) -> tessera.Bus:
        bus = self._connect("inference", "trainer", self._launch.inference)
        tensors = {
            case.name: self._registered(case, case.dst, self._destinations[case.index], self._launch.inference)
            for case in self._cases
            if case.index in self._destinations
        }
        batch = bus.register(tensors, mode=self._launch.receiver, direction="recv")
        version = batch.recv(timeout=DEADLINE)
        assert version == VERSION, version
        return bus

    def _connect(self, role: str, peer: str, processes: tuple[int, ...]) -> tessera.Bus:
        return tessera.connect(
            "weights",
            role=role,
            peer=peer,
            rank=processes.index(self._process),
            world=len(processes),
            timeout=DEADLINE,
            threads=1,
        )

    def _registered(self, case: Case, side: Side, buffer: Buffer, job: tuple[int, ...]) -> Any:
        """Arguments for the bus: torch's mesh and placements, whose ranks are shifted into the job's."""
        mesh = self._torch.mesh(side.grid)
        placements = self._torch.placements(side, case.shape)
        if case.dtensors and job[0] == 0 and self._sabotage is None:
            return DTensor.from_local(
                buffer.tensor,
                mesh,
                placements,
                run_check=False,
                shape=torch.Size(case.shape),
                stride=torch.empty(case.shape, device="meta").stride(),
            )
        layout = tessera.Layout(mesh, placements).shifted(-job[0])
        if self._sabotage is not None and side is case.dst:
            layout = self._sabotage(layout)
        return buffer.tensor, layout, case.elements_shape

    def _look(self, case: Case) -> None:
        """The result."""
        record = self._records[case.index]
        if case.index in self._destinations:
            buffer = self._destinations[case.index]
            record.received = Local(to_bytes(buffer.tensor), tuple(buffer.tensor.shape))
            if not buffer.intact():
                record.problems.append("memory beside the destination's elements was written")
        if case.index in self._sources:
            assert record.source is not None
            buffer = self._sources[case.index]
            if to_bytes(buffer.tensor) != record.source.data or not buffer.intact():
                record.problems.append("the sender's memory was written")
