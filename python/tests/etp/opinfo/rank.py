"""One rank of a run: it asks cases in the order of all ranks, and rank 0 writes down what was found.

Ranks stay in step whatever fails where: a step is run by `Lockstep`, after which each rank knows whether it failed on
another. From the first failure on nobody waits for anybody until all tell their verdicts.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed

from . import database
from .adapters import ADAPTERS, Adapter, Box
from .cases import Case, cases_of
from .compare import Mismatch, Snapshot, add_to_digest, new_digest, require_equal, same_bits, take_snapshot
from .faults import FAULTS
from .modes import Mode
from .observe import Observation, cotangents, dense, differentiable, expect, observe, other_leaves
from .options import Options
from .verdicts import Finding, Verdict

T = TypeVar("T")
_NAMED = re.compile(r"theta\d|\bsharded\b")
_PR_SET_PDEATHSIG = 1
_PATIENCE = 300.0  # seconds for what no adapter takes part in, on a busy machine


class FailedElsewhereError(Exception):
    """A step failed on another rank."""


class Lockstep:
    """Runs steps on all ranks. A rank that failed leaves at the step at which the others hear of it."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._group = torch.distributed.new_group(backend="gloo")
        self._failed = False

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, and forget failures."""
        self._failed = False
        values: list[Any] = [None] * self._ranks
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def run(self, step: Callable[[], T]) -> T:
        """Return what the step does; steps may be within steps."""
        if self._failed:
            raise FailedElsewhereError
        error = None
        try:
            result = step()
        except Exception as raised:
            error = raised
        if not self._failed:  # a step within has not told it already
            self._failed = any(self.exchange(error is not None))
        if error is not None:
            raise error
        if self._failed:
            raise FailedElsewhereError
        return result


class Rank:
    def __init__(self, options: Options, rank: int, folder: Path, entered: set[str]) -> None:
        self._options = options
        self._rank = rank
        self._entered = entered  # cases that other ranks before these have entered
        self._records = (folder / "records").open("a")
        self._trace = (folder / f"trace{rank}").open("w")
        self._kept: list[Box] = []  # those that could not be closed
        self._enter("", "", "start")
        meeting = f"file://{folder}/meeting"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=options.ranks)
        self._lockstep = Lockstep(options.ranks)
        self._adapter: Adapter = ADAPTERS[options.adapter](options)
        if options.fault:
            FAULTS[options.fault].apply(self._adapter)

    def ask(self, names: Sequence[str]) -> None:
        for name in names:
            operation = database.load()[name]
            self._enter(name, "", "samples")
            try:
                cases = list(cases_of(operation, self._options))
            except Exception as error:
                self._write(skipped=f"{name}: no samples: {error}"[:200])
                cases = []
            for case in cases:
                if case.name not in self._entered:
                    self._ask_case(case)
            self._write(finished=name)
        faulthandler.cancel_dump_traceback_later()

    def _write(self, **record: Any) -> None:
        if self._rank == 0:
            print(json.dumps(record), file=self._records, flush=True)

    def _enter(self, operation: str, case: str, row: str) -> None:
        """Note where ranks are, for the driver, and set the alarm."""
        alarm = _PATIENCE if row in ("start", "samples", "plain torch") else 2 * self._options.alarm
        faulthandler.dump_traceback_later(alarm, exit=True, file=self._trace)
        self._write(at=[operation, case, row])

    def _ask_case(self, case: Case) -> None:
        self._enter(case.operation.name, case.name, "plain torch")
        modes = case.modes(self._options)
        expectations = [expect(case, mode, self._options) for mode in modes]
        digests = self._lockstep.exchange([_digest(case, expected) for expected in expectations])
        box: Box | None = None
        for mode, expected, of_ranks in zip(modes, expectations, zip(*digests, strict=True), strict=True):
            if len(set(of_ranks)) > 1:
                self._write(skipped=f"{case.name} | {mode.name}: plain torch is not deterministic")
            elif expected is not None:
                box = box or self._shard(case)
                if box is None:
                    return
                self._enter(case.operation.name, case.name, mode.name)
                findings = self._ask_mode(box, case, mode, expected)
                self._record(findings)
                if mode.writes or any(finding.verdict is not Verdict.RIGHT for finding in findings):
                    self._close(box, case)
                    box = None
                else:
                    for parameter in box.parameters():
                        parameter.grad = None
        if box is not None:
            self._close(box, case)
        del box, expectations
        # By hand, and so at one place on all ranks: the end of a sharded tensor may be one of a collective thing.
        gc.collect()

    def _shard(self, case: Case) -> Box | None:
        self._enter(case.operation.name, case.name, "sharding")
        boxes: list[Box] = []

        def shard(exact: dict[str, bool]) -> None:
            boxes.append(self._lockstep.run(lambda: self._adapter.shard(case.sharded)))

        self._record(self._judge(case, "sharding", shard))
        return boxes[0] if boxes else None

    def _close(self, box: Box, case: Case) -> None:
        """Close a module on all ranks at once: the end of one on one rank may end another call of the others."""
        self._enter(case.operation.name, case.name, "closing")

        def close(exact: dict[str, bool]) -> None:
            self._kept.append(box)
            self._lockstep.run(lambda: self._adapter.close(box))
            self._kept.pop()

        self._record(self._judge(case, "closing", close))

    def _record(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self._write(finding=finding.to_json())
        if any(finding.verdict is Verdict.HANG for finding in findings):
            os._exit(0)  # the group is out of step: the driver makes another

    def _ask_mode(self, box: Box, case: Case, mode: Mode, expected: list[Observation]) -> list[Finding]:
        findings = self._judge(case, mode.name, lambda exact: self._compare(box, case, mode, expected, exact))
        if not mode.writes:
            return findings
        must_refuse = self._adapter.shares and _conflicts(expected)
        if any(finding.verdict in (Verdict.NAMED, Verdict.UNNAMED) for finding in findings):
            after = self._judge(case, mode.name, lambda _: self._require_unwritten(box, case, expected, must_refuse))
            findings = after if any(finding.verdict is Verdict.WRONG for finding in after) else findings
        return [_must_refuse(finding) for finding in findings] if must_refuse else findings

    def _compare(self, box: Box, case: Case, mode: Mode, expected: list[Observation], exact: dict[str, bool]) -> None:
        """Compare one call with plain torch's; fill `exact` by row with whether all bits are equal."""
        own = expected[self._rank]
        run = self._lockstep.run
        seen = observe(self._adapter, box, case, mode, self._options, self._rank, self._lockstep, own)

        def compare() -> bool:
            exact_parts = [
                require_equal(part, seen.parts[part], own.parts[part], case.has_values) for part in seen.parts
            ]
            return all(exact_parts)

        exact[mode.name] = run(compare)
        if "gradient" not in own.parts:
            return
        row = f"{mode.name}: gradient"

        def backward() -> None:
            outputs = differentiable(case, seen.output)
            if not outputs:
                raise Mismatch("gradient: no output has a graph")
            torch.autograd.backward(outputs, cotangents(outputs, self._rank))

        run(backward)
        gradients = [
            take_snapshot(dense(self._adapter.gradient(parameter), parameter), self._adapter.whole)
            for parameter in box.by_place().values()
        ]
        others = [take_snapshot(dense(leaf.grad, leaf), lambda it: it) for leaf in other_leaves(case, seen.arguments)]
        exact[row] = run(lambda: require_equal("gradient", gradients + others, own.parts["gradient"]))

    def _require_unwritten(self, box: Box, case: Case, expected: list[Observation], must_refuse: bool) -> None:
        """Require that a refused write has left no trace; of a list, earlier elements may be written."""
        try:
            now = self._lockstep.run(
                lambda: [take_snapshot(tensor, self._adapter.whole) for tensor in box.by_place().values()]
            )
        except Exception as error:
            if must_refuse and _NAMED.search(str(error)):
                return  # ranks wrote values of their own, which is noticed, and refused, where they are used
            raise
        before = [take_snapshot(tensor, lambda it: it) for tensor in case.sharded.values()]
        wanted = expected[self._rank].parts["next forward"]

        def compare() -> None:
            for actual, old, new in zip(now, before, wanted, strict=True):
                if not (case.operation.is_list and same_bits([actual], [new])):
                    require_equal("argument after the refusal", [_in_the_shape_of(actual, old)], [old])

        self._lockstep.run(compare)

    def _judge(self, case: Case, row: str, work: Callable[[dict[str, bool]], None]) -> list[Finding]:
        """Return the findings of all ranks on a piece of work, which are the same on each."""
        began = time.monotonic()
        exact: dict[str, bool] = {}
        verdicts: dict[str, tuple[Verdict, str]] = {}
        try:
            self._lockstep.run(lambda: work(exact))
        except FailedElsewhereError:
            pass
        except Mismatch as error:
            verdicts[row if row not in exact else f"{row}: gradient"] = (Verdict.WRONG, str(error))
        except Exception as error:
            verdicts[row if row not in exact else f"{row}: gradient"] = self._refusal(error, began)
        of_ranks = self._lockstep.exchange(
            {name: (Verdict.RIGHT, "" if bits else "~") for name, bits in exact.items()} | verdicts
        )
        return [
            _merge(case, name, [verdicts[name] for verdicts in of_ranks if name in verdicts], self._options.ranks)
            for name in dict.fromkeys(name for verdicts in of_ranks for name in verdicts)
        ]

    def _refusal(self, error: Exception, began: float) -> tuple[Verdict, str]:
        text = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        if time.monotonic() - began > 0.9 * self._options.alarm or "Deadline" in type(error).__name__:
            return Verdict.HANG, text
        return Verdict.NAMED if _NAMED.search(text) else Verdict.UNNAMED, text


