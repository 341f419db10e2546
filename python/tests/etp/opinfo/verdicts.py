"""What is said of cases, and a run's report."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .modes import MODES, OUT
from .options import Options


class Verdict(enum.IntEnum):
    """Worse ones are greater: the worst rank's counts."""

    RIGHT = 0
    NAMED = 1  # refused; the error has a parameter's name or the word "sharded"
    UNNAMED = 2  # another error where plain torch has none
    WRONG = 3
    HANG = 4
    CRASH = 5

    def __str__(self) -> str:
        return ("right", "refused by name", "refused unnamed", "SILENTLY WRONG", "hang", "crash")[self]


@dataclass(frozen=True)
class Finding:
    """The verdict on one case in one mode, or on its gradients there."""

    operation: str
    case: str
    row: str
    verdict: Verdict
    detail: str = ""
    is_exact: bool = True  # right to the bit
    ranks_agree: bool = True

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Finding:
        return cls(**{**values, "verdict": Verdict(values["verdict"])})


@dataclass
class Report:
    options: Options
    names: list[str]  # the operations that are asked for
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # why nothing was asked
    finished: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def counts(self) -> dict[str, collections.Counter[Verdict]]:
        """Return how many cases got each verdict, by row, in the order of modes."""
        table: dict[str, collections.Counter[Verdict]] = collections.defaultdict(collections.Counter)
        for finding in self.findings:
            table[finding.row][finding.verdict] += 1
        order = [mode.name for mode in (*MODES, OUT)]
        rank = {name: position for position, name in enumerate(order)}
        return dict(sorted(table.items(), key=lambda item: (rank.get(re.split(r": | \(", item[0])[0], -1), item[0])))

    def total(self) -> collections.Counter[Verdict]:
        return collections.Counter(finding.verdict for finding in self.findings)

    def bad(self, least: Verdict = Verdict.UNNAMED) -> list[Finding]:
        """Return the findings that are no right result and no refusal by name."""
        return [finding for finding in self.findings if finding.verdict >= least]

    def operations(self, verdict: Verdict) -> list[str]:
        return sorted({finding.operation for finding in self.findings if finding.verdict is verdict})

    def text(self, lines: int = 200) -> str:
        return "\n".join(self._lines(lines))

    def _lines(self, limit: int) -> Iterator[str]:
        inexact = collections.Counter(finding.row for finding in self.findings if not finding.is_exact)
        yield " " * 34 + "".join(f"{head!s:>17}" for head in ("right", "(of these ~)", *list(Verdict)[1:]))
        for row, verdicts in self.counts().items():
            numbers = (verdicts[Verdict.RIGHT], inexact[row], *(verdicts[verdict] for verdict in list(Verdict)[1:]))
            yield f"{row:34}" + "".join(f"{number:17}" for number in numbers)
        seen: set[tuple[str, str, Verdict]] = set()
        for finding in sorted(self.bad(), key=lambda finding: (finding.operation, -finding.verdict)):
            if (key := (finding.operation, finding.row, finding.verdict)) not in seen and len(seen) < limit:
                seen.add(key)
                yield f"  {finding.case:44} {finding.row:32} {finding.verdict}: {finding.detail[:200]}"
        total = self.total()
        fault = f" with {self.options.fault}" if self.options.fault else ""
        yield (
            f"{self.options.adapter}{fault}, {self.options.ranks} ranks, seed {self.options.seed}: "
            f"{len(self.finished)} of {len(self.names)} operations, "
            f"{len({finding.operation for finding in self.findings})} with cases, {self.seconds:.0f} s: "
            + ", ".join(f"{verdict} {total[verdict]}" for verdict in Verdict)
            + f"; operations with bad ones: {len({finding.operation for finding in self.bad()})}"
        )

    def save(self, path: Path) -> None:
        values = {
            "options": self.options.to_json(),
            "names": self.names,
            "findings": [finding.to_json() for finding in self.findings],
            "skipped": self.skipped,
            "finished": sorted(self.finished),
            "seconds": self.seconds,
        }
        path.write_text(json.dumps(values, indent=1))

    @classmethod
    def load(cls, path: Path) -> Report:
        values = json.loads(path.read_text())
        return cls(
            Options(**values["options"]),
            values["names"],
            [Finding.from_json(finding) for finding in values["findings"]],
            values["skipped"],
            set(values["finished"]),
            values["seconds"],
        )
