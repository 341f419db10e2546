"""Jobs of real processes for tests: fresh interpreters, deadlines on every wait, and nothing left behind.

    def train(rank, scale):                         # at the top of a module: another interpreter imports it
        with rank.connect("weights", peer="inference") as bus:
            ...
        return what the test compares               # anything that pickle knows, tensors too

    def test_weights_arrive(jobs):                  # the fixture makes and closes a Jobs
        jobs.start("trainer", train, 2.0, world=2)
        jobs.start("inference", take)
        assert jobs.results()["inference"] == [...]

A rank that raises, or dies without having been killed by the test, ends every wait of the test with JobFailure, which
shows its traceback and what it printed. Test and ranks may talk meanwhile (`tell` and `hear` on both sides), so that
nobody sleeps to be in time.
"""

from __future__ import annotations

import collections
import ctypes
import faulthandler
import importlib.abc
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any

TIMEOUT = 400  # seconds for everything that a Jobs does; these machines may be busy
_KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LEAKS = "nanobind: leaked"


class JobFailure(AssertionError):
    """A rank failed, or something took too long."""


class Rank:
    """A rank, in its own process."""

    def __init__(self, connection: Connection, job: str, rank: int, world: int, folder: str) -> None:
        self._connection = connection
        self.job = job
        self.rank = rank
        self.world = world
        self.folder = pathlib.Path(folder)  # of all ranks of the test

    def connect(self, pair: str, *, peer: str, **options: Any) -> Any:
        """tessera.connect() as this rank."""
        import tessera

        return tessera.connect(pair, role=self.job, peer=peer, rank=self.rank, world=self.world, **options)

    def tell(self, value: Any = None) -> None:
        """Sends something to the test."""
        _send(self._connection, "said", value)

    def hear(self) -> Any:
        """Waits for the test's next message."""
        return pickle.loads(self._connection.recv_bytes())


class Process:
    """A rank, seen from the test."""

    def __init__(
        self,
        jobs: Jobs,
        name: str,
        popen: subprocess.Popen[bytes] | _Forked,
        connection: Connection,
        log: IO[bytes],
    ):
        self._jobs = jobs
        self._log = log
        self._said: collections.deque[Any] = collections.deque()
        self._forgiven = False
        self.name = name
        self.popen = popen
        self.connection = connection
        self.returned = False
        self.value: Any = None

    @property
    def pid(self) -> int:
        return self.popen.pid

    def hear(self) -> Any:
        """Waits for the rank's next message."""
        self._jobs._wait_until(lambda: bool(self._said), f"{self.name} says something")
        return self._said.popleft()

    def tell(self, value: Any = None) -> None:
        self.connection.send_bytes(pickle.dumps(value))

    def result(self) -> Any:
        """Waits for its function's return value, and for its process to end."""
        self._jobs._wait_until(lambda: self.returned, f"{self.name} ends")
        self._jobs._join(self)
        return self.value

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; from now on the process may die."""
        self._forgiven = True
        self.popen.send_signal(number)
        if number == signal.SIGKILL:
            self.popen.wait(TIMEOUT)

    def output(self) -> str:
        """What it has printed."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _read(self) -> None:
        try:
            what, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._jobs._lost(self)
            if not self._forgiven and not self.returned:
                status = self.popen.wait(TIMEOUT)
                raise JobFailure(f"{self.name} died with status {status}\n{self.output()}") from None
            return
        if what == "said":
            self._said.append(value)
        elif what == "returned":
            self.returned, self.value = True, value
        elif not self._forgiven:
            raise JobFailure(f"{self.name} failed:\n{value}\n{self.output()}")