def _merge(case: Case, row: str, of_ranks: Sequence[tuple[Verdict, str]], ranks: int) -> Finding:
    """Return the worst rank's verdict."""
    verdict, detail = max(of_ranks, key=lambda of_rank: (of_rank[0], len(of_rank[1])))
    if verdict is Verdict.HANG:
        detail = " || ".join(f"{verdict}: {text}" for verdict, text in of_ranks)
    agree = len(of_ranks) == ranks and len({verdict for verdict, _ in of_ranks}) == 1
    return Finding(case.operation.name, case.name, row, verdict, detail, detail != "~", agree)


def _must_refuse(finding: Finding) -> Finding:
    """Return the verdict on a case in which all ranks must refuse."""
    verdict, detail = finding.verdict, finding.detail
    if verdict is Verdict.RIGHT or (verdict is Verdict.NAMED and not finding.ranks_agree):
        verdict, detail = Verdict.WRONG, f"not refused by all ranks, but {finding.verdict}: {finding.detail}"
    row = f"{finding.row} (must refuse)"
    return Finding(finding.operation, finding.case, row, verdict, detail, True, finding.ranks_agree)


def _conflicts(expected: Sequence[Observation]) -> bool:
    """Return whether plain torch writes other values into a sharded argument on another rank."""
    first, *others = (observation.parts["next forward"] for observation in expected)
    return not all(same_bits(first, other) for other in others)


def _digest(case: Case, expected: Sequence[Observation] | None) -> str | None:
    if expected is None:
        return None
    digest = new_digest()
    for observation in expected:
        for part, values in observation.parts.items():
            digest.update(part.encode())
            add_to_digest(digest, values, case.has_values)
    return str(digest.hexdigest())


def main(options: Options, rank: int, folder: Path, names: Sequence[str], entered: set[str]) -> None:
    """Be one rank, in a process of its own that was forked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.filterwarnings("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    torch.set_num_threads(1)
    gc.freeze()
    gc.disable()
    Rank(options, rank, folder, entered).ask(names)
    os._exit(0)  # without the ends of groups and tensors


def _in_the_shape_of(actual: Snapshot, old: Snapshot) -> Snapshot:
    """Return values in the shape that they had: torch's own Python changes sizes before it writes, and leaves them so
    in an error (dropout3d unsqueezes in place)."""
    if actual.value.numel() != old.value.numel():
        return actual
    return dataclasses.replace(actual, shape=old.shape, value=actual.value.reshape(old.shape))
