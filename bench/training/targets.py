"""What is to be reached, and what was: one line a target."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from .figures import Figures, Memory, Series, least, ratios
from .ranks import CLIPPED

MICROSECONDS = 1e6


class Verdict(NamedTuple):
    what: str
    found: float
    target: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.found >= self.target if self.at_least else self.found <= self.target

    def __str__(self) -> str:
        wanted = f"at {'least' if self.at_least else 'most'} {self.target:g}"
        return f"  {self.what:72}{self.found:>9.3f}  {wanted:<14}{'' if self.reached else 'MISSED'}"


def _median(these: Series, those: Series) -> float:
    return statistics.median(ratios(these, those))


def against_peers(figures: dict[str, Figures], small: bool) -> list[Verdict]:
    """`small`: one sequence a rank; else four."""
    shape = "1 x 128" if small else "4 x 128"
    etp, ceiling, ddp = figures["etp"], figures["ceiling"], figures["ddp"]
    fsdp = [figures["fsdp2-block"], figures["fsdp2-weight"]]
    fsdp_wall, fsdp_cpu = least(*(each.wall for each in fsdp)), least(*(each.cpu for each in fsdp))

    def of(one: float, four: float) -> float:
        return one if small else four

    return [
        Verdict(f"{shape}: CPU seconds, times the ceiling's", _median(etp.cpu, ceiling.cpu), of(1.12, 1.05)),
        Verdict(f"{shape}: step time, times the ceiling's", _median(etp.wall, ceiling.wall), of(1.25, 1.10)),
        Verdict(f"{shape}: tokens a second, times FSDP2's", _median(fsdp_wall, etp.wall), of(1.4, 1.12), True),
        Verdict(f"{shape}: CPU seconds, times FSDP2's", _median(etp.cpu, fsdp_cpu), of(0.7, 0.85)),
        Verdict(f"{shape}: tokens a second, times DDP's", _median(ddp.wall, etp.wall), of(1.1, 1.0), True),
    ]


def of_memory(memory: dict[str, Memory], size: int) -> list[Verdict]:
    etp = memory["etp"].peak
    fsdp = min(memory["fsdp2-block"].peak, memory["fsdp2-weight"].peak)
    return [
        Verdict("peak memory of all ranks, times FSDP2's", etp / fsdp, 0.8),
        Verdict("peak memory of all ranks, times DDP's", etp / memory["ddp"].peak, 0.85 if size == 2 else 0.65),
    ]


def of_formats(figures: dict[str, Figures]) -> list[Verdict]:
    mixed = _median(figures["fsdp2-mixed"].wall, figures["etp-mixed"].wall)
    found = [Verdict("bf16 computation, fp32 shards: tokens a second, times FSDP2's", mixed, 1.2, True)]
    for format in ("nvfp4", "mxfp8"):
        ratio = _median(figures[f"etp-{format}"].wall, figures["etp-bf16"].wall)
        found.append(Verdict(f"{format} gathers: step time, times that of bf16 gathers", ratio, 1.15))
    return found


def of_movement(figures: dict[str, Figures]) -> list[Verdict]:
    what = "streams of 0.1 GB/s: step time of nvfp4 gathers, times that of bf16"
    ratio, mixed = (
        _median(figures[nvfp4].wall, figures[bf16].wall)
        for nvfp4, bf16 in (("nvfp4", "bf16"), ("mixed-nvfp4", "mixed"))
    )
    return [Verdict(what, ratio, 0.75), Verdict(f"{what}, all in bf16", mixed, 0.75)]


def of_prefetch(figures: dict[str, Figures]) -> list[Verdict]:
    ratio = _median(figures["ahead"].exposed, figures["on-demand"].exposed)
    return [Verdict("movement takes half the compute time: wait with prefetch, times without", ratio, 1 / 3)]


def of_checkpoints(figures: dict[str, Figures], memory: dict[str, Memory]) -> list[Verdict]:
    ratio = _median(figures["etp-checkpoint"].wall, figures["etp"].wall)
    peak = memory["etp-checkpoint"].peak / memory["etp"].peak
    return [
        Verdict("4 x 128, blocks recomputed: step time, times that without", ratio, 1.45),
        Verdict("4 x 128, blocks recomputed: peak memory, times that without", peak, 1.0),
    ]


def of_clipping(ranks: list[dict[str, Series]]) -> list[Verdict]:
    def slowest(name: str) -> float:
        return max(statistics.median(rank[name]) for rank in ranks)

    return [
        Verdict("torch's clip_grad_norm_, us a parameter", slowest("torch") / CLIPPED * MICROSECONDS, 150),
        Verdict(f"etp.clip_grad_norm_ of {CLIPPED} parameters, us", slowest("etp") * MICROSECONDS, 1000),
    ]


def missed(verdicts: list[Verdict], say: Callable[[str], None]) -> int:
    for each in verdicts:
        say(str(each))
    return sum(not each.reached for each in verdicts)