class _Forked:
    """A process forked off the fork server, with as much of Popen's interface as is needed."""

    def __init__(self, connection: Connection, log: str, environment: dict[str, str]) -> None:
        import fork_server

        self._process = fork_server.context().Process(target=_run_forked, args=(connection, log, environment))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class Jobs:
    """The processes of one test."""

    def __init__(self, folder: pathlib.Path, timeout: float = TIMEOUT, forked: bool = False) -> None:
        """folder: a short path; the ranks' runtime folder is in it. forked: Of an interpreter that has imported torch
        (fork_server), where what is tested does not depend on how a process begins and ends."""
        self._folder = folder
        self._forked = forked
        self._deadline = time.monotonic() + timeout
        self._processes: dict[str, list[Process]] = {}
        self._open: dict[Connection, Process] = {}

    def start(
        self,
        job: str,
        function: Callable[..., Any],
        *arguments: Any,
        world: int = 1,
        ranks: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        without: Sequence[str] = (),
    ) -> list[Process]:
        """Starts ranks of a job; all of them, or those of `ranks`. Each calls function(Rank, *arguments).

        environment: Variables to set. without: Modules whose import is to fail.
        """
        started = [
            self._start(job, rank, world, (function, arguments), dict(environment or {}), list(without))
            for rank in (range(world) if ranks is None else ranks)
        ]
        self._processes.setdefault(job, []).extend(started)
        return started

    def results(self) -> dict[str, list[Any]]:
        """Waits until all have ended; returns by job what its ranks returned, in the order in which they were
        started."""
        return {job: [process.result() for process in started] for job, started in self._processes.items()}

    def close(self) -> None:
        """Kills the remaining processes."""
        for process in self._all():
            if process.popen.poll() is None:
                process.popen.kill()
        for process in self._all():
            process.popen.wait(TIMEOUT)
            process.connection.close()
        leaking = [each for each in self._all() if _LEAKS in each.output()]
        for process in self._all():
            print(process.output(), end="")
            process._log.close()
        if leaking:
            raise JobFailure(f"{', '.join(each.name for each in leaking)}: nanobind reports leaks, above")

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- private

    def _start(self, job: str, rank: int, world: int, call: Any, extra: dict[str, str], without: list[str]) -> Process:
        ours, theirs = Pipe()
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("TESSERA_", "SLURM_", "OMPI_"))
        }
        for launcher in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(launcher, None)
        environment |= {"TESSERA_RUNTIME_DIR": str(self._folder / "run"), "OMP_NUM_THREADS": "1", **extra}
        log = open(self._folder / f"{job}-{rank}-{time.monotonic_ns()}.log", "w+b")  # noqa: SIM115
        popen: subprocess.Popen[bytes] | _Forked
        if self._forked:
            popen = _Forked(theirs, log.name, environment)
        else:
            popen = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        theirs.close()
        process = Process(self, f"{job}/{rank}", popen, ours, log)
        self._open[ours] = process
        left = max(self._deadline - time.monotonic(), 1.0)
        process.tell((sys.path, without, left, (job, rank, world, str(self._folder))))
        process.tell(call)
        return process

    def _all(self) -> list[Process]:
        return [process for started in self._processes.values() for process in started]

    def _wait_until(self, there: Callable[[], bool], what: str) -> None:
        while not there():
            left = self._deadline - time.monotonic()
            readable = wait(list(self._open), left) if left > 0 and self._open else []
            if not readable:
                raise JobFailure(f"waited in vain until {what}\n" + "".join(each.output() for each in self._all()))
            for connection in readable:
                if isinstance(connection, Connection) and connection in self._open:
                    self._open[connection]._read()

    def _join(self, process: Process) -> None:
        try:
            status = process.popen.wait(max(self._deadline - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            raise JobFailure(f"{process.name} returned, but its process does not end\n{process.output()}") from None
        if status != 0 and not process._forgiven:
            raise JobFailure(f"{process.name} returned and then ended with status {status}\n{process.output()}")

    def _lost(self, process: Process) -> None:
        self._open.pop(process.connection, None)


def _send(connection: Connection, what: str, value: Any) -> None:
    connection.send_bytes(pickle.dumps((what, value)))  # not send(): torch would pass memory that dies with the process


class _Blocker(importlib.abc.MetaPathFinder):
    """Makes the import of some modules fail."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in self._names:
            raise ImportError(f"{name} is blocked in this test")


def _run_forked(connection: Connection, log: str, environment: dict[str, str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    _run_rank(connection)


def _run_rank(connection: Connection) -> None:
    ctypes.CDLL(None).prctl(_KILLED_WITH_PARENT, signal.SIGKILL)
    path, without, timeout, place = pickle.loads(connection.recv_bytes())
    faulthandler.dump_traceback_later(timeout, exit=True)  # prints where it hangs
    sys.path[:] = path
    if without:
        sys.meta_path.insert(0, _Blocker(without))
    try:
        function, arguments = pickle.loads(connection.recv_bytes())
        value = function(Rank(connection, *place), *arguments)
        _send(connection, "returned", value)
    except BaseException:
        _send(connection, "raised", traceback.format_exc())
        sys.exit(1)


if __name__ == "__main__":
    import jobs  # the one that tests import, so that there is one class Rank

    jobs._run_rank(Connection(int(sys.argv[1])))
