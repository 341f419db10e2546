"""Figures of contenders, from what their ranks have answered."""

from __future__ import annotations

import argparse
import statistics
from typing import Any, NamedTuple

from .ranks import CHECKED, Entry, compete, remember, run

Series = list[float]  # a number a round


class Figures(NamedTuple):
    """Of one contender; seconds of a step, by round."""

    wall: Series
    cpu: Series  # of all ranks together
    exposed: Series  # that the rank that waited longest waited for gathers
    gathered: float  # bytes a step, of one rank
    losses: Series  # of the first steps, averaged over the ranks
    difference: float  # of losses from DDP's, the greatest, relative
    tolerance: float

    @property
    def right(self) -> bool:
        return self.difference <= self.tolerance


class Memory(NamedTuple):
    """In bytes, of all ranks together."""

    peak: float
    state: float  # parameters, gradients and the optimiser's state


def measured(
    size: int, entries: list[Entry], options: argparse.Namespace, losses: Series | None = None
) -> dict[str, Figures]:
    """Contenders that take turns in the same processes. `losses`: DDP's, where it does not take part."""
    ranks = run(compete, size, entries, options)
    found: dict[str, Figures] = {}
    means = {
        each.name: [statistics.fmean(step) for step in zip(*(rank[each.name][0] for rank in ranks), strict=True)]
        for each in entries
    }
    expected = means["ddp"] if losses is None else losses
    for each in entries:
        rounds = list(zip(*(rank[each.name][1] for rank in ranks), strict=True))
        # The ceiling's ranks train apart: its first loss is compared.
        seen = 1 if each.name == "ceiling" else CHECKED
        differences = [abs(a / b - 1) for a, b in zip(means[each.name][:seen], expected[:seen], strict=True)]
        found[each.name] = Figures(
            wall=[max(times.wall for times in one) for one in rounds],
            cpu=[sum(times.cpu for times in one) for one in rounds],
            exposed=[max(times.exposed for times in one) for one in rounds],
            gathered=rounds[-1][0].gathered,
            losses=means[each.name],
            difference=max(differences),
            tolerance=each.kind.tolerance,
        )
    return found


def remembered(size: int, name: str, options: argparse.Namespace) -> Memory:
    ranks = run(remember, size, [Entry(name)], options)
    return Memory(sum(each[0] for each in ranks), sum(each[1] for each in ranks))


def ratios(these: Series, those: Series) -> Series:
    """Round by round: both saw the same machine."""
    return [a / b for a, b in zip(these, those, strict=True)]


def least(*series: Series) -> Series:
    """Of the contender whose median is the least: the better of several."""
    return min(series, key=statistics.median)


def shown(values: Series) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(figures: dict[str, Figures], memory: dict[str, Memory]) -> list[str]:
    """Lines; ratios are to the ceiling where it takes part."""
    base = figures.get("ceiling")
    heads = f"{'wall s':>8}{'CPU s':>8}{'x wall':>22}{'x CPU':>22}{'exposed s':>11}{'memory MB':>11}{'difference':>12}"
    lines = [f"{'':16}{heads}{'tolerance':>11}"]
    for name, each in figures.items():
        wall, cpu, exposed = (statistics.median(values) for values in (each.wall, each.cpu, each.exposed))
        times = ["", ""] if base is None else [shown(ratios(each.wall, base.wall)), shown(ratios(each.cpu, base.cpu))]
        taken = f"{memory[name].peak / 1e6:.1f}" if name in memory else ""
        lines.append(
            f"{name:16}{wall:>8.3f}{cpu:>8.3f}{times[0]:>22}{times[1]:>22}{exposed:>11.3f}{taken:>11}"
            f"{each.difference:>12.1e}{each.tolerance:>11.0e}{'' if each.right else '  LOSSES DIFFER'}"
        )
    return lines


def as_json(figures: dict[str, Figures], memory: dict[str, Memory]) -> dict[str, Any]:
    return {
        name: each._asdict() | ({"memory": memory[name]._asdict()} if name in memory else {})
        for name, each in figures.items()
    }
