"""The command line of the harness."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from .options import Options
from .verdicts import Report, Verdict


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)}
    runs = [Options(**values)]
    if arguments.runs:
        runs = [Options(**one) for one in json.loads(arguments.runs.read_text())]
    for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[threads] = "1"  # read as torch is imported: a fork would lose threads
    from .driver import run

    bad = 0
    for number, options in enumerate(runs):
        report = run(options, _show_progress if sys.stderr.isatty() or arguments.verbose else None)
        print(report.text(arguments.lines), flush=True)
        bad += len(report.bad(Verdict.WRONG)) + (not report.total()[Verdict.RIGHT])
        if arguments.json:
            report.save(arguments.json / f"report{number}.json")
    return 1 if bad else 0


def _show_progress(report: Report) -> None:
    total = report.total()
    counts = ", ".join(f"{verdict} {total[verdict]}" for verdict in Verdict)
    print(
        f"{len(report.finished)} of {len(report.names)}, {report.seconds:.0f} s: {counts}", file=sys.stderr, flush=True
    )


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m opinfo",
        description="Asks torch's OpInfo database whether a sharded tensor acts as the whole tensor. "
        "Exit status 1: something is silently wrong, hangs or crashes.",
    )
    add = parser.add_argument
    add("--adapter", default=default.adapter, choices=("tessera", "unsharded"), help="what shards (%(default)s)")
    add("--fault", default="", help="a mistake to plant: a name of faults.FAULTS")
    add("--ranks", type=int, default=default.ranks, metavar="N", help="processes (%(default)s)")
    add("--operations", type=int, default=0, metavar="K", help="so many, drawn by the seed (all)")
    add("--only", default="", metavar="REGEX", help="operations with such names")
    add("--modes", default="", metavar="REGEX", help="modes with such names: see modes.py")
    add("--seed", type=int, default=0, help="of samples, operations and generators (%(default)s)")
    add("--samples", type=int, default=default.samples, metavar="K", help="of an operation (%(default)s)")
    add("--differ", action="store_true", help="plain float tensors and generators differ between ranks")
    add("--numbers", action="store_true", help="Python floats differ between ranks")
    add("--grad", action="store_true", help="compare gradients, with cotangents of each rank's own")
    add("--alarm", type=float, default=default.alarm, metavar="SECONDS", help="what takes longer hangs (%(default)s)")
    add("--chunk", type=int, default=default.chunk, metavar="K", help="operations between forks (%(default)s)")
    add("--lines", type=int, default=200, metavar="K", help="bad findings that are shown (%(default)s)")
    add("--json", type=Path, metavar="FOLDER", help="write report<i>.json there")
    add("--runs", type=Path, metavar="FILE", help="a JSON list of options, instead of those above")
    add("--verbose", action="store_true", help="show progress")
    return parser


if __name__ == "__main__":
    sys.exit(main())
