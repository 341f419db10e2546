"""Faults of an update, one after the other, against one engine; after each its weights are compared with what it says,
bit for bit, and the next update must work."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fault_servers import Server, train
from jobs import Jobs, Process

_QUICK = 10.0  # a time-out in seconds that tests can wait for
LOST = 1000  # times that a fault is repeated so that no retry helps

# In an update, by phase: kinds that are injected there, and how often.
PHASES = {
    "recv": 1,
    "received": 1,
    "build": 1,
    "vote settle": 1,
    "vote settle, decided": 1,
    "vote ready": 1,
    "vote ready, decided": 1,
    "swap": 1,
    "vote swapped": 1,
    "vote swapped, decided": 1,
    "copy": 1,
    "copy, for good": LOST,
    "refresh": 1,
    "refresh, for good": LOST,
    "vote installed": 1,
    "vote installed, decided": 1,
    "drop": 1,
    "drop, for good": LOST,
}
STUB_ONLY = ("refresh", "refresh, for good")  # what a Llama of vLLM does not have
VLLM_ONLY = ("fill", "process", "processed", "replace", "proof")  # and what only vLLM has
PHASES |= dict.fromkeys(VLLM_ONLY[:-1], 1)
FIRST = ("plan", "proof")  # with the first version
MEETING = ("connect", "map", "register", "registered", *FIRST)
TRAINER = ("killed", "killed while it meets", "stopped", "late rank", "restarted")


@dataclass(frozen=True)
class Case:
    """A fault: where, what, and on which rank of the engine or of the trainer."""

    phase: str
    kind: str
    rank: int
    skip: int = 0
    moment: float = 0.0  # as a part of an update's time


@dataclass
class Outcome:
    """What came of it: "taken", "refused" or "torn"; the latter is told, and requests are held."""

    case: Case
    what: str
    error: str = ""


@dataclass
class Campaign:
    """An engine of some ranks, and its trainer, which is replaced where it dies."""

    jobs: Jobs
    folder: pathlib.Path
    world: int
    trainers: int = 1
    undo: bool = False
    timeout: float = 30.0
    patience: float = 6.0  # of votes
    model: str = ""  # a folder; empty: Together
    server: Any = None  # a Server, or one like it
    runs: dict[str, int] = field(default_factory=lambda: {"": 0})
    number: int = 0  # of the last contents that were sent
    usual: float = 0.2  # seconds of an update
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.server is None:
            self.server = Server(self.folder, "engine", self.world, self.undo, self.patience, self.model)
        self.ranks: list[Process] = []

    def close(self) -> None:
        self.server.close()

    # --- trainers

    def meet(self, late: float = 0.0) -> str:
        """Starts a trainer; returns why it ended, if it did."""
        options = {"timeout": self.timeout}
        self.ranks = []
        for rank in range(self.trainers):
            if rank:
                time.sleep(late)
            arguments = {"engine": self.server.url}, self.number, options, self.model
            self.ranks += self.jobs.start("trainer", train, *arguments, world=self.trainers, ranks=[rank])
        return self.met()

    def met(self) -> str:
        error = ""
        for process in self.ranks:
            what, value = process.hear()
            if what == "failed":
                error = error or value
            elif process is self.ranks[0]:
                self.runs[value] = self.number
        if error:
            self.leave()
        return error

    def leave(self) -> None:
        for process in self.ranks:
            if process.popen.poll() is None:
                with contextlib.suppress(OSError):
                    process.tell(None)
        for process in self.ranks:
            if not process._forgiven:
                process.result()
            elif process.popen.poll() is None:
                process.kill()
        self.ranks = []

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            if self.ranks[rank].popen.poll() is None:
                self.ranks[rank].kill()

    def begin(self) -> None:
        self.number += 1
        for process in self.ranks:
            process.tell("sent")

    def end(self) -> tuple[bool, int | None, str, str]:
        found = [process.hear() for process in self.ranks]
        what, number, updates, (_, seconds) = found[0]
        assert (what, number) == ("sent", self.number), found
        self.usual = 0.8 * self.usual + 0.2 * min(seconds, 2.0)
        update: tuple[bool, int | None, str, str] = updates["engine"]
        return update

    def update(self) -> tuple[bool, int | None, str, str]:
        self.begin()
        return self.end()

    # --- what must hold

    def check(self, update: tuple[bool, int | None, str, str]) -> str:
        """After an update that the trainer has seen."""
        ok, version, run, error = update
        told = self.server.call("tessera_status")
        if len({(each["run"], each["version"], each["torn"]) for each in told}) > 1 or told[0]["torn"]:
            assert not ok and version is None and self.server.paused and "are mixed" in error, (update, told)
            return "torn"
        number = self.server.serves(self.runs)
        assert not self.server.paused, update
        assert number == (self.runs[run] + version if version else 0), (update, told)
        assert self.server.shown == (str(version) if version else "default"), (update, told)
        assert ok == (number == self.number), (update, told)
        return "taken" if ok else "refused"

    def check_next(self) -> None:
        update = self.update()
        assert self.check(update) == "taken", update

    def check_alone(self) -> str:
        """Without a trainer: whatever it is, it is one version."""
        told = self.server.call("tessera_status")
        if len({(each["run"], each["version"], each["torn"]) for each in told}) > 1 or told[0]["torn"]:
            assert self.server.paused
            return "torn"
        return "taken" if self.server.serves(self.runs) == self.number else "refused"

    def run(self, case: Case) -> Outcome:
        try:
            if case.phase in MEETING:
                what, error = self.fail_to_meet(case)
            elif case.phase in TRAINER:
                what, error = self.trouble(case)
            else:
                what, error = self.fail_to_update(case)
            self.check_next()
        except BaseException as error:
            error.add_note(f"{case}, {self.world} ranks, {self.trainers} trainers, undo={self.undo}, {self.number}")
            raise
        self.outcomes.append(Outcome(case, what, error))
        return self.outcomes[-1]

    # --- faults of the engine

    def arm(self, case: Case) -> None:
        phase = case.phase.removesuffix(", for good")
        self.server.call("arm", case.rank, phase, case.kind, case.skip, PHASES.get(case.phase, 1))

    def disarm(self, case: Case) -> None:
        fired = self.server.call("disarm")
        assert fired[case.rank], f"{case} was not injected"

    def fail_to_update(self, case: Case) -> tuple[str, str]:
        self.arm(case)
        with self.waking(case):
            update = self.update()
            self.disarm(case)  # the rank may stop only now
        return self.check(update), update[3]

    def fail_to_meet(self, case: Case) -> tuple[str, str]:
        self.leave()
        before = self.server.serves(self.runs)
        self.arm(case)
        with self.waking(case):
            error = self.meet()
            if case.phase in FIRST:
                assert not error, error
                update = self.update()
            self.disarm(case)
        if case.phase in FIRST:
            return self.check(update), update[3]
        assert self.server.serves(self.runs) == before and not self.server.paused
        if error:
            again = self.meet()
            assert not again, (error, again)
        return "taken" if not error else "refused", error

    @contextlib.contextmanager
    def waking(self, case: Case) -> Iterator[None]:
        """Lets a rank that stops go on after a while."""
        if case.kind != "stop":
            yield
            return
        pid = self.server.pid(case.rank)
        over = threading.Event()

        def wake() -> None:
            while not over.is_set():
                if _state(pid) == "T":
                    over.wait(case.moment)
                    os.kill(pid, signal.SIGCONT)
                over.wait(0.01)

        thread = threading.Thread(target=wake)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            os.kill(pid, signal.SIGCONT)

    # --- faults of the trainer

    def trouble(self, case: Case) -> tuple[str, str]:
        if case.phase == "stopped":
            return self.stop(case)
        if case.phase == "killed":
            self.begin()
            time.sleep(case.moment * self.usual)
            self.kill([case.rank] if case.kind == "one" else list(range(self.trainers)))
            what = self.check_alone()
            self.kill(list(range(self.trainers)))
        elif case.phase == "killed while it meets":
            self.leave()
            self.meet_and_die(case)
            what = self.check_alone()
        else:
            self.leave()
            what = "refused"
            assert self.check_alone() == "taken"
        error = self.meet(late=case.moment if case.phase == "late rank" else 0.0)
        assert not error, error
        told = self.server.call("tessera_status")
        if not told[0]["torn"]:
            number = self.server.serves(self.runs)
            assert not self.server.paused
            version = number - self.runs[told[0]["run"]]
            assert self.server.shown == (str(version) if number else "default"), (self.server.shown, told)
        return what, ""

    def meet_and_die(self, case: Case) -> None:
        options = {"timeout": self.timeout}
        self.ranks = self.jobs.start(
            "trainer", train, {"engine": self.server.url}, self.number, options, self.model, world=self.trainers
        )
        time.sleep(case.moment)
        self.kill(list(range(self.trainers)))

    def stop(self, case: Case) -> tuple[str, str]:
        """A rank of the trainer stands still for longer than anybody waits for it."""
        self.begin()
        time.sleep(case.moment * self.usual)
        pid = self.ranks[case.rank].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.timeout + 2)
        os.kill(pid, signal.SIGCONT)
        update = self.end()
        return self.check(update), update[3]


def _state(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cases(random_: random.Random, campaign: Campaign, interrupts: bool = True) -> Iterator[Case]:
    """Without an end; each phase comes up about as often as every other one."""
    is_quick = campaign.timeout <= _QUICK
    several = campaign.world > 1
    kinds = ["error", "memory", "full"] + ["stop"] * several + ["interrupt"] * (interrupts and not several)
    leave_out = STUB_ONLY if campaign.model else VLLM_ONLY
    phases = [
        each
        for each in [*PHASES, *MEETING, *TRAINER]
        if each not in leave_out and (several or not each.startswith("vote")) and (is_quick or each != "stopped")
    ]
    while True:
        random_.shuffle(phases)
        for phase in phases:
            if phase in TRAINER:
                kind, moment = random_.choice(["one", "all"]), random_.uniform(0, 1.5)
                yield Case(phase, kind, random_.randrange(campaign.trainers), moment=moment)
                continue
            is_long = is_quick and not phase.endswith("for good")  # which would be so long for each tensor
            moment = random_.choice([0.05, 1.5 * _QUICK]) if is_long else 0.05  # longer than anybody waits
            skip = random_.randrange(2) if phase in ("build", "swap", "copy", "copy, for good") else 0
            yield Case(phase, random_.choice(kinds), random_.randrange(campaign.world), skip, moment)


def table(outcomes: list[Outcome]) -> str:
    """By phase: how many, and what came of them."""
    counted = Counter((each.case.phase, each.what) for each in outcomes)
    lines = [f"{'phase':28}{'faults':>8}{'taken':>8}{'refused':>9}{'torn, told':>12}"]
    for phase in [*MEETING, *PHASES, *TRAINER]:
        found = [counted[phase, what] for what in ("taken", "refused", "torn")]
        if any(found):
            lines.append(f"{phase:28}{sum(found):8}{found[0]:8}{found[1]:9}{found[2]:12}")
    totals = [sum(each.what == what for each in outcomes) for what in ("taken", "refused", "torn")]
    lines.append(f"{'all':28}{sum(totals):8}{totals[0]:8}{totals[1]:9}{totals[2]:12}")
    return "\n".join(lines)
